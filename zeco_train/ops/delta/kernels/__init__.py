"""The kernels of the delta rules, by phase (docs/mathematics.md). Triton only."""
