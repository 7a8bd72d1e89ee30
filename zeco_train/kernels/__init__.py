"""Triton kernels. Nothing here is imported where there is no CUDA device."""
