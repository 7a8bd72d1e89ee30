"""The kernels of the elementwise recurrence (`zeco_train.ops.hgrn`). Triton only."""
