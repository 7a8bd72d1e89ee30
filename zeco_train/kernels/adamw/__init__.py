"""The kernel of AdamW (`zeco_train.training.optim.adamw`). Triton only."""
