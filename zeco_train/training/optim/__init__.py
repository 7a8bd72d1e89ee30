"""Optimizers, one file each: `spec.py` says what a file describes, `registry.py` has them by name."""
