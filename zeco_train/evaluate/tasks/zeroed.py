"""A scan that passes zero states, to measure a model on its own shard alone."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.backend import TappedScan


class ZeroedScan(TappedScan):
    """The states that ranks and segments receive are zero. The scan runs all the same."""

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        """See `TappedScan`."""
        return torch.zeros_like(state)

    def carried(self, request: ScanRequest, state: Tensor) -> Tensor:
        """See `TappedScan`."""
        return torch.zeros_like(state)
