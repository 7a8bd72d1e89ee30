"""A scan that hands on nothing: what a model can do of its own shard alone."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.sp.base import PendingScan, StateScan


class _Zeroed:
    """A `PendingScan` whose states are zeros."""

    def __init__(self, pending: PendingScan) -> None:
        self._pending = pending

    def wait(self) -> Tensor:
        """See `PendingScan`."""
        return torch.zeros_like(self._pending.wait())

    def finish(self) -> None:
        """See `PendingScan`."""
        self._pending.finish()

    def carry_out(self) -> Tensor:
        """See `PendingScan`."""
        return torch.zeros_like(self._pending.carry_out())


class ZeroedScan:
    """A `StateScan` as another one, but for the states that ranks and segments receive: they are zero."""

    def __init__(self, scan: StateScan) -> None:
        self._scan = scan

    def launch(
        self,
        state: Tensor,
        log_decay: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> PendingScan:
        """See `StateScan`."""
        pending = self._scan.launch(state, log_decay, reverse=reverse, carry_in=carry_in, want_carry=want_carry)
        return _Zeroed(pending)
