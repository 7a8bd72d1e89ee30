"""Sequences that no file holds: tasks that ask at the end for what was said before, made from (seed, index) alone."""
