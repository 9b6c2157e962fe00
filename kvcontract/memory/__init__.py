"""Bytes on a device: binding, copy programs, repack, checksums."""
