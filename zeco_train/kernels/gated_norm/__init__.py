"""The kernels of the gated RMS norm (`models.modules`). Triton only."""
