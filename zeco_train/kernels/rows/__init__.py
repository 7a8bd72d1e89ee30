"""The kernels that round rows and columns of matrices to fp8 (`zeco_train.ops.linear.rows`). Triton only."""
