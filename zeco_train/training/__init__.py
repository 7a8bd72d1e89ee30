"""Training: construction of a run, the optimizer step, and the training loop."""
