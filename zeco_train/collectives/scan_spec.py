"""Descriptor of a scan algorithm: one in each algorithm's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.one_kernel import Kernel
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanWorker
from zeco_train.ops.seam import LaunchedScan, ScanRequest


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """A scan algorithm, for settings, plans, tables and figures."""

    name: str  # as in settings
    description: str  # one line for `--help`
    # (request, worker), with `blocks=` if states are sent in blocks → the scan, which progresses without this rank's
    # `wait`, unless it is serial
    launch: Callable[..., LaunchedScan]
    bytes_sent: Callable[[Load, bool], float]  # (load, want_carry) → bytes that the busiest rank sends
    # (costs, load, blocks) → time from launch to wait, without overlapped work
    seconds: Callable[[Costs, Load, int | None], float]
    # the fastest number of blocks; None: states are not cut into blocks
    best_blocks: Callable[[Costs, Load], int] | None = None
    kernel: Kernel | None = None  # one-kernel implementation over symmetric memory
    # ranks → states held by a rank during the scan, besides its own
    held_states: Callable[[int], int] = lambda ranks: 0
    in_series: bool = False  # each rank computes between receiving and sending, so no compute hides the scan
    # a state goes from rank to rank, and nothing back: a rank that waits does not hold up those before it
    one_way: bool = False
    problem: Callable[[Topology], str | None] = lambda topology: None  # why it cannot run over these nodes
    # its times were measured, not only modelled: `auto` chooses among these on one node; between nodes none were
    # measured, and all compete by the model
    measured: bool = True
    line: str | tuple[int, tuple[int, ...]] = "-"  # matplotlib line style

    def over(self, worker: ScanWorker, blocks: int | None = None) -> Callable[[ScanRequest], LaunchedScan]:
        """`launch` over a worker; `blocks` applies if states are sent in blocks."""
        options = {} if self.best_blocks is None else {"blocks": blocks or 1}
        return partial(self.launch, worker=worker, **options)

    def runs_on(self, link: Link) -> bool:
        return link is not Link.symmetric or self.kernel is not None
