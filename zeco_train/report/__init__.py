"""Comparisons of runs and benchmarks: pages, figures, and the W&B dashboard."""
