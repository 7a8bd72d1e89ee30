"""Synthetic recall tasks, which ask at the end about earlier parts of a sequence; generated from (seed, index)."""
