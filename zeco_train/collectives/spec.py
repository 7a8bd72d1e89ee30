"""What the rest of the project knows of a scan over ranks: one descriptor in each algorithm's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.courier import Courier
from zeco_train.collectives.one_kernel import Kernel
from zeco_train.ops.seam import LaunchedScan, ScanRequest


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """An algorithm that scans the pairs of a group's ranks.

    Attributes:
        name: as settings have it.
        description: for `--help`, a line.
        launch: starts it: (request, courier), with `blocks=` where states flow in blocks. It goes on without this
            rank's `wait`, but for one that runs in series.
        bytes_sent: (load, want_carry) → bytes that the busiest rank sends for one scan.
        seconds: (costs, load, blocks) → what one takes from launch to wait, nothing beside it.
        best_blocks: (costs, load) → the number of blocks that takes least; None where a state is not cut into blocks.
        kernel: its form in one kernel over memory that all ranks map; None where there is none.
        held_states: ranks → states that a rank holds while it runs, beside its own.
        in_series: each rank computes between receiving and sending, so no compute hides the scan.
        automatic: `auto` may choose it: its times were measured.
        line: how pictures draw it, in matplotlib's terms.
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
    automatic: bool = True
    line: str = "-"

    def start(self, request: ScanRequest, courier: Courier, blocks: int | None = None) -> LaunchedScan:
        """Start a scan over messages; `blocks` counts where states flow in blocks. Errors as of `Courier.launch`."""
        if self.best_blocks is None:
            return self.launch(request, courier)
        return self.launch(request, courier, blocks=blocks or 1)

    def runs_on(self, link: Link) -> bool:
        """Whether there is a form of it for that link."""
        return link is not Link.symmetric or self.kernel is not None


@dataclass(frozen=True)
class Choice:
    """Attributes:
    scan: the algorithm.
    link: the way over the wire.
    blocks: where its states flow in blocks over messages; None elsewhere.
    seconds: what the model says that it takes.
    """

    scan: ScanSpec
    link: Link
    blocks: int | None
    seconds: float


def choose(scans: Sequence[ScanSpec], costs: Costs, load: Load, blocks: int | None = None) -> Choice:
    """The fastest scan by the model; at equal times the first.

    Args:
        scans: to choose from; those that have no form for the link are left out.
        costs: the way over the wire.
        load: the scan's size, over P ≥ 2 ranks.
        blocks: where states flow in blocks; None is the best number over messages, and 16,384 elements each in one
            kernel.

    Raises:
        ValueError: none of them has a form for the link.
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
    """The scans that `choose` may prefer for some size of state."""
    if costs.link is not Link.symmetric:
        return list(scans)
    # All times are linear in the size: what is faster for the least and the largest state is so for all between.
    ends = [choose(scans, costs, Load(ranks, (1, 1, 1, 1), itemsize)).scan for itemsize in (0, 1 << 62)]
    return [scan for scan in scans if scan in ends]
