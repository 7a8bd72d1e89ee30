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

from enum import Enum

from zeco_train.collectives import Courier, PendingScan, ScanRequest, launch_chain, launch_two_shot
from zeco_train.sp.backend import ScanBackend


class AllScanAlgorithm(Enum):
    """`chain`: blocks flow from rank to rank (ZeCO, Algorithm 2). `two_shot`: two all-to-alls, slices have owners.
    `auto`: the faster one by the cost model."""

    auto = "auto"
    chain = "chain"
    two_shot = "two_shot"


class AllScanTransport(Enum):
    """`p2p`: messages of `torch.distributed`. `symmetric`: one kernel over memory that all ranks map. `auto`: what the
    ranks can."""

    auto = "auto"
    p2p = "p2p"
    symmetric = "symmetric"


class AllScan(ScanBackend):
    """ZeCO's scan over the ranks of a sequence.

    Args:
        couriers: see `ScanBackend`.
        algorithm, transport: see `AllScanConfig`.
        blocks: of `chain`; None is auto.
    """

    def __init__(
        self,
        couriers: tuple[Courier, ...],
        algorithm: AllScanAlgorithm,
        transport: AllScanTransport = AllScanTransport.auto,
        blocks: int | None = None,
    ) -> None:
        super().__init__(couriers)
        self._algorithm, self._transport, self._blocks = algorithm, transport, blocks

    def start(self, request: ScanRequest) -> PendingScan:
        """Start the All-Scan: it goes on while the caller computes its intra-chunk scores."""
        match self._algorithm:
            case AllScanAlgorithm.two_shot:
                return launch_two_shot(request, self.courier(request))
            case _:
                return launch_chain(request, self.courier(request), blocks=self._blocks or 4)
