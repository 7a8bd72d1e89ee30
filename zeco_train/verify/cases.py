"""Runs all cases on all ranks together: sequences × dtypes × group sizes × backends."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from zeco_train.distributed.mesh import Launch, ProcessMesh, gather, init_mesh
from zeco_train.errors import ConfigError
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.registry import SPConfig, build_scan
from zeco_train.sp.zeco import AllScanTransport
from zeco_train.verify.config import BACKENDS, DTYPES, LIMITS, VerifyConfig
from zeco_train.verify.huge import huge_deviations, huge_sequence
from zeco_train.verify.reference import Place, exact, is_short, recurrence
from zeco_train.verify.report import Deviation, Row, deviations
from zeco_train.verify.runs import run_backend, run_one_device
from zeco_train.verify.sequences import Sequence


class Verification:
    """The verification cases, row by row. Collective throughout.

    Args:
        config: resolved.
        enter: called with a description of the current phase of this rank.

    Raises:
        ZecoError: the ranks cannot connect.
    """

    def __init__(
        self, config: VerifyConfig, launch: Launch, device: torch.device, enter: Callable[[str], None]
    ) -> None:
        self._config, self._launch, self._device, self._enter = config, launch, device, enter
        self._timeout = timedelta(seconds=config.timeout)
        self._meshes = {size: init_mesh(launch, size, device, self._timeout) for size in config.sp_sizes}
        self._scans: dict[tuple[int, str], ScanBackend] = {}
        self._skipped: set[tuple[int, str]] = set()

    def rows(self) -> Iterator[Row]:
        """Compute the rows one by one; the same on every rank."""
        config = self._config
        if config.huge:
            yield from self._huge()
            return
        for mesh, tokens, (documents, carry), dtype in itertools.product(
            self._meshes.values(), config.tokens, config.layouts, config.dtypes
        ):
            yield from self._sequence(mesh, self._make(mesh, tokens, dtype, documents, carry), dtype)
            _free(self._device)

    def drain(self) -> None:
        """Wait until no communication is in flight; call before destroying the groups."""
        for scan in self._scans.values():
            scan.drain()

    def _make(self, mesh: ProcessMesh, tokens: int, dtype: str, documents: bool, carry: bool) -> Sequence:
        config = self._config
        return Sequence(
            # Each group of ranks has values of its own.
            name=f"{config.seed} {mesh.dp_rank} {dtype} {tokens} {documents}",
            tokens=tokens,
            num_ranks=mesh.sp_size,
            batch=1 if documents else config.batch,
            heads=config.heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            dtype=DTYPES[dtype],
            documents=documents,
            carry=carry,
            operator=config.operator,
        )

    def _sequence(self, mesh: ProcessMesh, sequence: Sequence, dtype: str) -> Iterator[Row]:
        """One sequence: the reference, one device, then every backend."""
        place = Place(mesh.sp_rank, mesh.sp_size, mesh.devices.get_group("sp") if mesh.sp_size > 1 else None)
        self._enter(f"{dtype}, {sequence.num_ranks} × {sequence.tokens} tokens: float64 on the CPU")
        part = sequence.part(place.rank)
        expected = exact(sequence, part, place)
        layout = ("documents" if sequence.documents else "one document") + (", carry" if sequence.carry else "")
        row = Row(dtype, sequence.tokens, sequence.num_ranks, layout, "", limit=LIMITS[dtype])
        if is_short(sequence):
            judged = self._gather(deviations(expected, recurrence(sequence, place)))
            yield replace(row, backend="float64 itself", deviations=judged, limit=LIMITS["fp64"])

        self._enter(f"{dtype}, {sequence.num_ranks} × {sequence.tokens} tokens: one device")
        part = {name: x.to(self._device) for name, x in part.items()}
        expected = {name: x.to(self._device) for name, x in expected.items()}
        once, twice = run_one_device(sequence, part, place)
        for name, run in (("one device", once), ("one device, cut oddly", twice)):
            yield replace(row, backend=name, deviations=self._gather(deviations(run, expected)))
        for backend in self._config.backends:
            if not _applies(BACKENDS[backend], mesh.sp_size) or (mesh.sp_size, backend) in self._skipped:
                continue
            self._enter(f"{dtype}, {sequence.num_ranks} × {sequence.tokens} tokens: {backend}")
            results, reason = self._run(backend, mesh, sequence, part, place)
            if reason:
                self._skipped.add((mesh.sp_size, backend))
                yield replace(row, backend=backend, reason=reason)
                continue
            found = self._gather(deviations(results, expected, (once, twice)))
            yield replace(row, backend=backend, deviations=found)

    def _gather(self, own: dict[str, Deviation]) -> tuple[dict[str, Deviation], ...]:
        """All-gather the deviations of all ranks. Nothing is in flight after it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return tuple(gather(own, self._launch.world_size))

    def _run(
        self, backend: str, mesh: ProcessMesh, sequence: Sequence, part: dict[str, Tensor], place: Place
    ) -> tuple[dict[str, Tensor], str]:
        """The results of a backend, or the reason why these ranks cannot run it, in which case none of them does."""
        key = mesh.sp_size, backend
        results, reason = {}, ""
        try:
            if key not in self._scans:
                self._scans[key] = build_scan(
                    BACKENDS[backend], mesh.scan_groups, self._timeout, None, None, mesh.topology
                )
            results = run_backend(sequence, part, self._scans[key], place)
        except ConfigError as error:
            reason = str(error)
        return results, next((text for text in gather(reason, self._launch.world_size) if text), "")

    def _huge(self) -> Iterator[Row]:
        """More than 2³¹ elements, on each rank's device separately."""
        for dtype in self._config.dtypes:
            if dtype == "fp64":
                continue
            sequence = huge_sequence(self._config, DTYPES[dtype], f"{self._config.seed} huge {self._launch.rank}")
            self._enter(f"{dtype}, {sequence.tokens} tokens of {sequence.heads} heads")
            found = self._gather(huge_deviations(sequence, self._device))
            layout = f"{sequence.heads} heads, carry"
            yield Row(dtype, sequence.tokens, 1, layout, "one device", found, LIMITS[dtype])
            _free(self._device)


def _applies(config: SPConfig, sp_size: int) -> bool:
    """Whether a backend runs on groups of this size: dp on one rank only, symmetric memory on more than one."""
    if sp_size > 1:
        return bool(config.scans)
    return config.all_scan.transport is not AllScanTransport.symmetric


def _free(device: torch.device) -> None:
    """Free cached memory between cases: the next ones may need all of it, in blocks of other sizes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
