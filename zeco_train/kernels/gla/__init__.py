"""The kernels of gated linear attention, by phase (DESIGN, section 3). Triton only."""
