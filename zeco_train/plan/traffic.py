"""Bytes that the busiest rank sends: for a scan and a step, by backend, as its descriptor says; and FSDP's traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from models.spec import BlockSpec
from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.halo import HALO
from zeco_train.collectives.worker import ScanSpec
from zeco_train.distributed.config import Strategy
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.memory import parameter_bytes, unit_bytes
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.backend_registry import Backend
from zeco_train.sp.scan_choice import ScanChoice, fastest_scan


@dataclass(frozen=True)
class Scans:
    """Scans per step on one rank; `with_carry` of them also return the state after the last rank."""

    forward: int
    backward: int
    with_carry: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_scans(case: PlannedCase) -> Scans:
    """Count the scans of a step: one per operator with a state, pass and direction; replays need none."""
    layers = sum(block.count for block in scanning_blocks(case))
    passes = layers * case.passes
    # A carry goes forward from each segment but the last, and its gradient back from each.
    carries = 0 if case.segments == 1 else layers * case.micro_steps * (2 * case.segments - 1)
    if not case.config.model.causal:
        # The state after the last rank is read in every scan.
        carries = 2 * passes
    return Scans(passes, passes, carries)


def scanning_blocks(case: PlannedCase) -> list[BlockSpec]:
    """Kinds of blocks that exchange states, once for each operator (`BlockSpec.scans`); softmax layers do not."""
    return [scan for block in case.spec.blocks.values() for scan in block.scans]


def costs_of(case: PlannedCase, scans: Sequence[ScanSpec], load: Load) -> Costs:
    """Costs of the link of these scans; a load that no kernel serves goes by messages."""
    link, transport = case.link, case.config.sp.all_scan.transport
    in_kernel = any(scan.runs_on(Link.symmetric, load) for scan in scans)
    if link is Link.nccl and transport is not AllScanTransport.p2p and in_kernel:
        link = Link.symmetric
    return case.machine.scans[link]


def scan_choice(case: PlannedCase, block: BlockSpec | None = None) -> ScanChoice | None:
    """Time of one scan from launch to wait, alone; None: nothing is sent, or the scan cannot run over the nodes.

    `block`: whose state is scanned; None: the largest of the model.
    """
    backend, scan = case.backend, case.other_scan
    if not backend.scans or case.sp_size == 1 or not scanning_blocks(case):
        return None
    settings = replace(case.config.sp, backend=Backend[backend.name])
    if scan is None:
        scans = settings.scans_over(case.topology)
    elif scan.problem(case.topology) is not None:
        return None
    else:
        scans = (scan,)
    # A configured number of blocks implies a fixed algorithm.
    blocks = settings.all_scan.num_blocks if len(scans) == 1 else None
    load = load_of(case, block)
    return fastest_scan(scans, costs_of(case, scans, load), load, blocks)


def load_of(case: PlannedCase, block: BlockSpec | None = None) -> Load:
    """The size of a scan of a block's states; of the largest state of the model, if none is given."""
    block = block or max(scanning_blocks(case), key=lambda each: math.prod(each.state_shape), default=None)
    return _load(case, (0, 0, 0)) if block is None else _load(case, block.state_shape, matrices=block.scans_matrices)


def _load(case: PlannedCase, shape: tuple[int, ...], *, matrices: bool = False) -> Load:
    return Load(case.sp_size, (case.batch, *shape), case.wide_bytes, matrices, nodes=case.topology.nodes)


def scan_bytes(
    case: PlannedCase, scan: ScanSpec | None, *, want_carry: bool = False, block: BlockSpec | None = None
) -> float:
    """Bytes that the busiest rank sends for one scan of a block's states; None: nothing is communicated."""
    return 0.0 if scan is None or case.sp_size == 1 else scan.bytes_sent(load_of(case, block), want_carry)


def step_bytes(case: PlannedCase, scan: ScanSpec | None) -> float:
    """Bytes that the busiest rank sends in a step for all scans."""
    scans, blocks = count_scans(case), scanning_blocks(case)
    plain, layers, sent = scans.total - scans.with_carry, sum(block.count for block in blocks), 0.0
    for block in blocks:
        carried = scans.with_carry * scan_bytes(case, scan, want_carry=True, block=block)
        sent += block.count * (plain * scan_bytes(case, scan, block=block) + carried)
    return sent / max(1, layers)


class Halos(NamedTuple):
    """Messages, bytes and seconds of a rank's halos in a step, such as the last inputs of convolutions."""

    messages: int
    bytes_per_step: float
    seconds: float


def plan_halos(case: PlannedCase) -> Halos:
    """One message per layer, pass and direction, to the next rank; none where no rank shares a sequence."""
    messages, sent, seconds = 0, 0.0, 0.0
    if case.backend.scans and case.sp_size > 1:
        for block in case.spec.blocks.values():
            for shape in block.halo_shapes:
                load = _load(case, shape, matrices=True)
                count = 2 * block.count * case.passes
                messages += count
                sent += count * HALO.bytes_sent(load, False)
                seconds += count * HALO.seconds(costs_of(case, (HALO,), load), load, None)
    return Halos(messages, sent, seconds)


@dataclass(frozen=True)
class ParameterTraffic:
    """FSDP's traffic of a rank in a step.

    Attributes:
        gathered, scattered: bytes sent within the sharding ranks, for parameters and for gradients.
        summed: bytes sent between replicas of shards.
        gathers, reductions: all-gathers of the model, and reductions of its gradient.
    """

    gathered: float
    scattered: float
    summed: float
    gathers: int
    reductions: int

    @property
    def total(self) -> float:
        return self.gathered + self.scattered + self.summed


def parameter_traffic(case: PlannedCase) -> ParameterTraffic:
    """By rings: over n ranks (n − 1)/n of a gathered or scattered tensor leaves a rank, twice that of a reduced one."""
    shards, copies = case.shards, case.world_size // case.shards
    strategy, whole = case.config.parallel.strategy, parameter_bytes(case, 1) * shards
    gathers, gathered = case.passes, whole * case.passes
    if strategy.keeps_weights:
        gathers, gathered = 1, whole
    elif strategy is Strategy.zero3:
        # Also resharded after each forward pass. A states-only pass does not gather the head, if that is a unit.
        gathers = forward_passes(case) + case.passes
        # The head is the unit before the root, which is the last; see `ModelSpec.units`.
        head = 0.0 if case.config.model.tie_word_embeddings else unit_bytes(case, 1)[-2]
        gathered = whole * gathers - head * (forward_passes(case) - case.passes)
    # Whole gradients are reduced once a step, as by the replicas of `hsdp`; sharded ones in every pass.
    reductions = 1 if shards == 1 or strategy is Strategy.zero1 else case.passes
    return ParameterTraffic(
        gathered=gathered * case.compute_bytes * (shards - 1) / shards,
        scattered=reductions * whole * case.wide_bytes * (shards - 1) / shards,
        summed=2 * whole / shards * case.wide_bytes * (copies - 1) / copies,
        gathers=gathers,
        reductions=reductions,
    )


def forward_passes(case: PlannedCase) -> int:
    """Forward passes of a step: all segments but the last also have one without gradients, for their states."""
    return case.micro_steps * (2 * case.segments - 1)
