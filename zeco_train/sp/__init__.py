"""Sequence parallelism: one sequence over several ranks. Start at `zeco.py`; what layers see is `zeco_train/ops/seam.py`."""
