"""Models. They take a `SequenceShard` and know nothing of ranks."""
