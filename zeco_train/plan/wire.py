"""Bytes on the wire, of one rank: what it sends to others, for one scan and for a step, by backend; and FSDP's traffic.

A scan sends and takes what its descriptor in `zeco_train/collectives` says; the rank that sends most counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.spec import Choice, ScanSpec, choose
from zeco_train.distributed.parallelize import Strategy
from zeco_train.plan.case import Case
from zeco_train.plan.memory import parameter_bytes, unit_bytes
from zeco_train.sp.backend import BackendSpec
from zeco_train.sp.registry import BACKENDS, Backend
from zeco_train.sp.zeco import AllScanTransport


@dataclass(frozen=True)
class Scans:
    """Scans of a step on one rank.

    Attributes:
        forward, backward: in all layers, segments and micro-batches.
        with_carry: of both, those that also give the state after the last rank.
    """

    forward: int
    backward: int
    with_carry: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_scans(case: Case) -> Scans:
    """One a layer, pass and direction, whatever is recomputed: what was received is replayed. With segments a carry is
    handed on, forward from each but the last, and its gradient back from each."""
    layers = case.config.model.num_layers
    passes = layers * case.passes
    carries = 0 if case.segments == 1 else layers * case.micro_steps * (2 * case.segments - 1)
    return Scans(passes, passes, carries)


def ways() -> list[tuple[str, BackendSpec, ScanSpec | None]]:
    """The backends, and each algorithm of those that have several, under the names of table rows. A backend without
    any: the same tokens on each rank as sequences of their own."""
    return [
        (spec.name if len(spec.scans) < 2 or scan is None else f"{spec.name} ({scan.name})", spec, scan)
        for spec in BACKENDS.values()
        for scan in spec.scans or (None,)
    ]


def costs_of(case: Case, scans: Sequence[ScanSpec]) -> Costs:
    """How the states of scans to choose from go over the wire."""
    link = Link.nccl
    if case.machine.is_cpu:
        link = Link.gloo
    elif case.crosses_nodes:
        link = Link.nccl_across_nodes
    elif case.config.sp.all_scan.transport is not AllScanTransport.p2p and any(scan.kernel for scan in scans):
        link = Link.symmetric
    return case.machine.scans[link]


def scan_choice(case: Case, backend: BackendSpec, scan: ScanSpec | None = None) -> Choice | None:
    """What one scan takes from launch to wait, nothing beside it; None where nothing crosses ranks.

    Args:
        case: what runs.
        backend: in place of the configured one.
        scan: of its algorithms; None is the configured one, or the fastest.
    """
    if not backend.scans or case.sp_size == 1:
        return None
    settings = replace(case.config.sp, backend=Backend[backend.name])
    scans = settings.scans if scan is None else (scan,)
    # A configured number of blocks is that of a known algorithm.
    blocks = settings.all_scan.num_blocks if len(scans) == 1 else None
    return choose(scans, costs_of(case, scans), load_of(case), blocks)


def load_of(case: Case) -> Load:
    """The size of a scan of states like the model's."""
    return Load(case.sp_size, (case.batch, *case.spec.state_shape), case.wide_bytes)


def scan_bytes(case: Case, scan: ScanSpec | None, *, want_carry: bool = False) -> float:
    """Bytes that the busiest rank sends for one scan of states like the model's; None: nothing crosses ranks."""
    return 0.0 if scan is None or case.sp_size == 1 else scan.bytes_sent(load_of(case), want_carry)


def step_bytes(case: Case, scan: ScanSpec | None) -> float:
    """Bytes that a rank sends in a step for all scans."""
    scans = count_scans(case)
    plain = scans.total - scans.with_carry
    return plain * scan_bytes(case, scan) + scans.with_carry * scan_bytes(case, scan, want_carry=True)


@dataclass(frozen=True)
class ParameterTraffic:
    """FSDP's, of a step and rank.

    Attributes:
        gathered, scattered: bytes sent within the ranks that shard, for whole parameters and for their gradients.
        summed: bytes sent between copies of shards.
        gathers, reductions: how often a step gathers the model, and reduces its gradient.
    """

    gathered: float
    scattered: float
    summed: float
    gathers: int
    reductions: int

    @property
    def total(self) -> float:
        return self.gathered + self.scattered + self.summed


def parameter_traffic(case: Case) -> ParameterTraffic:
    """In rings: (n − 1)/n of what is gathered or scattered leaves a rank, twice that of what is summed over n ranks."""
    shards, copies = case.shards, case.world_size // case.shards
    strategy, whole = case.config.parallel.strategy, parameter_bytes(case, 1) * shards
    gathers, gathered = case.passes, whole * case.passes
    if strategy is Strategy.zero2:
        gathers, gathered = 1, whole
    elif strategy is Strategy.zero3:
        # Dropped behind each forward pass, too. A pass for the states alone leaves the head out, if it is a unit.
        gathers = forward_passes(case) + case.passes
        head = 0.0 if case.config.model.tie_word_embeddings else unit_bytes(case, 1)[-2]
        gathered = whole * gathers - head * (forward_passes(case) - case.passes)
    # `ddp` sums whole gradients once a step, as do the copies of `hsdp`; sharded ones are reduced in every pass.
    reductions = 1 if strategy is Strategy.ddp else case.passes
    return ParameterTraffic(
        gathered=gathered * case.compute_bytes * (shards - 1) / shards,
        scattered=reductions * whole * case.wide_bytes * (shards - 1) / shards,
        summed=2 * whole / shards * case.wide_bytes * (copies - 1) / copies,
        gathers=gathers,
        reductions=reductions,
    )


def forward_passes(case: Case) -> int:
    """Through the blocks, in a step: each segment but the last also without gradients, for the states between."""
    return case.micro_steps * (2 * case.segments - 1)
