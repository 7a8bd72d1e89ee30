"""How the numbers of a step are added up: over its passes, over ranks, and then copied to the host.

Which numbers there are is declared in `zeco_train.tracking.metrics`, and nowhere else. Totals stay at their addresses,
where replayed kernels read them. What a replay overwrites, a pass's results and the reduced numbers, is added or copied
before the next replay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.errors import CommunicationError
from zeco_train.tracking.metrics import PassNumbers, StepNumbers

# Between two looks at a step's end. The device still runs the optimizer then, so a late look delays nothing.
_POLL_SECONDS = 2e-4
# By `Column.across`: the value of no parts, and how parts are joined on a rank, and over ranks.
_START: dict[str, float] = {"sum": 0.0, "max": -math.inf}
_JOIN: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

N = TypeVar("N", bound=PassNumbers[Any])


def named(kind: type[N], values: Iterable[Any]) -> N:
    """The record of values in the order of its fields, which is that of `vars(record).values()`."""
    return kind(**{number.name: value for number, value in zip(fields(kind), values, strict=True)})


def taken_from(results: Sequence[Tensor]) -> tuple[PassNumbers[Tensor], Sequence[Tensor]]:
    """Split the results of a pass into the numbers with which they begin, and the rest."""
    count = len(fields(PassNumbers))
    return named(PassNumbers, results[:count]), results[count:]


def new_totals(kind: type[N], device: torch.device) -> N:
    """Totals of no passes, fp64."""
    totals = named(kind, (torch.empty((), dtype=torch.float64, device=device) for _ in fields(kind)))
    clear(totals)
    return totals


def clear(totals: PassNumbers[Tensor]) -> None:
    """Reset to the totals of no passes."""
    for total, across in _declared(totals):
        total.fill_(_START[across])


def add(totals: PassNumbers[Tensor], part: PassNumbers[Tensor]) -> None:
    """Add a part to this rank's totals."""
    for (total, across), value in zip(_declared(totals), vars(part).values(), strict=True):
        _JOIN[across](total, value, out=total)


def over_ranks(totals: N) -> N:
    """Their reductions over all ranks. Collective."""
    found = named(type(totals), (total.clone() for total in vars(totals).values()))
    for total, across in _declared(found):
        # One by one: the place of a value in a vector decides the order in which some rings add it up.
        dist.all_reduce(total, op=_REDUCE[across])
    return found


def _declared(totals: PassNumbers[Tensor]) -> Iterator[tuple[Tensor, str]]:
    return ((getattr(totals, number.name), number.metadata["across"]) for number in fields(totals))


class PendingNumbers:
    """The numbers of a step, copied to the host asynchronously.

    Args:
        values: on the device, in the order of `StepNumbers`.
        timeout: longest wait for them; None: the timeout of the communication that they wait for.
    """

    def __init__(self, values: Iterable[Tensor], *, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        together = torch.stack([value.double() for value in values])
        self._values, self._ready = together, None
        if together.device.type == "cuda":
            # A copy to pageable memory would make the host wait.
            self._values = torch.empty_like(together, device="cpu", pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> StepNumbers[float]:
        """Wait for the copy; raises `CommunicationError` after the timeout."""
        if self._ready is not None:
            self._wait(self._ready)
        return named(StepNumbers, self._values.tolist())

    def _wait(self, ready: torch.cuda.Event) -> None:
        if self._timeout is None:
            ready.synchronize()
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not ready.query():
            if time.monotonic() > deadline:
                problem = f"no end within {self._timeout.total_seconds():g} s"
                raise CommunicationError(dist.get_rank(), "replay of a step's CUDA graphs", problem)
            time.sleep(_POLL_SECONDS)
