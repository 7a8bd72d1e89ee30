"""The ranks: their mesh, the device of each, how a model is spread over them, and what must be the same on all."""
