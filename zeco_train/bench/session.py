"""The ranks of a benchmark: mesh, scans and time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO, TypeVar

import torch

from zeco_train.bench.config import CaseConfig
from zeco_train.bench.variants import Variant
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.end import Job
from zeco_train.lifecycle.join import Launch, gather
from zeco_train.ops.operator import Target
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.ops.slow_paths import Calls, Kernels, SlowPath, check_kernels, warn_of
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.exchange import build_exchange

T = TypeVar("T")


def choice_of(exchange: Exchange) -> str | None:
    """The algorithm of the last scan of states; None if there was none to choose."""
    scan = exchange.states
    return str(scan.choice) if isinstance(scan, ScanBackend) and scan.choice is not None else None


class Session:
    """All ranks as one SP group.

    Attributes:
        mesh: see `init_mesh`; `sp_size` is the number of ranks.
        device: of this rank.
        enter: called with a description of the current phase of this rank.
        job: the benchmark's process lifecycle; None in tests.
    """

    def __init__(self, mesh: ProcessMesh, budget_seconds: float, job: Job | None = None) -> None:
        self.job, self.mesh, self.device = job, mesh, mesh.device
        self.enter: Callable[[str], None] = job.enter if job is not None else lambda activity: None
        self._deadline = time.monotonic() + budget_seconds
        self._longest = 0.0
        self._exchanges: dict[tuple[str, str], Exchange] = {}

    @classmethod
    def open(cls, config: CaseConfig, launch: Launch, job: Job | None = None) -> Session:
        """Join the other ranks; see `CaseConfig.join`."""
        return cls(config.join(launch), config.budget_seconds, job)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @property
    def on_cuda(self) -> bool:
        """Whether the ranks' devices are GPUs."""
        return self.device.type == "cuda"

    @property
    def target(self) -> Target:
        """What calls run on."""
        return Target.of(self.device)

    def check_kernels(self, wanted: Kernels, calls: Calls) -> list[SlowPath]:
        """What of the calls runs in PyTorch on these GPUs, after a warning of each (`LogLines` prints it once).

        Raises:
            ConfigError: see `check_kernels`.
        """
        found = check_kernels("kernels", wanted, calls, self.target)
        warn_of(found)
        return found

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Print a line once, not on every rank; on stdout by default."""
        if self.mesh.is_main:
            print(text, file=file, flush=True)

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` on all ranks; the first rank's user error is raised on all. See `mesh.agree`."""
        return agree(self.mesh, action)

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
        """See `choice_of`, of the cached exchange of a variant; None for variants without one."""
        return choice_of(self.exchange(variant, state_elements)) if variant.has_scan else None

    def drain(self) -> None:
        """Wait until all scans are received and sent."""
        for exchange in self._exchanges.values():
            exchange.drain()

    def forget(self, purpose: str) -> None:
        """Drop what is cached for a purpose."""
        self._exchanges = {key: each for key, each in self._exchanges.items() if key[0] != purpose}

    def settle(self) -> None:
        """Synchronise with the device, and wait until all scans are received and sent."""
        if self.on_cuda:
            torch.cuda.synchronize()
        self.drain()

    def within_budget(self, seconds: float | None = None, *, times: int = 1) -> bool:
        """Whether this many seconds, or `times` the longest so far (`spent`), fit in the budget.

        Rank 0's clock decides for all ranks. Collective.
        """
        seconds = times * self._longest if seconds is None else seconds
        return self.gather(time.monotonic() + seconds < self._deadline)[0]

    def spent(self, seconds: float) -> None:
        """Record the duration of a configuration."""
        self._longest = max(self._longest, seconds)

    def import_fla(self, module: str, variant: str = "fla") -> Any:
        """A module of flash-linear-attention, the peer; `variant` is named in errors.

        Raises:
            ConfigError: it is not installed, or there is no GPU.
        """
        if not self.on_cuda:
            raise ConfigError("variants", variant, "flash-linear-attention's kernels need CUDA")
        try:
            return import_module(module)
        except ImportError as error:
            raise ConfigError("variants", variant, f"flash-linear-attention is not installed ({error})") from error
