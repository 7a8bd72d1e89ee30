"""Benchmarks of collectives, operators, attention, training steps and generation, each checked before it is timed."""
