"""Sequence parallelism, one sequence over several ranks: start at `zeco.py`; layers use `zeco_train/ops/seam.py`."""
