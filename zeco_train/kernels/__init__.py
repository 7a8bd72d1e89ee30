"""Triton kernels. Imported only on machines with a CUDA device."""
