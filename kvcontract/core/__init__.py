"""What every room above the contract leans on: compiled kernels, and later clocks, counters and events."""
