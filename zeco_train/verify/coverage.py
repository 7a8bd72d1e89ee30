"""Few cases in which each value of each axis meets each value of every other; and what a run did not cover."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from models.mixer_registry import MIXERS
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.distributed.config import Strategy
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.training.optim.optimizer_registry import OPTIMIZERS
from zeco_train.verify.report import VerifyRow

Cell = dict[str, Any]
# A pair of values: axis, index of the value, and the same of another axis.
_Pair = tuple[str, int, str, int]

# Random completions of a case of which the best is taken, and tries to find a possible one at all.
_CANDIDATES, _TRIES = 24, 1_000


def cover_pairs(
    axes: Mapping[str, Sequence[Any]], is_possible: Callable[[Cell], bool], given: Sequence[Cell] = ()
) -> list[Cell]:
    """Cases with each possible pair of values of two axes that `given` cases lack; the same in every process."""
    generator, sizes = random.Random(0), {axis: len(values) for axis, values in axes.items()}
    missing: dict[_Pair, None] = {}
    for a, b in itertools.combinations(axes, 2):
        missing |= dict.fromkeys((a, i, b, j) for i in range(len(axes[a])) for j in range(len(axes[b])))
    for cell in given:
        for pair in _pairs({axis: values.index(cell[axis]) for axis, values in axes.items()}):
            missing.pop(pair, None)
    chosen: list[Cell] = []
    while missing:
        a, i, b, j = next(iter(missing))
        best: dict[str, int] | None = None
        most = found = 0
        for _ in range(_TRIES):
            indices = {axis: int(generator.random() * size) for axis, size in sizes.items()} | {a: i, b: j}
            if not is_possible(_cell(axes, indices)):
                continue
            new = sum(pair in missing for pair in _pairs(indices))
            if best is None or new > most:
                best, most = indices, new
            found += 1
            if found == _CANDIDATES:
                break
        if best is None:
            # No case can have both.
            del missing[a, i, b, j]
            continue
        chosen.append(_cell(axes, best))
        for pair in _pairs(best):
            missing.pop(pair, None)
    return chosen


def _cell(axes: Mapping[str, Sequence[Any]], indices: Mapping[str, int]) -> Cell:
    return {axis: axes[axis][index] for axis, index in indices.items()}


def _pairs(indices: Mapping[str, int]) -> list[_Pair]:
    return [(a, i, b, j) for (a, i), (b, j) in itertools.combinations(indices.items(), 2)]


# By kind, as in `VerifyRow.uses`.
_KNOWN = {
    "operator": [*OPERATORS],
    "scan": [*BACKENDS, *(scan.name for scan in ALL_SCANS)],
    "method": [*METHODS],
    "mixer": [*MIXERS],
    "strategy": [each.value for each in Strategy],
    "recompute": [each.value for each in Recompute],
    "optimizer": [*OPTIMIZERS],
}
_NEVER = (
    "shards of unequal lengths, which evaluation and generation have",
    "train.matmul=fp8, train.compile=always and bf16 training, whose results are rounded differently",
    "data preparation, checkpoints, evaluation, generation and exports, which have tests of their own",
)


def not_covered(rows: Sequence[VerifyRow], device: torch.device, launch: Launch) -> list[str]:
    """One line each; the first ones are of this machine."""
    found = ["training steps and more ranks than launched ran on the CPU, without kernels and NCCL"]
    if device.type != "cuda":
        found = ["no GPU: Triton kernels, NCCL, symmetric memory, CUDA graphs, bf16"]
    if launch.world_size <= launch.local_world_size or launch.world_size == 1:
        found.append("one machine: lane and the other scans between machines ran between groups of ranks of this one")
    largest = max((row.sp_size for row in rows), default=1)
    longest = max((row.sp_size * row.tokens for row in rows), default=0)
    found.append(f"more than {largest} ranks that share a sequence, sequences of more than {longest:,} tokens")
    used = {use for row in rows if not row.problem for use in row.uses}
    for kind, names in _KNOWN.items():
        if missing := [name for name in names if f"{kind} {name}" not in used]:
            found.append(f"{kind}: {', '.join(missing)}")
    reasons = dict.fromkeys(f"{row.backend}: {row.reason}" for row in rows if row.reason)
    return [*found, *_NEVER, *(f"skipped: {reason}" for reason in reasons)]
