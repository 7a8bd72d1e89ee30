"""Sequence parallelism, one sequence over several ranks: start at `zeco.py`; layers see `zeco_train/ops/seam.py`."""
