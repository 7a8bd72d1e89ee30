"""Optimizers, one file each; `optimizer_spec.py` has their descriptor, `optimizer_registry.py` lists them by name."""
