"""Descriptor of a scan algorithm, the interface to the rest of the project: one in each algorithm's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.courier import Courier
from zeco_train.collectives.one_kernel import Kernel
from zeco_train.collectives.topology import Topology
from zeco_train.ops.seam import LaunchedScan, ScanRequest


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """A scan algorithm.

    Attributes:
        name: as in settings.
        description: one line for `--help`.
        launch: (request, courier), with `blocks=` if states are sent in blocks → the scan. It progresses without this
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

    def start(self, request: ScanRequest, courier: Courier, blocks: int | None = None) -> LaunchedScan:
        """Start a scan over messages; `blocks` applies if states are sent in blocks. Errors as of `Courier.launch`."""
        if self.best_blocks is None:
            return self.launch(request, courier)
        return self.launch(request, courier, blocks=blocks or 1)

    def runs_on(self, link: Link) -> bool:
        """Whether there is an implementation for that link."""
        return link is not Link.symmetric or self.kernel is not None


@dataclass(frozen=True)
class Choice:
    """The result of `choose`.

    Attributes:
        scan: the algorithm.
        link: the transport.
        blocks: number of blocks if states are sent in blocks over messages; else None.
        seconds: predicted time.
    """

    scan: ScanSpec
    link: Link
    blocks: int | None
    seconds: float

    def __str__(self) -> str:
        return f"{self.scan.name}{'' if self.blocks is None else f' of {self.blocks} blocks'} by {self.link.value}"


def choose(scans: Sequence[ScanSpec], costs: Costs, load: Load, blocks: int | None = None) -> Choice:
    """The fastest scan by the cost model; the first of equals.

    Args:
        scans: candidates; those without an implementation for the link are skipped.
        costs: of the link.
        load: the scan's size, over P ≥ 2 ranks.
        blocks: number of blocks if states are sent in blocks; None is the best number over messages, and 16,384
            elements each in one kernel.

    Raises:
        ValueError: none of them has an implementation for the link.
    """
    choices = []
    for scan in scans:
        if scan.runs_on(costs.link):
            count = blocks if scan.best_blocks else None
            if count is None and scan.best_blocks and costs.link is not Link.symmetric:
                count = scan.best_blocks(costs, load)
            choices.append(Choice(scan, costs.link, count, scan.seconds(costs, load, count)))
    return min(choices, key=lambda choice: choice.seconds)


def eligible(scans: Sequence[ScanSpec], costs: Costs, ranks: int) -> list[ScanSpec]:
    """The scans that `choose` may return for some state size."""
    if costs.link is not Link.symmetric:
        return list(scans)
    # All times are linear in the size: a scan that is faster at both extreme sizes is faster in between.
    ends = [choose(scans, costs, Load(ranks, (1, 1, 1, 1), itemsize)).scan for itemsize in (0, 1 << 62)]
    return [scan for scan in scans if scan in ends]
