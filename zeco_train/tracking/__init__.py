"""Records of a run: its folder, metrics, starts, plots, and the W&B and TensorBoard loggers."""
