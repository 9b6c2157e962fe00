"""A deterministic simulator of stores: virtual time, seeded schedules, faults as data."""
