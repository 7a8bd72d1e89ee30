"""Data parallelism: every rank holds whole sequences, nothing crosses ranks, and the scan is over one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.collectives.transition import fold


class LocalScan:
    """The exclusive scan over a single rank: `wait` gives back `carry_in`, or zeros."""

    def launch(
        self,
        state: Tensor,
        log_decay: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> _PendingLocalScan:
        """See `StateScan.launch`; both directions are the same here."""
        return _PendingLocalScan(state, log_decay, carry_in, want_carry)


class _PendingLocalScan:
    def __init__(self, state: Tensor, log_decay: Tensor, carry_in: Tensor | None, want_carry: bool) -> None:
        self._incoming = torch.zeros_like(state) if carry_in is None else carry_in
        # Without a wish for the carry nothing of the local state is kept alive.
        self._pair = (state, log_decay) if want_carry else None

    def wait(self) -> Tensor:
        return self._incoming

    def finish(self) -> None:
        pass

    def carry_out(self) -> Tensor:
        if self._pair is None:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        return fold(*self._pair, self._incoming)
