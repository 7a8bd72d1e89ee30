"""The ranks of a benchmark: mesh, scans and time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO, TypeVar

import torch

from zeco_train.bench.config import CaseConfig
from zeco_train.bench.variants import sp_config
from zeco_train.distributed.mesh import Launch, ProcessMesh, agree, gather, halo_groups
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.job import Job
from zeco_train.ops.selection import Calls, Kernels, SlowPath, check_kernels, warn_of
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.registry import build_scan
from zeco_train.sp.zeco import AllScanTransport

T = TypeVar("T")


class Session:
    """All ranks as one SP group.

    Attributes:
        mesh: see `init_mesh`; `sp_size` is the number of ranks.
        device: of this rank.
        enter: called with a description of the current phase of this rank.
        job: the benchmark's process lifecycle; None in tests.
        log: all lines that the project logged while `LogLines` was active.
    """

    def __init__(self, mesh: ProcessMesh, budget_seconds: float, job: Job | None = None) -> None:
        self.job, self.mesh, self.device = job, mesh, mesh.device
        self.enter: Callable[[str], None] = job.enter if job is not None else lambda activity: None
        self.log: list[str] = []
        self._deadline = time.monotonic() + budget_seconds
        self._longest = 0.0
        self._scans: dict[tuple[str, str], ScanBackend] = {}

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

    def check_kernels(self, wanted: Kernels, calls: Calls) -> list[SlowPath]:
        """What of the calls runs in PyTorch on these GPUs, after a warning of each (`LogLines` prints it once).

        Raises:
            ConfigError: see `check_kernels`.
        """
        found = check_kernels("kernels", wanted, calls, self.device)
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

    def scan(
        self, variant: str, state_elements: int, purpose: str = "eager", *, with_halo: bool = False
    ) -> ScanBackend:
        """The scan of a variant over all ranks, cached; with another one for states that cross one border only.

        Each purpose has its own, since a failed capture leaves a scan that cannot be used again.

        Raises:
            ConfigError: this machine does not support it.
        """
        config = sp_config(variant, state_elements)
        if config.all_scan.transport is AllScanTransport.symmetric and not self.on_cuda:
            # Backends check this too, but not over one rank, where nothing is sent.
            raise ConfigError("variants", variant, "symmetric memory needs CUDA")
        # Its text, since settings are mutable dataclasses, which cannot be keys.
        key = purpose, f"{config!r} {with_halo}"
        if key not in self._scans:
            halo = halo_groups(self.mesh) if with_halo else None
            mesh = self.mesh
            self._scans[key] = build_scan(config, mesh.scan_groups, mesh.timeout, self.device, halo, mesh.topology)
        return self._scans[key]

    def drain(self) -> None:
        """Wait until all scans are received and sent."""
        for scan in self._scans.values():
            scan.drain()

    def forget(self, purpose: str) -> None:
        """Drop the cached scans of a purpose."""
        self._scans = {key: scan for key, scan in self._scans.items() if key[0] != purpose}

    def choice_since(self, line: int) -> str | None:
        """The algorithm chosen by an All-Scan first launched since that line of the log.

        None if nothing was logged, as on all ranks but the first.
        """
        found = [text.partition(": ")[2] for text in self.log[line:] if text.startswith("all-scan of ")]
        return found[-1] if found else None

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
