"""Every scan over ranks of one process: results, messages, bytes, and virtual time against the cost model.

`python -m lab.virtual_ranks` has 1,024 ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lab.virtual_ranks import COSTS, Network, compare, run_checked, run_virtual
from tests.collectives.test_collectives import Pairs, check
from zeco_train.collectives.cost_model import Load
from zeco_train.collectives.doubling import Rounds, count_rounds
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.collectives.topology import Topology

pytestmark = pytest.mark.numeric


def test_message_that_nobody_sends_is_an_error() -> None:
    with pytest.raises(AssertionError, match="nobody sends rank 1 the message 7 from rank 0"):
        Network(Topology((2,)), COSTS).take(torch.empty(1), 0, 1, 7)


# Ranks of nodes: two nodes of two, and for the scan of nodes also one, nodes of one rank, and odd numbers of both.
NODES = [(name, (2, 2)) for name in SCANS] + [("lane", nodes) for nodes in ((4,), (1, 1, 1), (3,) * 5, (4, 4))]


@pytest.mark.parametrize(("name", "nodes"), NODES)
def test_every_scan_takes_states_of_any_shape(name: str, nodes: tuple[int, ...]) -> None:
    """In any number of blocks, which cut heads, or also the columns of each."""
    topology, heads, columns = Topology(nodes), (1, 3), range(1, 7)
    blocks = [*range(1, 8)] if SCANS[name].best_blocks else [None]
    for seed, (h, v, number) in enumerate(itertools.product(heads, columns, blocks)):
        reverse, with_carry, matrices = seed % 2 == 0, seed % 3 == 0, seed % 5 == 0
        pairs = Pairs.make(seed, topology.ranks, (1, h, 3, v), torch.float64, with_carry, seed % 4 == 0, matrices)
        # The carry of a serial scan would need all ranks at once.
        requests = pairs.requests(reverse, with_carry and not SCANS[name].in_series)
        found = run_virtual(SCANS[name], requests, topology, COSTS, number)
        case = f"{name} {nodes} {h=} {v=} {number=} {reverse=} {with_carry=} {matrices=}"
        for rank, incoming in enumerate(found.incoming):
            check(f"incoming state of rank {rank}", incoming, pairs.incoming(rank, reverse), case)
        for carry in found.carries:
            check("carry_out", carry, pairs.incoming(topology.ranks, reverse), case)
        if name == "lane" and not with_carry:
            load = Load(topology.ranks, (1, h, 3, v), 8, matrices, len(nodes))
            assert max(found.network.bytes.values()) == SCANS[name].bytes_sent(load, False), case


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("name", SCANS)
def test_every_scan_takes_the_modelled_time_over_nodes(name: str) -> None:
    """Nodes of 8 and of one rank, and a single one."""
    for number, (nodes, per_node) in enumerate(((1, 8), (8, 1), (4, 8), (8, 4))):
        compare(name, Topology((per_node,) * nodes), reverse=number % 2 == 1)


def test_uneven_numbers_of_nodes_take_at_most_the_modelled_time() -> None:
    """The rounds' formula is exact for powers of two."""
    for nodes in (3, 5, 6, 7, 12, 20):
        for name in ("lane", "doubling"):
            found, load = run_checked(name, Topology((2,) * nodes))
            modelled = SCANS[name].seconds(COSTS, load, None)
            assert 0.75 * modelled < found.seconds <= modelled * (1 + 1e-9), (name, nodes)


@pytest.mark.parametrize("name", SCANS)
def test_scans_with_matrices_send_the_bytes_of_their_descriptor(name: str) -> None:
    for ranks in (2, 3, 4):
        found, load = run_checked(name, Topology((ranks,)), matrices=True)
        assert max(found.network.bytes.values()) == SCANS[name].bytes_sent(load, False), ranks
        if name == "chain":
            # The received state alone, never a matrix.
            assert max(found.network.bytes.values()) == load.state_bytes


@pytest.mark.parametrize("matrices", [False, True])
def test_doubling_takes_any_number_of_ranks(matrices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_rounds = Rounds.run

    def without_receives(rounds: Rounds, *arguments: Any) -> Any:
        # All of them are posted at launch.
        rounds._wire.receive = None  # type: ignore[method-assign, assignment]
        return run_rounds(rounds, *arguments)

    monkeypatch.setattr(Rounds, "run", without_receives)
    for size in (2, 3, 5, 6, 7, 9, 16, 17):
        found, load = run_checked("doubling", Topology((size,)), matrices=matrices)
        assert max(found.network.messages.values()) == count_rounds(size)
        assert max(found.network.bytes.values()) == SCANS["doubling"].bytes_sent(load, False)
