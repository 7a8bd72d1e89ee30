"""What a run leaves behind: its folder, metrics, starts, pictures, and what goes to W&B and TensorBoard."""
