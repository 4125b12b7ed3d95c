"""Numba kernels over host memory: exact, chunk-independent, GIL-free."""
