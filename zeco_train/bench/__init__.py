"""Benchmarks. Each checks that what it times is correct before it times it.

`torchrun … -m zeco_train.bench collectives|operator|model|decode [KEY=VALUE …]` compares the ways of joining a sequence
over ranks: the collective alone, one layer's operator, and the whole training step; and measures generation.
`… operator_cpu|loader|documents|checkpoint` measure the operator on a CPU, the data's way in, and what a save costs.
"""
