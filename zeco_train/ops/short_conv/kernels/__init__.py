"""The kernels of the short convolution (`zeco_train.ops.short_conv`). Triton only."""
