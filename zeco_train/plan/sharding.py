"""Time of FSDP's collectives, by NCCL's rings and trees over nodes.

A collective over n ranks on k nodes, with as many ranks on each, takes

    ring    start + steps ((n − k) hop + (k − 1) node_hop) + bytes / rate
    tree    start + 2 ((n / k − 1) hop + log₂ k node_hop) + bytes / rate

with 1 step for an all-gather or a reduce-scatter and 2 for an all-reduce, of which NCCL takes the faster, by the
fastest protocol (`calibration.RINGS`). The rate is the lesser of a rank's link and n / k network cards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeco_train.distributed.config import Strategy
from zeco_train.plan import calibration as known
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.devices import Machine
from zeco_train.plan.memory import unit_bytes
from zeco_train.plan.traffic import parameter_traffic


@dataclass(frozen=True)
class Group:
    """The n ranks of a collective, and the k nodes that hold them."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks on a node, at least."""
        return self.ranks // self.nodes


def shard_group(case: PlannedCase) -> Group:
    """Adjacent ranks that hold the model once; the group that is on most nodes."""
    shards, per_node = case.shards, case.gpus_per_node
    # Where groups begin in a node repeats after at most as many groups as a node has ranks.
    firsts = range(0, case.world_size, shards)[:per_node]
    return Group(shards, max((first + shards - 1) // per_node - first // per_node + 1 for first in firsts))


def replica_group(case: PlannedCase) -> Group:
    """Ranks that hold the same shards; they lie `shards` apart."""
    copies, in_a_node = case.world_size // case.shards, max(1, case.gpus_per_node // case.shards)
    return Group(copies, -(-copies // in_a_node))


def gather_seconds(machine: Machine, group: Group, size: float) -> float:
    """An all-gather of `size` bytes in all, or a reduce-scatter of as many."""
    return _seconds(machine, group, size * (group.ranks - 1) / group.ranks, known.RINGS, 1)


def reduce_seconds(machine: Machine, group: Group, size: float) -> float:
    """An all-reduce of `size` bytes on each rank."""
    ring = _seconds(machine, group, 2 * size * (group.ranks - 1) / group.ranks, known.RINGS, 2)
    if machine.is_cpu or group.ranks == 1:
        return ring
    depth, inside = math.ceil(math.log2(group.nodes)), group.per_node - 1
    tree = (
        way.start + 2 * (inside * way.hop + depth * way.node_hop) + 2 * size / (_rate(machine, group) * way.share)
        for way in known.TREES
    )
    return min(ring, *tree)


def _seconds(machine: Machine, group: Group, sent: float, ways: Sequence[known.Protocol], steps: int) -> float:
    if group.ranks == 1:
        return 0.0
    if machine.is_cpu:
        return sent / machine.link
    inside, across = group.ranks - group.nodes, group.nodes - 1
    return min(
        way.start + steps * (inside * way.hop + across * way.node_hop) + sent / (_rate(machine, group) * way.share)
        for way in ways
    )


def _rate(machine: Machine, group: Group) -> float:
    return machine.link if group.nodes == 1 else min(machine.link, group.per_node * machine.node_link)


@dataclass(frozen=True)
class ParameterSeconds:
    """Seconds of FSDP's collectives in a step, whether or not compute hides them.

    Attributes:
        gathered, scattered, summed: as in `ParameterTraffic`.
        first, last: gathers before any compute and reductions after it, among them: of embedding and first block.
    """

    gathered: float
    scattered: float
    summed: float
    first: float
    last: float

    @property
    def total(self) -> float:
        """One after the other."""
        return self.gathered + self.scattered + self.summed


def parameter_seconds(case: PlannedCase) -> ParameterSeconds:
    """Seconds of the collectives of a step, unit by unit."""
    machine, traffic = case.machine, parameter_traffic(case)
    shards, replicas, units = shard_group(case), replica_group(case), unit_bytes(case, 1)
    gathers = [gather_seconds(machine, shards, size * case.compute_bytes) for size in units]
    scatters = [gather_seconds(machine, shards, size * case.wide_bytes) for size in units]
    sums = [reduce_seconds(machine, replicas, size / case.shards * case.wide_bytes) for size in units]

    def outer(seconds: list[float]) -> float:
        return sum(seconds[:2]) + sum(seconds[2:][-1:])

    # The head is not gathered for states alone, which matters to bytes only.
    return ParameterSeconds(
        gathered=traffic.gathers * sum(gathers),
        scattered=traffic.reductions * sum(scatters),
        summed=sum(sums),
        first=outer(gathers),
        last=outer(scatters) + outer(sums),
    )


def exposed_parameter_seconds(case: PlannedCase, compute: float) -> float:
    """Seconds of FSDP's traffic that a step takes longer for.

    The first gathers and the last reductions are exposed. Others overlap with compute: gathers with forward passes,
    which take a third of it, and reductions with backward passes. They slow compute down, or take longer than it.

    Args:
        case: the configuration on its ranks.
        compute: seconds of forward and backward passes of a step.
    """
    seconds, traffic = parameter_seconds(case), parameter_traffic(case)
    if case.machine.is_cpu:
        # The same cores do both.
        return seconds.total
    ends = seconds.first + seconds.last
    gathers, scattered = seconds.gathered - seconds.first, seconds.scattered / case.passes
    # Replicas sum their gradients in the last of a step's backward passes.
    last = scattered + seconds.summed - seconds.last
    forward, backward = compute / 3, compute * 2 / 3 / case.passes
    if case.config.parallel.strategy is Strategy.zero3:
        # Gathers in both passes.
        excess = max(0.0, gathers + (case.passes - 1) * scattered + last - compute)
    else:
        if case.config.parallel.strategy.keeps_weights:
            # Only the first of a step's forward passes gathers.
            forward /= case.passes
        excess = max(0.0, gathers - forward) + max(0.0, last - backward)
        excess += (case.passes - 1) * max(0.0, scattered - backward)
    return ends + max(known.NCCL_SECONDS * traffic.total, excess)
