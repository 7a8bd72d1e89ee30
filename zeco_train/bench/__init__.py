"""Benchmarks. Each checks that what it times is correct before it times it."""
