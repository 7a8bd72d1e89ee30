"""The copy of gradients into the buffer of a reduction (`zeco_train.distributed.packing`). Triton only."""
