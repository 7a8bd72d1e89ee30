"""The ranks of a benchmark: mesh, scans and time budget; and correctness checks before timing, relative to float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.config import CaseConfig
from zeco_train.bench.variants import Variant
from zeco_train.distributed.mesh import ProcessMesh, agree, find_device, init_mesh
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.lifecycle.end import Job
from zeco_train.lifecycle.join import Launch, gather
from zeco_train.ops.operator import Target
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.ops.slow_paths import Calls, Kernels, SlowPath, check_kernels, warn_of
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.exchange import build_exchange
from zeco_train.system.numbers import relative_error

T = TypeVar("T")
Row = dict[str, Any]


def marked(row: Row, slow: Sequence[SlowPath]) -> Row:
    """The row, noting what of it ran in PyTorch instead of kernels."""
    notes = [f"{path.call} in PyTorch, {path.cost}" for path in slow]
    return {**row, "note": "; ".join(filter(None, [row.get("note"), *notes]))} if notes else row


class WrongResultError(ZecoError):
    """A variant to be timed computes a wrong result; `reason` is the message without the variant."""

    exit_code = 8

    def __init__(self, variant: str, rank: int, result: str, error: float, tolerance: float) -> None:
        self.reason = f"{result} on rank {rank} has a relative error of {error:.2g}, allowed are {tolerance:.0e}"
        super().__init__(f"{variant} is wrong, nothing is timed: {self.reason}")


def check_results(
    variant: str, rank: int, results: Mapping[str, tuple[Tensor, Tensor]], tolerance: float
) -> dict[str, float]:
    """Errors of `{name: (found, expected)}`; raises `WrongResultError` for the first above the tolerance, or NaN."""
    errors = {name: relative_error(found, expected) for name, (found, expected) in results.items()}
    for name, error in errors.items():
        # Not `error > tolerance`, which is false for NaN.
        if not error <= tolerance:
            raise WrongResultError(variant, rank, name, error, tolerance)
    return errors


def gradient_norms(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Two vectors with the same relative difference as gradients sharded over all ranks. Collective."""
    squares = torch.zeros(2, dtype=torch.float64, device=found[0].device)
    for one, other in zip(found, expected, strict=True):
        squares += torch.stack([(one - other).double().square().sum(), other.double().square().sum()])
    dist.all_reduce(squares)
    difference, norm = squares.sqrt().cpu()
    return torch.stack([norm, difference]), torch.stack([norm, torch.zeros_like(norm)])


def choice_of(exchange: Exchange) -> str | None:
    """The algorithm of the last scan of states; None if there was none to choose."""
    scan = exchange.states
    return str(scan.choice) if isinstance(scan, ScanBackend) and scan.choice is not None else None


class Session:
    """All ranks as one SP group.

    `enter` is called with a description of this rank's current phase.
    """

    def __init__(self, mesh: ProcessMesh, budget_seconds: float, job: Job | None = None) -> None:
        self.job, self.mesh, self.device = job, mesh, mesh.device
        self.rank, self.world_size, self.on_cuda = mesh.rank, mesh.world_size, mesh.device.type == "cuda"
        self.target = Target.of(mesh.device)
        self.enter: Callable[[str], None] = job.enter if job is not None else lambda activity: None
        self._deadline = time.monotonic() + budget_seconds
        self._longest = 0.0
        self._exchanges: dict[tuple[str, str], Exchange] = {}

    @classmethod
    def open(cls, config: CaseConfig, launch: Launch, job: Job | None = None) -> Session:
        """Join the other ranks; raises `ConfigError` if the machine does not have the device."""
        device, timeout = find_device(config.device, launch), timedelta(seconds=config.timeout_seconds)
        return cls(init_mesh(launch, launch.world_size, device, timeout), config.budget_seconds, job)

    def check_kernels(self, wanted: Kernels, calls: Calls) -> list[SlowPath]:
        """Calls that run in PyTorch on these GPUs, after a warning of each; raises `ConfigError` if they must not."""
        found = check_kernels("kernels", wanted, calls, self.target)
        warn_of(found)
        return found

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Print a line once, not on every rank; on stdout by default."""
        if self.mesh.is_main:
            print(text, file=file, flush=True)

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` on all ranks; the first rank's user error is raised on all."""
        return agree(self.mesh, action)

    def check(self, variant: str, results: Mapping[str, tuple[Tensor, Tensor]], tolerance: float) -> float:
        """The largest relative error of `{name: (found, expected)}` on any rank.

        Raises:
            WrongResultError: on all ranks, if one is above the tolerance or NaN.
        """
        errors = self.agree(partial(check_results, variant, self.rank, results, tolerance))
        return max(max(of_rank.values()) for of_rank in self.gather(errors))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; must pickle. Collective."""
        return gather(value, self.world_size)

    def exchange(
        self, variant: Variant, state_elements: int, purpose: str = "eager", *, with_halo: bool = False
    ) -> Exchange:
        """What connects all ranks by a variant, cached; with a scan for states that cross one border only.

        Each purpose has its own, since a failed capture leaves scans that cannot be used again.

        Raises:
            ConfigError: this machine does not support it.
        """
        config = variant.sp_config(state_elements)
        if config.all_scan.transport is AllScanTransport.symmetric and not self.on_cuda:
            # Backends check this too, but not over one rank, where nothing is sent.
            raise ConfigError("variants", variant.name, "symmetric memory needs CUDA")
        # Its text, since settings are mutable dataclasses, which cannot be keys.
        key = purpose, f"{config!r} {with_halo}"
        if key not in self._exchanges:
            self._exchanges[key] = build_exchange(config, self.mesh, needs_halo=with_halo)
        return self._exchanges[key]

    def position(self, exchange: Exchange, tokens: int, *, alone: bool = False) -> SequencePosition:
        """Of a rank's `tokens` in a sequence over all ranks, or in its own if each is `alone`."""
        ranks, rank = (1, 0) if alone else (self.world_size, self.rank)
        return SequencePosition(range(0, ranks * tokens + 1, tokens), rank, exchange=exchange)

    def choice(self, variant: Variant, state_elements: int) -> str | None:
        """The algorithm that a variant's cached exchange has chosen; None for variants without a choice."""
        return choice_of(self.exchange(variant, state_elements)) if variant.has_scan else None

    def drain(self) -> None:
        for exchange in self._exchanges.values():
            exchange.drain()

    def forget(self, purpose: str) -> None:
        self._exchanges = {key: each for key, each in self._exchanges.items() if key[0] != purpose}

    def settle(self) -> None:
        """Synchronise with the device, and wait until all scans are received and sent."""
        if self.on_cuda:
            torch.cuda.synchronize()
        self.drain()

    def within_budget(self, seconds: float | None = None, *, times: int = 1) -> bool:
        """Whether this many seconds, or `times` the longest configuration, are left by rank 0's clock. Collective."""
        seconds = times * self._longest if seconds is None else seconds
        return self.gather(time.monotonic() + seconds < self._deadline)[0]

    def spent(self, seconds: float) -> None:
        """Record the duration of a configuration."""
        self._longest = max(self._longest, seconds)

    def import_fla(self, module: str, variant: str = "fla") -> Any:
        """A module of flash-linear-attention, the peer.

        Raises:
            ConfigError: it is not installed, or there is no GPU; names `variant`.
        """
        if not self.on_cuda:
            raise ConfigError("variants", variant, "flash-linear-attention's kernels need CUDA")
        try:
            return import_module(module)
        except ImportError as error:
            raise ConfigError("variants", variant, f"flash-linear-attention is not installed ({error})") from error
