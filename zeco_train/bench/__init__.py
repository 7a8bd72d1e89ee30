"""Benchmarks. Each verifies the correctness of an operation before timing it.

`torchrun … -m zeco_train.bench collectives|operator|model|decode [KEY=VALUE …]` compares the sequence-parallel
backends: the collective alone, one layer's operator, and the whole training step; and measures generation.
"""
