"""Every operator as a plain differentiable function, on one rank or over the ranks of a process group.

    o, _ = functional.NAME(q, k, v, …)                    # this process has whole sequences
    ranks = functional.connect()                          # once: the ranks of torch.distributed share each sequence
    o, _ = functional.NAME(q, k, v, …, ranks=ranks)       # of this rank's tokens, exact over all ranks

`functional.__all__` has the names, and `help` of each its shapes; docs/from_python.md explains them. Like
`zeco_train.sp` it imports neither `data` nor `models`, so a project may have packages of these names.
"""

from __future__ import annotations

from zeco_train.sp.functions import FUNCTIONS, Ranks, connect

__all__ = ["Ranks", "connect"]
# Not one by one: the registry has the names. Editors and type checkers read functional.pyi.
__all__ += FUNCTIONS
globals().update(FUNCTIONS)
