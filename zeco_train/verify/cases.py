"""Runs all cases: sequences × dtypes × group sizes × backends on the launched ranks, softmax attention, and own ranks.

Where no setting selects cases, `verify` then starts ranks of its own for what needs more ranks than were launched, or
the trainer around them (`own_ranks.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch, gather
from zeco_train.ops.seam import Exchange
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.exchange import connect
from zeco_train.sp.registry import SPConfig
from zeco_train.verify.attention import AttentionCases
from zeco_train.verify.attention_cases import attention_cases
from zeco_train.verify.comparisons import Comparisons, Run
from zeco_train.verify.config import BACKENDS, DTYPES, LIMITS, SOFTMAX, VerifyConfig
from zeco_train.verify.own_ranks import PARTITIONS, OwnRanksError, TeamCase, rows_of_own_ranks, run_team_cases
from zeco_train.verify.reference import SequenceRank, exact, is_short
from zeco_train.verify.report import VerifyRow, deviations
from zeco_train.verify.runs import huge_deviations, huge_sequence, run_backend, run_in_float64, run_one_device
from zeco_train.verify.scan_cases import scan_cases
from zeco_train.verify.sequences import VERIFIED, Sequence
from zeco_train.verify.step_cases import ONE_RANK, SIZE, run_step_cases, step_cases

# Longest wait of own ranks for each other: they compute milliseconds.
_OWN_SECONDS = 60.0


class Verification:
    """The verification cases, row by row. Collective throughout.

    Args:
        config: resolved.
        everything: no setting selects cases: every operator, and ranks of its own.
        enter: called with a description of the current phase of this rank.

    Raises:
        ZecoError: the ranks cannot connect.
    """

    def __init__(
        self,
        config: VerifyConfig,
        launch: Launch,
        device: torch.device,
        enter: Callable[[str], None],
        everything: bool = False,
    ) -> None:
        self._config, self._launch, self._enter, self._everything = config, launch, enter, everything
        self._timeout = timedelta(seconds=config.timeout)
        self._compare = Comparisons(launch.world_size, device, enter)
        self._meshes = {size: init_mesh(launch, size, device, self._timeout) for size in config.sp_sizes}
        self._exchanges: dict[tuple[int, str], Exchange] = {}
        self._skipped: set[tuple[int, str]] = set()

    def rows(self) -> Iterator[VerifyRow]:
        """Compute the rows one by one; the same on every rank."""
        config = self._config
        if config.huge:
            yield from self._huge()
            return
        for operator in config.operators:
            if operator == SOFTMAX:
                yield from AttentionCases(config, self._meshes, self._compare).rows()
            else:
                yield from self._operator(operator, self._meshes, config.tokens)
        if self._everything:
            if self._compare.device.type == "cuda":
                # On CPUs own ranks have them. Compiling their kernels takes longest, so each has one size.
                widest = {size: mesh for size, mesh in self._meshes.items() if size == max(self._meshes)}
                for operator in VERIFIED:
                    if operator not in config.operators:
                        yield from self._operator(operator, widest, [min(config.tokens)])
            yield from self._own_ranks()

    def _operator(self, operator: str, meshes: Mapping[int, ProcessMesh], tokens: list[int]) -> Iterator[VerifyRow]:
        config = self._config
        for mesh, number, (documents, carry), dtype in itertools.product(
            meshes.values(), tokens, config.layouts, config.dtypes
        ):
            yield from self._sequence(mesh, self._make(mesh, operator, number, dtype, documents, carry), dtype)
            self._compare.free()

    def _own_ranks(self) -> Iterator[VerifyRow]:
        """Rows of the ranks that rank 0 starts; the other launched ranks get them from it."""
        rows = _rows_of_own_ranks(self._config.timeout) if self._launch.rank == 0 else iter(())
        while True:
            self._enter("exact cases on ranks of its own, started by rank 0")
            row = [next(rows, None)]
            if self._launch.world_size > 1:
                dist.broadcast_object_list(row, src=0)
            if row[0] is None:
                return
            yield row[0]

    def drain(self) -> None:
        """Wait until no communication is in flight; call before destroying the groups."""
        for exchange in self._exchanges.values():
            exchange.drain()

    def _make(
        self, mesh: ProcessMesh, operator: str, tokens: int, dtype: str, documents: bool, carry: bool
    ) -> Sequence:
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
            operator=operator,
        )

    def _sequence(self, mesh: ProcessMesh, sequence: Sequence, dtype: str) -> Iterator[VerifyRow]:
        """One sequence: the reference, one device, then every backend."""
        place, compare = SequenceRank.of(mesh), self._compare
        layout = ("documents" if sequence.documents else "one document") + (", carry" if sequence.carry else "")
        row = VerifyRow(dtype, sequence.tokens, sequence.num_ranks, layout, "", limit=LIMITS[dtype])
        compare.enter(row, "float64 on the CPU")
        part = sequence.part(place.rank)
        expected = exact(sequence, part, place)
        if is_short(sequence):
            found = compare.gather(deviations(run_in_float64(sequence, part, place), expected))
            yield replace(row, backend="float64 itself", deviations=found, limit=LIMITS["fp64"])
        compare.enter(row, "one device")
        part = {name: x.to(compare.device) for name, x in part.items()}
        expected = {name: x.to(compare.device) for name, x in expected.items()}
        runs = self._runs(mesh, sequence, part, place)
        yield from compare.rows(row, expected, run_one_device(sequence, part, place), runs)

    def _runs(
        self, mesh: ProcessMesh, sequence: Sequence, part: dict[str, Tensor], place: SequenceRank
    ) -> Iterator[Run]:
        for backend in self._config.backends:
            if _applies(BACKENDS[backend], mesh.sp_size) and (mesh.sp_size, backend) not in self._skipped:
                yield backend, partial(self._run, backend, mesh, sequence, part, place)

    def _run(
        self, backend: str, mesh: ProcessMesh, sequence: Sequence, part: dict[str, Tensor], place: SequenceRank
    ) -> tuple[dict[str, Tensor], str]:
        """The results of a backend, or the reason why these ranks cannot run it, in which case none of them does."""
        key = mesh.sp_size, backend
        results, reason = {}, ""
        try:
            if key not in self._exchanges:
                self._exchanges[key] = connect(
                    BACKENDS[backend], mesh.scan_groups, self._timeout, None, None, mesh.topology
                )
            results = run_backend(sequence, part, self._exchanges[key], place)
        except ConfigError as error:
            reason = str(error)
        reason = next((text for text in gather(reason, self._launch.world_size) if text), "")
        if reason:
            self._skipped.add(key)
        return results, reason

    def _huge(self) -> Iterator[VerifyRow]:
        """More than 2³¹ elements, on each rank's device separately."""
        for dtype in self._config.dtypes:
            if dtype == "fp64":
                continue
            sequence = huge_sequence(self._config, DTYPES[dtype], f"{self._config.seed} huge {self._launch.rank}")
            self._enter(f"{dtype}, {sequence.tokens} tokens of {sequence.heads} heads")
            found = self._compare.gather(huge_deviations(sequence, self._compare.device))
            layout = f"{sequence.heads} heads, carry"
            yield VerifyRow(dtype, sequence.tokens, 1, layout, "one device", found, LIMITS[dtype])
            self._compare.free()


def _rows_of_own_ranks(timeout: float) -> Iterator[VerifyRow]:
    cases: list[TeamCase] = [*scan_cases(), *attention_cases()]
    steps = step_cases()
    worlds = (
        (partial(run_team_cases, cases), sum(map(len, PARTITIONS[0])), len(cases)),
        (partial(run_step_cases, steps), SIZE, len(steps)),
        (partial(run_step_cases, [ONE_RANK]), 1, 1),
    )
    for work, size, count in worlds:
        try:
            yield from rows_of_own_ranks(work, size, count, timedelta(seconds=min(timeout, _OWN_SECONDS)))
        except OwnRanksError as error:
            yield VerifyRow("fp64", 0, size, "on ranks of its own", "", problem=str(error), on_own_ranks=True)


def _applies(config: SPConfig, sp_size: int) -> bool:
    """Whether a backend runs on groups of this size: dp on one rank only, symmetric memory on more than one."""
    if sp_size > 1:
        return bool(config.spec.scans)
    return config.all_scan.transport is not AllScanTransport.symmetric
