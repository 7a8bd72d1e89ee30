"""Softmax attention over the shards of a sequence: one method a file, see `method_registry`."""
