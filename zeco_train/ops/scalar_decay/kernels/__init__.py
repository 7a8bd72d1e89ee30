"""The kernels of linear attention with one decay per head, by phase (docs/mathematics.md). Triton only."""
