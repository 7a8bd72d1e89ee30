"""LASP-1 (Sun et al., 2024, arXiv 2404.02882), Algorithms 2 and 3: one neighbour after the other.

A rank computes what is its own (lines 7–10), then receives R_p from the rank before it (12), computes the outputs that
use it (14–15), folds (16) and sends R_{p+1} on (17); the backward pass likewise, from the last rank to the first. The
ranks' compute between receive and send lies in the chain, so its time grows with P(α + βS + compute). Nothing is
launched ahead: `wait` receives and `finish` folds and sends.
"""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives import PendingSerialScan, launch_serial


class SerialScan:
    """LASP-1's scan over the ranks of a sequence; arguments as for `zeco_train.sp.zeco.AllScan`."""

    def __init__(self, groups: tuple[ProcessGroup, ProcessGroup], timeout: timedelta) -> None:
        self._groups, self._timeout = groups, timeout

    def launch(
        self,
        state: Tensor,
        log_decay: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> PendingSerialScan:
        """Keep what is needed; nothing goes on the wire before `wait`. See `StateScan.launch`."""
        return launch_serial(
            state,
            log_decay,
            self._groups[reverse],
            timeout=self._timeout,
            reverse=reverse,
            carry_in=carry_in,
            want_carry=want_carry,
        )
