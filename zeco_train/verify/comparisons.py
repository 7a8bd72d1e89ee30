"""Rows of a sequence: one device, at once and chunked, then what spreads it over ranks, against the exact results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from zeco_train.lifecycle.join import gather
from zeco_train.verify.report import Deviation, VerifyRow, deviations

Results = dict[str, Tensor]
# A name, and its results, or the reason why these ranks cannot run it.
Run = tuple[str, Callable[[], tuple[Results, str]]]


class Comparisons:
    """What the kinds of sequences have in common. Collective throughout.

    Args:
        world_size: ranks of the job.
        device: of this rank.
        enter: called with a description of the current phase of this rank.
    """

    def __init__(self, world_size: int, device: torch.device, enter: Callable[[str], None]) -> None:
        self.world_size, self.device, self._enter = world_size, device, enter

    def enter(self, row: VerifyRow, phase: str) -> None:
        """Begin a phase of a row's sequence."""
        self._enter(f"{row.dtype}, {row.sp_size} × {row.tokens} tokens: {phase}")

    def rows(
        self,
        row: VerifyRow,
        expected: Results,
        one_device: dict[str, Results],
        runs: Iterable[Run],
        beside: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[VerifyRow]:
        """The rows of a sequence.

        Args:
            row: of the sequence.
            expected: this rank's results in fp64, on its device.
            one_device: the runs on one device, by name, the first at once, the others chunked; two or more where there
                are `runs`.
            runs: over the ranks.
            beside: by their names, the chunking with as many pieces; the second run on one device if there is none.
        """
        once, *chunked = one_device
        for name, run in one_device.items():
            yield replace(row, backend=name, deviations=self.gather(deviations(run, expected)))
        for name, action in runs:
            self.enter(row, name)
            results, reason = action()
            if reason:
                yield replace(row, backend=name, reason=reason)
            else:
                pair = one_device[once], one_device[beside.get(name, chunked[0])]
                found = self.gather(deviations(results, expected, pair))
                yield replace(row, backend=name, deviations=found)

    def gather(self, own: dict[str, Deviation]) -> tuple[dict[str, Deviation], ...]:
        """All-gather the deviations of all ranks. Nothing is in flight after it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(gather(own, self.world_size))

    def free(self) -> None:
        """Free cached memory between sequences: the next ones may need all of it, in blocks of other sizes."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
