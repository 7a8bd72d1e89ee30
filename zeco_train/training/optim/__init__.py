"""Optimizers, one file each: `spec.py` defines their descriptor, `optimizer_registry.py` lists them by name."""
