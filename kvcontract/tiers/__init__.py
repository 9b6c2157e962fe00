"""Places below the device: buffers in, buffers out; no tensors."""
