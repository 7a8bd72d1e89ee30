"""Bytes on the wire of scans with matrix transitions: counted message by message, and by formula at scale."""

from __future__ import annotations

import pytest
import torch

from tests.support.virtual import run_virtual
from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.registry import SCANS
from zeco_train.collectives.topology import Topology
from zeco_train.ops.seam import ScanRequest, fold

pytestmark = pytest.mark.numeric

SHAPE, BLOCKS = (1, 4, 3, 5), 4
COSTS = Costs(Link.nccl, *(5.8e-6, 3e-9, 6e-6, 5e-7, 3e-9))
# A layer of delta_net_1b, gated_deltanet_1b or kda_1b with 16 heads: S has 1.05 MB in fp32, and so has M.
LAYER = (1, 16, 128, 128)
STATE = 16 * 128 * 128 * 4


@pytest.mark.few
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCANS)
def test_scans_with_matrices_send_the_bytes_of_their_descriptor(name: str, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    states = torch.randn(ranks, *SHAPE, generator=generator, dtype=torch.float64)
    matrices = torch.randn(ranks, *SHAPE[:3], SHAPE[2], generator=generator, dtype=torch.float64) / 3
    requests = [ScanRequest(*pair) for pair in zip(states, matrices, strict=True)]
    scan = SCANS[name]
    found = run_virtual(scan, requests, Topology((ranks,)), COSTS, BLOCKS if scan.best_blocks else None)
    expected = torch.zeros(SHAPE, dtype=torch.float64)
    for rank in range(ranks):
        torch.testing.assert_close(found.incoming[rank], expected, rtol=0, atol=1e-12)
        expected = fold(states[rank], matrices[rank], expected)
    load = Load(ranks, SHAPE, 8, matrices=True)
    assert max(found.network.bytes.values()) == scan.bytes_sent(load, False)
    if name == "chain":
        # The received state alone, never a matrix.
        assert max(found.network.bytes.values()) == states[0].nbytes


@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_chain_sends_one_state_where_gathering_sends_all_matrices(ranks: int) -> None:
    load = Load(ranks, LAYER, 4, matrices=True)
    assert SCANS["chain"].bytes_sent(load, False) == STATE
    assert SCANS["all_gather"].bytes_sent(load, False) == (ranks - 1) * 2 * STATE
