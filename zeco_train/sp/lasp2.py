"""LASP-2 (Sun et al., 2025, arXiv 2502.07563), extended to decays: one all-gather, then a prefix on every rank.

Every rank receives the pair (S_q, G_q) of all others, (P − 1) S bytes, and folds those before it in rank order. The
paper's models have no decay and send states only; with a gate the decays must travel too, or the prefix is wrong. As
with ZeCO the gathering is started before the intra-chunk work and waited for after it.
"""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives import Courier, PendingScan, launch_all_gather


class AllGatherScan:
    """LASP-2's scan over the ranks of a sequence; arguments as for `zeco_train.sp.zeco.AllScan`."""

    def __init__(self, groups: tuple[ProcessGroup, ProcessGroup], timeout: timedelta) -> None:
        self._groups, self._timeout = groups, timeout
        self._couriers = (Courier(), Courier())

    def launch(
        self,
        state: Tensor,
        log_decay: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> PendingScan:
        """Start the all-gather; it goes on while the caller computes. See `StateScan.launch`."""
        return launch_all_gather(
            state,
            log_decay,
            self._groups[reverse],
            courier=self._couriers[reverse],
            timeout=self._timeout,
            reverse=reverse,
            carry_in=carry_in,
            want_carry=want_carry,
        )
