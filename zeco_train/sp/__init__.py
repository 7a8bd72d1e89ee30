"""Sequence parallelism: one sequence over several ranks. Start at `base.py` (the seam), then `zeco.py`."""
