"""Copies of gradients and weights around FSDP2's communication (`zeco_train.distributed`). Triton only."""
