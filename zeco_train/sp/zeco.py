"""ZeCO (Chou et al., 2025, arXiv 2507.01004): sequence parallelism at nearly the price of data parallelism.

What a rank's tokens need of all tokens before them is one state R_p, [B, H, K, V], whatever the sequence's length:

    R_{p+1} = exp(G_p) ⊙_K R_p + S_p        S_p, G_p: state and log-decay of rank p's tokens, from a zero start

So each rank (1) computes (S_p, G_p), (2) starts the All-Scan, an exclusive scan of these pairs over the ranks,
(3) computes its intra-chunk scores, which need no other rank, while the scan runs, (4) waits for R_p, adds its decayed
copy to its own chunk states, and computes its outputs. The backward pass is the same with gradients of states, from the
last rank to the first. Steps 1, 3 and 4 are `zeco_train/sp/autograd.py`; step 2 is here.

On the wire, per rank and direction: one state of S bytes, received once and sent once (`chain`), or at most 2 S
(`two_shot`); an all-gather takes (P − 1) S. Both are in `zeco_train/collectives`, and differ in rounding only.
"""

from __future__ import annotations

from datetime import timedelta
from enum import Enum

from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives import Courier, PendingScan, launch_chain, launch_two_shot


class AllScanAlgorithm(Enum):
    """`chain`: blocks flow from rank to rank (ZeCO, Algorithm 2). `two_shot`: two all-to-alls, slices have owners."""

    chain = "chain"
    two_shot = "two_shot"


class AllScan:
    """ZeCO's scan over the ranks of a sequence.

    Args:
        groups: the SP group for forward and for reverse scans, apart, since one group runs its messages in series.
        timeout: bound of each wait for a peer.
        algorithm, blocks: see `AllScanConfig`.
    """

    def __init__(
        self,
        groups: tuple[ProcessGroup, ProcessGroup],
        timeout: timedelta,
        algorithm: AllScanAlgorithm = AllScanAlgorithm.chain,
        blocks: int = 4,
    ) -> None:
        self._groups, self._timeout = groups, timeout
        self._algorithm, self._blocks = algorithm, blocks
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
        """Start the scan; it goes on while the caller computes. See `StateScan.launch`."""
        group, courier = self._groups[reverse], self._couriers[reverse]
        match self._algorithm:
            case AllScanAlgorithm.chain:
                return launch_chain(
                    state,
                    log_decay,
                    group,
                    courier=courier,
                    timeout=self._timeout,
                    blocks=self._blocks,
                    reverse=reverse,
                    carry_in=carry_in,
                    want_carry=want_carry,
                )
            case AllScanAlgorithm.two_shot:
                return launch_two_shot(
                    state,
                    log_decay,
                    group,
                    courier=courier,
                    timeout=self._timeout,
                    reverse=reverse,
                    carry_in=carry_in,
                    want_carry=want_carry,
                )
