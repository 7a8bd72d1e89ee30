"""Loads one rank's shards of sequences: `loader.py` makes the batches, `sequences.py` reads a store."""
