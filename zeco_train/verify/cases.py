"""Runs all cases: sequences × dtypes × group sizes × what connects the ranks, on the launched ones; then own ranks.

Of each sequence, one device at once and in pieces, then each backend or method over its ranks, are compared with
float64 on the CPU. Where no setting selects cases, `verify` then starts ranks of its own (`own_ranks.py`).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.distributed.mesh import ProcessMesh, attention_group, init_mesh
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch, gather
from zeco_train.ops.seam import Exchange
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.attention.all_gather import ALL_GATHER
from zeco_train.sp.attention.method_registry import build_attention
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.verify.config import BACKENDS, DTYPES, LIMITS, METHODS, VerifyConfig
from zeco_train.verify.own_ranks import OwnRanksError, rows_of_own_ranks
from zeco_train.verify.reference import SequenceRank, exact, exact_attention, is_short
from zeco_train.verify.report import Deviation, VerifyRow, deviations
from zeco_train.verify.runs import (
    IN_HALVES,
    huge_deviations,
    huge_sequence,
    run_backend,
    run_in_float64,
    run_method,
    run_one_device,
)
from zeco_train.verify.sequences import SOFTMAX, VERIFIED, AttentionSequence, Sequence
from zeco_train.verify.step_cases import ONE_RANK, SIZE, run_step_cases, step_cases
from zeco_train.verify.team_cases import PARTITIONS, attention_cases, run_team_cases, scan_cases

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
        self._config, self._launch, self._device, self._enter = config, launch, device, enter
        self._everything, self._timeout = everything, timedelta(seconds=config.timeout)
        self._meshes = {size: init_mesh(launch, size, device, self._timeout) for size in config.sp_sizes}
        # By the ranks that share a sequence, and backend or method.
        self._exchanges: dict[tuple[int, str], Exchange] = {}
        self._skipped: set[tuple[int, str]] = set()
        self._groups: dict[int, ProcessGroup] = {}

    def rows(self) -> Iterator[VerifyRow]:
        """Compute the rows one by one; the same on every rank."""
        config, meshes = self._config, [*self._meshes.values()]
        if config.huge:
            yield from self._huge()
            return
        for operator in config.operators:
            tokens = config.attention_tokens if operator == SOFTMAX else config.tokens
            yield from self._operator(operator, meshes, tokens)
        if self._everything:
            if self._device.type == "cuda":
                # On CPUs own ranks have them. Compiling their kernels takes longest, so each has one size.
                for operator in VERIFIED:
                    if operator not in config.operators:
                        yield from self._operator(operator, [self._meshes[max(self._meshes)]], [min(config.tokens)])
            yield from self._own_ranks()

    def _operator(self, operator: str, meshes: Many[ProcessMesh], tokens: Many[int]) -> Iterator[VerifyRow]:
        config = self._config
        for mesh, number, documents, dtype in itertools.product(meshes, tokens, config.documents_or_not, config.dtypes):
            # Each group of ranks has values of its own.
            name = f"{config.seed} {mesh.dp_rank} {dtype} {number} {documents}"
            shape: dict[str, Any] = {
                "tokens": number,
                "num_ranks": mesh.sp_size,
                "batch": 1 if documents else config.batch,
                "heads": config.heads,
                "key_dim": config.key_dim,
                "dtype": DTYPES[dtype],
                "documents": documents,
            }
            if operator != SOFTMAX:
                carry = not documents if config.carry is None else config.carry
                sequence = Sequence(name, value_dim=config.value_dim, carry=carry, operator=operator, **shape)
                yield from self._sequence(mesh, sequence, dtype)
                self._free()
                continue
            for window in config.windows(number):
                # FlashAttention has one width of heads.
                shape |= {"value_dim": config.key_dim, "key_heads": config.num_key_heads, "window": window}
                yield from self._sequence(mesh, AttentionSequence(f"{name} {window}", **shape), dtype)
                self._free()

    def _sequence(self, mesh: ProcessMesh, sequence: Sequence | AttentionSequence, dtype: str) -> Iterator[VerifyRow]:
        place = SequenceRank.of(mesh)
        row = VerifyRow(dtype, sequence.tokens, sequence.num_ranks, sequence.layout, "", limit=LIMITS[dtype])

        def enter(phase: str) -> None:
            self._enter(f"{dtype}, {row.sp_size} × {row.tokens} tokens: {phase}")

        enter("float64 on the CPU")
        part = sequence.part(place.rank)
        if isinstance(sequence, AttentionSequence):
            expected = exact_attention(sequence, place)
        else:
            expected = exact(sequence, part, place)
            if is_short(sequence):
                found = self._gather(deviations(run_in_float64(sequence, part, place), expected))
                yield replace(row, backend="float64 itself", deviations=found, limit=LIMITS["fp64"])
        enter("one device")
        part, expected = ({name: x.to(self._device) for name, x in own.items()} for own in (part, expected))
        one_device = run_one_device(sequence, part, place)
        for name, run in one_device.items():
            yield replace(row, backend=name, deviations=self._gather(deviations(run, expected)))
        once, *chunked = one_device
        for name in self._config.methods if isinstance(sequence, AttentionSequence) else self._config.backends:
            if not _applies(name, mesh.sp_size) or (mesh.sp_size, name) in self._skipped:
                continue
            enter(name)
            results, reason = self._run(name, mesh, sequence, part, place)
            if reason:
                yield replace(row, backend=name, reason=reason)
                continue
            # Paired queries are halves of shards.
            beside = IN_HALVES if name == ALL_GATHER.name and IN_HALVES in one_device else chunked[0]
            found = self._gather(deviations(results, expected, (one_device[once], one_device[beside])))
            yield replace(row, backend=name, deviations=found)

    def _run(
        self,
        name: str,
        mesh: ProcessMesh,
        sequence: Sequence | AttentionSequence,
        part: dict[str, Tensor],
        place: SequenceRank,
    ) -> tuple[dict[str, Tensor], str]:
        """The results of a backend or method, or the reason why these ranks cannot run it; then none of them does."""
        key, results, reason = (mesh.sp_size, name), dict[str, Tensor](), ""
        try:
            if isinstance(sequence, AttentionSequence):
                reason = METHODS[name].heads_problem(sequence.heads, sequence.key_heads, mesh.sp_size) or ""
                if not reason:
                    if key not in self._exchanges:
                        if mesh.sp_size not in self._groups:
                            self._groups[mesh.sp_size] = attention_group(mesh)
                        method = build_attention(METHODS[name], self._groups[mesh.sp_size], self._timeout)
                        self._exchanges[key] = local_exchange().replaced(attention=method)
                    results = run_method(sequence, part, self._exchanges[key], place.rank)
            else:
                if key not in self._exchanges:
                    self._exchanges[key] = connect(
                        BACKENDS[name], mesh.scan_groups, self._timeout, None, None, mesh.topology
                    )
                results = run_backend(sequence, part, self._exchanges[key], place.rank)
        except ConfigError as error:
            reason = str(error)
        reason = next((text for text in gather(reason, self._launch.world_size) if text), "")
        if reason:
            self._skipped.add(key)
        return results, reason

    def _gather(self, own: dict[str, Deviation]) -> tuple[dict[str, Deviation], ...]:
        # Nothing is in flight after it.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return tuple(gather(own, self._launch.world_size))

    def _free(self) -> None:
        # The next sequences may need all memory, in blocks of other sizes.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def drain(self) -> None:
        """Wait until no communication is in flight; call before destroying the groups."""
        for exchange in self._exchanges.values():
            exchange.drain()

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

    def _huge(self) -> Iterator[VerifyRow]:
        """More than 2³¹ elements, on each rank's device separately."""
        for dtype in self._config.dtypes:
            if dtype == "fp64":
                continue
            sequence = huge_sequence(self._config, DTYPES[dtype], f"{self._config.seed} huge {self._launch.rank}")
            self._enter(f"{dtype}, {sequence.tokens} tokens of {sequence.heads} heads")
            found = self._gather(huge_deviations(sequence, self._device))
            layout = f"{sequence.heads} heads, carry"
            yield VerifyRow(dtype, sequence.tokens, 1, layout, "one device", found, LIMITS[dtype])
            self._free()


def _rows_of_own_ranks(timeout: float) -> Iterator[VerifyRow]:
    cases, steps = [*scan_cases(), *attention_cases()], step_cases()
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


def _applies(name: str, sp_size: int) -> bool:
    # On one rank every method is one device, and symmetric memory needs another rank; dp shares no sequence.
    if name in METHODS:
        return sp_size > 1
    config = BACKENDS[name]
    return bool(config.spec.scans) if sp_size > 1 else config.all_scan.transport is not AllScanTransport.symmetric
