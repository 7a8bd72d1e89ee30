"""Checkpoints: written and read, checked before anything of them is used, kept and removed."""
