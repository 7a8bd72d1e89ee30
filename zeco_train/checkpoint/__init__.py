"""Checkpoints: saving, verification before use, loading, retention."""
