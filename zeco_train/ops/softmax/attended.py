"""The result of softmax attention to some keys, which blocks of keys merge by."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """Attention of a span to some keys.

    Attributes:
        o: [B, N, H, V], softmax over these keys; 0 for a query that reads none of them.
        lse: [B, H, N] fp32 (fp64 for fp64), log of the sum of exp(scores) over these keys; −inf for such a query.
    """

    o: Tensor
    lse: Tensor
