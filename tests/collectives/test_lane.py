"""The `lane` scan over processes as nodes, and its refusals; `test_virtual.py` has it over many nodes."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.collectives.test_collectives import Pairs, check
from tests.support.distributed import on_ranks
from zeco_train.collectives.topology import Topology
from zeco_train.errors import ConfigError
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig, AllScanTransport

pytestmark = pytest.mark.numeric

# Columns that divide by 2 and 3, that divide by nothing but 5, and fewer than 4 of them.
SHAPES = ((1, 2, 5, 3), (2, 1, 4, 5), (1, 3, 3, 1))


@pytest.mark.processes
@on_ranks(4)
def test_given_nodes_reach_the_scan(rank: int, world_size: int) -> None:
    """`sp.all_scan.ranks_per_node` reaches the scan, and `auto` compares all algorithms over nodes.

    Over gloo the states take any shape, as in `test_virtual.py` over ranks of one process.
    """
    from zeco_train.sp.backend_registry import SPConfig
    from zeco_train.sp.exchange import connect

    for algorithm in ("auto", "lane"):
        config = SPConfig(all_scan=AllScanConfig(AllScanAlgorithm[algorithm], ranks_per_node=2))
        config.validate()
        groups = dist.new_group(), dist.new_group()
        scan = connect(config, groups, timedelta(seconds=60), torch.device("cpu"))
        for seed, (shape, reverse, matrices) in enumerate(itertools.product(SHAPES, *[(False, True)] * 2)):
            pairs = Pairs.make(seed, world_size, shape, torch.float64, seed % 3 == 0, seed % 4 < 2, matrices)
            want_carry, case = seed % 2 == 0, f"{algorithm}, {seed}"
            launched = scan.states.launch(pairs.requests(reverse, want_carry)[rank])
            check("incoming state", launched.wait(), pairs.incoming(rank, reverse), case)
            if want_carry:
                check("carry_out", launched.carry_out(), pairs.incoming(world_size, reverse), case)
        scan.drain()
    with pytest.raises(ConfigError, match=r"^sp.all_scan.ranks_per_node=3: must divide the 4 ranks .*: 1, 2, 4$"):
        connect(SPConfig(all_scan=AllScanConfig(ranks_per_node=3)), groups, timedelta(seconds=60))
    lane, uneven = SPConfig(all_scan=AllScanConfig(AllScanAlgorithm["lane"])), Topology((3, 1), ("a", "b"))
    with pytest.raises(ConfigError, match=r"^sp.all_scan.algorithm=lane: needs as many .* 2 nodes of 3 and 1 ranks"):
        connect(lane, groups, timedelta(seconds=60), topology=uneven)


def test_topology_by_hosts() -> None:
    found = Topology.of_hosts(["a"] * 8 + ["b"] * 8 + ["c"] * 4)
    assert (found.node_sizes, found.hosts, found.is_even) == ((8, 8, 4), ("a", "b", "c"), False)
    assert str(found) == "3 nodes of 8, 8 and 4 ranks"
    # Ranks that are dealt out one by one are neighbours of none.
    assert Topology.of_hosts(["a", "b", "a", "b"]).node_sizes == (1, 1, 1, 1)
    assert Topology.of_hosts(["a", "a"]) == Topology((2,), ("a",))
    assert Topology((4,), ("a",)).with_ranks_per_node(8) == Topology((4,), ("a",))
    assert str(Topology((16,), ("a",)).with_ranks_per_node(4)) == "4 nodes of 4 ranks"


def test_settings_of_scans() -> None:
    even, uneven, alone = Topology((2, 2)), Topology((2, 1)), Topology((4,))
    auto = AllScanConfig()
    assert [scan.name for scan in auto.scans_over(alone)] == ["chain", "two_shot"]
    assert [scan.name for scan in auto.scans_over(even)] == ["chain", "two_shot", "doubling", "lane"]
    assert [scan.name for scan in auto.scans_over(uneven)] == ["chain", "two_shot", "doubling"]
    with pytest.raises(ConfigError, match=r"^sp.all_scan.algorithm=lane: needs as many ranks on every node"):
        AllScanConfig(AllScanAlgorithm["lane"]).scans_over(uneven)
    AllScanConfig(AllScanAlgorithm.chain, blocks="2").validate()
    with pytest.raises(ConfigError, match=r"^sp.all_scan.blocks=2: "):
        AllScanConfig(AllScanAlgorithm.two_shot, blocks="2").validate()
    for name in ("lane", "doubling"):
        config = AllScanConfig(AllScanAlgorithm[name])
        config.validate()
        assert [scan.name for scan in config.scans] == [name]
        for field, value in {"transport": AllScanTransport.symmetric, "blocks": "2", "ranks_per_node": 0}.items():
            with pytest.raises(ConfigError) as caught:
                dataclasses.replace(config, **{field: value}).validate()
            assert caught.value.field == f"sp.all_scan.{field}"
