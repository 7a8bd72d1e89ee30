"""The calls of a run that kernels on GPUs do not serve, and what that costs.

All calls are checked when a run starts, and by the planner for a GPU that need not be there, by the `KernelRule` that
is asked about the tensors at hand later. A call that kernels do not serve is a `SlowPath`: a warning names it, or
`Kernels.require` refuses it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from zeco_train.errors import ConfigError
from zeco_train.ops.operator import KernelRule, Target, dtype_name, problem

logger = logging.getLogger(__name__)


class Kernels(Enum):
    """What becomes of calls on GPUs that kernels do not serve: `auto` warns, `require` refuses them, and CPUs."""

    auto = "auto"
    require = "require"


class Call(NamedTuple):
    """A call that a run will make."""

    operator: str  # its name, as in `SlowDowns`
    rule: KernelRule  # of its kernels
    dtype: torch.dtype  # of its tokens; decays are in the accumulation dtype
    key_dim: int = 0  # K and V; 0 and the width for calls without heads, 0 and 0 for those of any shape
    value_dim: int = 0

    def problem(self, target: Target) -> str | None:
        """Why the kernels do not serve it on a target, which need not be there; None: they do."""
        return problem(self.rule, target, self.key_dim, self.value_dim, self.dtype)

    def __str__(self) -> str:
        shape = f" of K {self.key_dim}, V {self.value_dim}" if self.key_dim else ""
        shape = shape or (f" of width {self.value_dim}" if self.value_dim else "")
        return f"{self.operator}{shape} in {dtype_name(self.dtype)}"


class SlowPath(NamedTuple):
    """A call that runs in PyTorch on a GPU."""

    where: str  # the layers, or the part of a run
    call: Call
    problem: str
    slow_down: float | None  # time in PyTorch over that of kernels, forward + backward; None: not measured
    source: str  # of that figure; "" without it

    @property
    def cost(self) -> str:
        if self.slow_down is None:
            return "slower than kernels by a factor not measured"
        return f"about {self.slow_down:.3g} times as slow as kernels (measured with {self.source})"

    def __str__(self) -> str:
        return f"{self.where}: {self.call} runs in PyTorch, {self.cost}: {self.problem}"


# (layers or part, call), as a run makes them.
Calls = Iterable[tuple[str, Call]]


def find_slow_paths(calls: Calls, target: Target, tokens: int | None = None) -> list[SlowPath]:
    """The calls that run in PyTorch on a GPU, which need not be there, each once; none on other devices, where all do.

    The slow-down may depend on `tokens`, those of a call, if known.
    """
    if target.kind != "cuda":
        return []
    table, found = stored_slow_downs(), []
    for where, call in dict.fromkeys(calls):
        if (problem := call.rule.lesser(target)) is not None:
            found.append(SlowPath(where, call, problem, None, ""))
        elif (problem := call.problem(target)) is not None:
            measured = table.nearest(call, tokens)
            source = "" if measured is None else f"K {measured.key_dim}, V {measured.value_dim} on {table.source}"
            found.append(SlowPath(where, call, problem, None if measured is None else measured.slow_down, source))
    return found


def check_kernels(
    field: str, wanted: Kernels, calls: Calls, target: Target, tokens: int | None = None
) -> list[SlowPath]:
    """`find_slow_paths`, to be warned of (`warn_of`) once the log is set up; `wanted` is the value of setting `field`.

    Raises:
        ConfigError: `require`, and there are slow paths, of which the first is named; or a device without kernels.
    """
    found = find_slow_paths(calls, target, tokens)
    if wanted is Kernels.require:
        if target.kind != "cuda":
            problem = f"there are no kernels on {target.kind.upper()}s; take auto, or a GPU"
            raise ConfigError(field, wanted.value, problem)
        if found:
            first, more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            problem = f"{first.where}: {first.call}: {first.problem}{more}; auto runs it in PyTorch, {first.cost}"
            raise ConfigError(field, wanted.value, problem)
    return found


def warn_of(found: Sequence[SlowPath]) -> None:
    """Log a warning for each; to be called on one rank."""
    for path in found:
        logger.warning("%s", path)


@dataclass(frozen=True)
class SlowDown:
    """A measured slow-down: time of PyTorch's passes over that of kernels, forward + backward.

    Operator, dtype (as `bf16`), K and V as of `Call`; tokens of a call, None: not recorded.
    """

    operator: str
    dtype: str
    key_dim: int
    value_dim: int
    tokens: int | None
    slow_down: float


@dataclass(frozen=True)
class SlowDowns:
    """Measured slow-downs (`lab/campaigns/slow_paths.py`); source: device, date and commit of the measurement."""

    source: str
    rows: tuple[SlowDown, ...]

    @classmethod
    def read(cls, path: Path) -> SlowDowns:
        stored = json.loads(path.read_text())
        return cls(stored["source"], tuple(SlowDown(**row) for row in stored["rows"]))

    def nearest(self, call: Call, tokens: int | None = None) -> SlowDown | None:
        """The row of the operator and dtype whose K · V, and then whose tokens, are nearest.

        None if none has a K · V within a factor of `_FARTHEST`.
        """

        def distance(row: SlowDown) -> tuple[float, float]:
            size = math.log2(row.key_dim * row.value_dim / (call.key_dim * call.value_dim))
            return abs(size), 0.0 if None in (tokens, row.tokens) else abs(math.log2(row.tokens / tokens))  # type: ignore

        if not call.key_dim:
            return None
        rows = [row for row in self.rows if (row.operator, row.dtype) == (call.operator, dtype_name(call.dtype))]
        best = min(rows, key=distance, default=None)
        return best if best is not None and distance(best)[0] <= math.log2(_FARTHEST) else None


_FARTHEST = 4.0


@cache
def stored_slow_downs() -> SlowDowns:
    """The table beside this file."""
    return SlowDowns.read(Path(__file__).with_name("slow_paths.json"))
