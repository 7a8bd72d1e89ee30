"""ZeCO (Chou et al., 2025, arXiv 2507.01004): sequence parallelism at nearly the price of data parallelism.

A rank's tokens depend on all tokens before them only through one state R_p, [B, H, K, V], of fixed size:

    R_{p+1} = A_p R_p + S_p        S_p, A_p: state and transition (decays, or a matrix) of rank p's tokens

So each rank (1) computes (S_p, A_p), (2) starts the All-Scan, an exclusive scan of these pairs over the ranks,
(3) computes its intra-chunk scores, which need no other rank, while the scan runs, (4) waits for R_p, adds its decayed
copy to its own chunk states, and computes its outputs. The backward pass is the same with gradients of states, from the
last rank to the first. Steps 1, 3 and 4 are `zeco_train/ops/mix.py`. Step 2 starts here: by one of the algorithms in
`zeco_train/collectives` (`ALL_SCANS`), which `scan_choice.py` selects and which differ only in rounding, as messages of
`torch.distributed` or, between GPUs with peer access, as one kernel (`zeco_train/kernels/all_scan/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zeco_train.collectives import ScanWorker, scan_alone
from zeco_train.collectives.cost_model import Link
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.collectives.symmetric import SymmetricScans
from zeco_train.collectives.worker import ScanSpec
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.all_scan_config import AllScanConfig
from zeco_train.sp.backend import BackendSpec, Launcher, ScanBackend
from zeco_train.sp.scan_choice import ScanChooser


class AllScan(ScanBackend):
    """ZeCO's scan over the ranks of a sequence, or one of `scans`. ConfigError: it cannot run over their nodes."""

    def __init__(
        self, workers: tuple[ScanWorker, ...], settings: AllScanConfig, scans: Sequence[ScanSpec] = ()
    ) -> None:
        super().__init__(workers)
        self._chooser = ScanChooser(workers[0], settings, scans)
        self._symmetric: dict[ScanWorker, SymmetricScans] = {}

    def launcher_for(self, request: ScanRequest) -> Launcher:
        """Raises ConfigError if `transport=symmetric`, and the ranks do not support it; on all of them."""
        return self._fastest(request, self._chooser.scans)

    def warm_up_launchers(self, request: ScanRequest) -> Sequence[Launcher]:
        if not self._crosses_ranks:
            return [self.launcher_for(request)]
        # Not all algorithms: each kernel takes tens of MB of symmetric memory per direction.
        return [self._fastest(request, (scan,)) for scan in self._chooser.ever_chosen(request.state.device)]

    def _fastest(self, request: ScanRequest, scans: Sequence[ScanSpec]) -> Launcher:
        if not self._crosses_ranks:
            return Launcher(scan_alone)
        worker, choice = self.worker(request), self._chooser.choose_scan(request, self.load(request), scans)
        if choice.link is not Link.symmetric:  # messages, folded by the worker's thread or stream
            return Launcher(choice.scan.over(worker, choice.blocks), choice.scan, choice)
        if worker not in self._symmetric:  # one kernel
            self._symmetric[worker] = SymmetricScans(worker)
        start = partial(self._symmetric[worker].launch, algorithm=choice.scan, blocks=choice.blocks)
        return Launcher(start, choice.scan, choice)


ZECO = BackendSpec(
    name="zeco",
    description="All-Scan: one state received and one sent, beside the work inside chunks (ZeCO)",
    color="#2a6fbb",
    build=AllScan,
    scans=ALL_SCANS,
    section="all_scan",
)
