"""A scan that passes zero states, to measure a model on its own shard alone."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.seam import LaunchedScan, ScanRequest, StateScan


class _Zeroed:
    """A `LaunchedScan` whose states are zeros."""

    def __init__(self, pending: LaunchedScan) -> None:
        self._pending = pending

    def wait(self) -> Tensor:
        """See `LaunchedScan`."""
        # The scan runs all the same: `finish` and `carry_out` must follow its `wait`.
        return torch.zeros_like(self._pending.wait())

    def finish(self) -> None:
        """See `LaunchedScan`."""
        self._pending.finish()

    def carry_out(self) -> Tensor:
        """See `LaunchedScan`."""
        return torch.zeros_like(self._pending.carry_out())


class ZeroedScan:
    """Wraps a `StateScan`; the states that ranks and segments receive are zero. Softmax layers are as they were."""

    def __init__(self, scan: StateScan) -> None:
        self._scan = scan
        self.attention = getattr(scan, "attention", None)
        neighbour = getattr(scan, "neighbour", None)
        self.neighbour = None if neighbour is None else ZeroedScan(neighbour)

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """See `StateScan`."""
        return _Zeroed(self._scan.launch(request))
