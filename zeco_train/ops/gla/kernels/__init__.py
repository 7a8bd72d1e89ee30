"""The kernels of gated linear attention, by phase (docs/mathematics.md). Triton only."""
