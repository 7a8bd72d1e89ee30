"""Descriptor of a scan algorithm, the interface to the rest of the project: one in each algorithm's file."""

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
    """A scan algorithm.

    Attributes:
        name: as in settings.
        description: one line for `--help`.
        launch: (request, worker), with `blocks=` if states are sent in blocks → the scan. It progresses without this
            rank's `wait`, unless it is serial.
        bytes_sent: (load, want_carry) → bytes that the busiest rank sends for one scan.
        seconds: (costs, load, blocks) → time from launch to wait, without overlapped work.
        best_blocks: (costs, load) → the fastest number of blocks; None if states are not cut into blocks.
        kernel: one-kernel implementation over symmetric memory; None if there is none.
        held_states: ranks → states held by a rank during the scan, besides its own.
        in_series: each rank computes between receiving and sending, so no compute hides the scan.
        one_way: a state goes from rank to rank, and nothing back: a rank that waits does not hold up those before it.
        problem: topology → why the scan cannot run over these nodes, for a message; None if it can.
        automatic: its times were measured: `auto` may choose it on one node. Between nodes no scan's times were
            measured, and all compete by the model.
        line: matplotlib line style.
    """

    name: str
    description: str
    launch: Callable[..., LaunchedScan]
    bytes_sent: Callable[[Load, bool], float]
    seconds: Callable[[Costs, Load, int | None], float]
    best_blocks: Callable[[Costs, Load], int] | None = None
    kernel: Kernel | None = None
    held_states: Callable[[int], int] = lambda ranks: 0
    in_series: bool = False
    one_way: bool = False
    problem: Callable[[Topology], str | None] = lambda topology: None
    automatic: bool = True
    line: str | tuple[int, tuple[int, ...]] = "-"

    def over(self, worker: ScanWorker, blocks: int | None = None) -> Callable[[ScanRequest], LaunchedScan]:
        """`launch` over a worker; `blocks` applies if states are sent in blocks."""
        options = {} if self.best_blocks is None else {"blocks": blocks or 1}
        return partial(self.launch, worker=worker, **options)

    def runs_on(self, link: Link) -> bool:
        """Whether there is an implementation for that link."""
        return link is not Link.symmetric or self.kernel is not None
