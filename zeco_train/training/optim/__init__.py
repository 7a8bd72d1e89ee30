"""Optimizers, one file each: `spec.py` defines their descriptor, `registry.py` lists them by name."""
