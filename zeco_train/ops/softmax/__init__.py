"""Softmax attention on one device: what a span of queries reads, and its kernels. Sharding is in `zeco_train.sp`."""
