"""The kernels of the gated RMS norm (`zeco_train.ops.gated_norm`). Triton only."""
