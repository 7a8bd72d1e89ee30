"""FSDP's collectives over nodes: seconds by hand, what is hidden, and the advice on `parallel.shard_size`."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.planning import GLA_1B, make, make_case
from zeco_train.plan import calibration
from zeco_train.plan.advice import fastest_shards
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.memory import unit_bytes
from zeco_train.plan.report import as_text
from zeco_train.plan.sharding import (
    Group,
    exposed_parameter_seconds,
    gather_seconds,
    parameter_seconds,
    reduce_seconds,
    replica_group,
    shard_group,
)
from zeco_train.plan.traffic import parameter_traffic

pytestmark = pytest.mark.numeric

SIMPLE = calibration.Protocol(1e-6, 3e-6, 10e-6, 1.0)
SLOW_TREE = calibration.Protocol(1.0, 0.0, 0.0, 1.0)


def of_1b(ranks: int, *more: str) -> PlannedCase:
    return make_case(*GLA_1B, f"world_size={ranks}", f"data.seq_len={16_384 * ranks}", *more)


def test_groups_lie_in_nodes() -> None:
    for ranks, shard_size, shards, replicas in (
        (256, -1, Group(256, 32), Group(1, 1)),
        (256, 8, Group(8, 1), Group(32, 32)),
        (256, 2, Group(2, 1), Group(128, 32)),
        (256, 16, Group(16, 2), Group(16, 16)),
        # Half of these groups are on two nodes, none on more.
        (48, 12, Group(12, 2), Group(4, 4)),
        (48, 6, Group(6, 2), Group(8, 8)),
    ):
        case = of_1b(ranks, f"parallel.shard_size={shard_size}")
        assert (shard_group(case), replica_group(case)) == (shards, replicas), (ranks, shard_size)


def test_rings_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "RINGS", (SIMPLE,))
    monkeypatch.setattr(calibration, "TREES", (SLOW_TREE,))
    machine = dataclasses.replace(of_1b(8).machine, link=100e9, node_link=10e9)
    # 31 hops, 3 of them between nodes; 31/32 of the bytes over 8 network cards.
    assert gather_seconds(machine, Group(32, 4), 8e9) == pytest.approx(
        1e-6 + 28 * 3e-6 + 3 * 10e-6 + 8e9 * 31 / 32 / 80e9
    )
    assert gather_seconds(machine, Group(8, 1), 8e9) == pytest.approx(1e-6 + 7 * 3e-6 + 7e9 / 100e9)
    # One rank of each node: its card alone, and every hop between nodes, twice.
    assert reduce_seconds(machine, Group(4, 4), 1e9) == pytest.approx(1e-6 + 2 * 3 * 10e-6 + 2 * 0.75e9 / 10e9)
    assert gather_seconds(machine, Group(1, 1), 1e9) == reduce_seconds(machine, Group(1, 1), 1e9) == 0


def test_many_hops_take_the_protocol_and_the_tree_with_the_shorter_ones() -> None:
    machine = of_1b(8).machine
    few, many = (
        [
            way.start + (ranks - ranks // 8) * way.hop + (ranks // 8 - 1) * way.node_hop + 1e8 / 280e9 / way.share
            for way in calibration.RINGS
        ]
        for ranks in (16, 4096)
    )
    assert few.index(min(few)) == 2
    assert many.index(min(many)) == 0
    assert gather_seconds(machine, Group(4096, 512), 1e8 * 4096 / 4095) == pytest.approx(min(many))
    # A ring's hops alone.
    ring = min(2 * 511 * way.node_hop for way in calibration.RINGS)
    assert reduce_seconds(machine, Group(512, 512), 1e6) < ring / 5


def test_seconds_are_sums_over_units() -> None:
    case = of_1b(64, "parallel.shard_size=8", "train.segments=2")
    seconds, traffic, units = parameter_seconds(case), parameter_traffic(case), unit_bytes(case, 1)
    inside, across = Group(8, 1), Group(8, 8)
    assert (traffic.gathers, traffic.reductions) == (1, 2)
    assert seconds.gathered == pytest.approx(sum(gather_seconds(case.machine, inside, 2 * size) for size in units))
    assert seconds.scattered == pytest.approx(2 * sum(gather_seconds(case.machine, inside, 4 * size) for size in units))
    assert seconds.summed == pytest.approx(sum(reduce_seconds(case.machine, across, size / 2) for size in units))
    assert 0 < seconds.first < seconds.gathered / 3
    assert parameter_seconds(make_case(*GLA_1B, "world_size=1")).total == 0


def test_collectives_longer_than_compute_are_exposed() -> None:
    case = of_1b(4096)
    seconds = parameter_seconds(case)
    ends = seconds.first + seconds.last
    assert exposed_parameter_seconds(case, 0.0) == pytest.approx(seconds.total)
    hidden = ends + calibration.NCCL_SECONDS * parameter_traffic(case).total
    assert exposed_parameter_seconds(case, 100.0) == pytest.approx(hidden)
    # Gathers have the forward passes, a third of the compute, and reductions the rest; with zero3 all have all of it.
    gathers, reductions = seconds.gathered - seconds.first, seconds.scattered - seconds.last
    expected = ends + gathers / 2 + reductions - gathers
    assert exposed_parameter_seconds(case, 3 * gathers / 2) == pytest.approx(expected)
    gathered_twice = of_1b(4096, "parallel=zero3")
    everything = parameter_seconds(gathered_twice)
    assert everything.gathered == pytest.approx(2 * seconds.gathered)
    expected = everything.total - gathers
    assert exposed_parameter_seconds(gathered_twice, gathers) == pytest.approx(expected)


@pytest.mark.slow
def test_plan_names_a_faster_shard_size() -> None:
    arguments = [*GLA_1B, "world_size=4096", f"data.seq_len={4096 * 16_384}"]
    plan = make(*arguments)
    (note,) = [note for note in plan.notes if note.startswith("parallel.shard_size=")]
    best = fastest_shards(plan.planned.case, 0.05)
    assert best is not None
    assert note.startswith(
        f"parallel.shard_size={best.case.shards}: a step of {best.time.total:.4g} s, "
        f"not {plan.planned.time.total:.4g} with shards over 4096 ranks"
    )
    assert f"note: {note}" in as_text(plan)
    chosen = make(*arguments, f"parallel.shard_size={best.case.shards}")
    assert chosen.planned.time.total == best.time.total
    assert not [note for note in chosen.notes if "shard_size" in note]
    # Nothing to gain on one node, and nothing to shard with ddp.
    assert not make(*GLA_1B, "world_size=8", "data.seq_len=131072").notes
    assert fastest_shards(of_1b(64, "parallel=ddp"), 0.05) is None


def test_advice_keeps_to_the_memory() -> None:
    case = of_1b(1024)
    free = fastest_shards(case, 0.05)
    assert free is not None
    machine = dataclasses.replace(case.machine, memory=free.memory.peak - 1e6 + free.memory.outside)
    tight = fastest_shards(dataclasses.replace(case, machine=machine), 0.0)
    assert tight is not None
    assert tight.memory.fits
    assert tight.case.shards > free.case.shards
