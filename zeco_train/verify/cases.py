"""Runs all cases: sequences × dtypes × group sizes × what connects the ranks, on the launched ones; then own ranks.

Of each sequence, one device at once and in pieces, then each backend or method over its ranks, are compared with
float64 on the CPU. Where no setting selects cases, `verify` then starts ranks of its own (`own_ranks.py`).
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeco_train.distributed.mesh import ProcessMesh, attention_group, init_mesh
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch, gather
from zeco_train.ops.operator_registry import DEFAULT
from zeco_train.ops.seam import Exchange
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.attention.all_gather import ALL_GATHER
from zeco_train.sp.attention.method_registry import build_attention
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.verify.config import BACKENDS, DTYPES, LIMITS, METHODS, VerifyConfig
from zeco_train.verify.own_ranks import OwnRanksError, rows_of_own_ranks
from zeco_train.verify.reference import SequenceRank, exact, is_short, processors
from zeco_train.verify.report import FLOAT64, Deviation, VerifyRow, deviations
from zeco_train.verify.runs import (
    IN_HALVES,
    run_in_float64,
    run_on_ranks,
    run_one_device,
)
from zeco_train.verify.step_cases import FEWER_RANKS, SIZE, run_step_cases, step_cases
from zeco_train.verify.team_cases import PARTITIONS, attention_cases, run_team_cases, scan_cases
from zeco_train.verify.whole import LAUNCHED_DOCUMENTS, SOFTMAX, VERIFIED, Results, Whole

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
        for operator in config.operators:
            # Softmax attention beside another operator has one size.
            tokens = config.tokens if operator in (config.operator, DEFAULT) else [min(config.tokens)]
            yield from self._operator(operator, meshes, tokens)
        if self._everything:
            if self._device.type == "cuda":
                # On CPUs own ranks have them. Compiling their kernels takes longest, so each has one size.
                for operator in VERIFIED:
                    if operator not in config.operators:
                        yield from self._operator(operator, [self._meshes[max(self._meshes)]], [min(config.tokens)])
            yield from self._own_ranks()

    def _operator(self, operator: str, meshes: Sequence[ProcessMesh], tokens: Sequence[int]) -> Iterator[VerifyRow]:
        config, is_softmax = self._config, operator == SOFTMAX
        kinds = [False, True] if config.documents is None else [config.documents]
        for mesh, number, documents, dtype in itertools.product(meshes, tokens, kinds, config.dtypes):
            # Each group of ranks has values of its own.
            name = f"{config.seed} {mesh.dp_rank} {dtype} {number} {documents}"
            whole = Whole(
                name,
                operator,
                number,
                mesh.sp_size,
                batch=1 if documents else config.batch,
                heads=config.heads,
                groups=config.num_key_heads if is_softmax else config.heads,
                key_dim=config.key_dim,
                # FlashAttention has one width of heads.
                value_dim=config.key_dim if is_softmax else config.value_dim,
                documents=LAUNCHED_DOCUMENTS if documents else None,
                carry=not is_softmax and (not documents if config.carry is None else config.carry),
                dtype=DTYPES[dtype],
                is_launched=True,
            )
            windows = config.windows(number) if is_softmax else ()
            for each in [replace(whole, name=f"{name} {window}", window=window) for window in windows] or [whole]:
                yield from self._sequence(mesh, each, dtype)
                self._free()

    def _sequence(self, mesh: ProcessMesh, whole: Whole, dtype: str) -> Iterator[VerifyRow]:
        place, is_softmax = SequenceRank.of(mesh), whole.operator == SOFTMAX
        row = VerifyRow(dtype, whole.tokens, whole.ranks, whole.layout, "", limit=LIMITS[dtype])

        def enter(phase: str) -> None:
            self._enter(f"{dtype}, {row.sp_size} × {row.tokens} tokens: {phase}")

        enter("float64 on the CPU")
        part, active = whole.part(place.rank), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # With states one rank of each sequence is active.
        with processors(active if is_softmax else max(1, active // place.size)):
            (expected,) = exact(whole, place)
        if not is_softmax and is_short(whole):
            found = self._gather(deviations(run_in_float64(whole, part, place), expected))
            yield replace(row, backend=FLOAT64, deviations=found, limit=LIMITS["fp64"])
        enter("one device")
        part, expected = ({name: x.to(self._device) for name, x in own.items()} for own in (part, expected))
        one_device = run_one_device(whole, part, place)
        for name, run in one_device.items():
            yield replace(row, backend=name, deviations=self._gather(deviations(run, expected)))
        once, *chunked = one_device
        for name in self._config.methods if is_softmax else self._config.backends:
            if not _applies(name, mesh.sp_size) or (mesh.sp_size, name) in self._skipped:
                continue
            enter(name)
            results, reason = self._run(name, mesh, whole, part)
            if reason:
                yield replace(row, backend=name, reason=reason)
                continue
            # Paired queries are halves of shards.
            beside = IN_HALVES if name == ALL_GATHER.name and IN_HALVES in one_device else chunked[0]
            found = self._gather(deviations(results, expected, (one_device[once], one_device[beside])))
            yield replace(row, backend=name, deviations=found)

    def _run(self, name: str, mesh: ProcessMesh, whole: Whole, part: Results) -> tuple[Results, str]:
        # The results of a backend or method, or the reason why these ranks cannot run it; then none of them does.
        key, results, reason = (mesh.sp_size, name), Results(), ""
        try:
            if whole.operator == SOFTMAX:
                reason = METHODS[name].heads_problem(whole.heads, whole.groups, mesh.sp_size) or ""
            if not reason:
                if key not in self._exchanges:
                    self._exchanges[key] = self._connect(name, mesh)
                results = run_on_ranks(whole, part, self._exchanges[key], mesh.sp_rank)
        except ConfigError as error:
            reason = str(error)
        reason = next((text for text in gather(reason, self._launch.world_size) if text), "")
        if reason:
            self._skipped.add(key)
        return results, reason

    def _connect(self, name: str, mesh: ProcessMesh) -> Exchange:
        if name not in METHODS:
            return connect(BACKENDS[name], mesh.scan_groups, self._timeout, None, None, mesh.topology)
        if mesh.sp_size not in self._groups:
            self._groups[mesh.sp_size] = attention_group(mesh)
        method = build_attention(METHODS[name], self._groups[mesh.sp_size], self._timeout)
        return local_exchange().replaced(attention=method)

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
        rows = _rows_of_own_ranks(self._config.timeout) if self._launch.rank == 0 else iter(())
        while True:
            self._enter("exact cases on ranks of its own, started by rank 0")
            row = [next(rows, None)]
            if self._launch.world_size > 1:
                dist.broadcast_object_list(row, src=0)
            if row[0] is None:
                return
            yield row[0]


def _rows_of_own_ranks(timeout: float) -> Iterator[VerifyRow]:
    cases, steps = [*scan_cases(), *attention_cases()], step_cases()
    worlds = (
        (partial(run_team_cases, cases), sum(map(len, PARTITIONS[0])), len(cases)),
        (partial(run_step_cases, steps), SIZE, len(steps)),
        *((partial(run_step_cases, [case]), ranks, 1) for ranks, case in FEWER_RANKS.items()),
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
