"""Which page holds what: keys, index, pages, requests; numpy and numba, no tensors."""
