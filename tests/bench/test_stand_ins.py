"""Scans of the benchmarks that stand in for others: gathered, copied."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.bench_settings import QUICK
from tests.support.distributed import run_distributed
from zeco_train.bench.config import ModelConfig
from zeco_train.bench.session import Session
from zeco_train.bench.variants import LocalCopyScan, backend_variant, gathered_exchange
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.seam import ScanRequest
from zeco_train.system.numbers import relative_error

pytestmark = pytest.mark.numeric


def _gathered_scan_is_right(rank: int, world_size: int) -> None:
    config = ModelConfig.load(QUICK)
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    generator = torch.Generator().manual_seed(rank)
    state = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=generator)
    log_decay = -torch.rand(1, 2, 3, dtype=torch.float64, generator=generator)
    matrices = torch.randn(1, 2, 3, 3, dtype=torch.float64, generator=generator)
    carry_in = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    exchanges = gathered_exchange(), session.exchange(backend_variant("lasp1"), 24)
    for each in exchanges:
        assert (each.is_first, each.is_last) == (rank == 0, rank == world_size - 1)
    # A view, as of an adjoint: its strides are not those of a new tensor.
    for reverse, transition in itertools.product((False, True), (log_decay, matrices, matrices.mT)):
        results = []
        for each in exchanges:
            pending = each.states.launch(ScanRequest(state, transition, reverse, carry_in, want_carry=True))
            received = pending.wait()
            pending.finish()
            results.append((received, pending.carry_out()))
        for found, expected in zip(*results, strict=True):
            assert relative_error(found, expected) < 1e-14
    session.drain()


@pytest.mark.slow
def test_gathered_scan_equals_lasp1() -> None:
    run_distributed(_gathered_scan_is_right, 3)


def test_copied_scan_returns_its_own_state() -> None:
    state = torch.randn(1, 2, 3, 4)
    pending = LocalCopyScan().launch(ScanRequest(state, torch.zeros(1, 2, 3), want_carry=True))
    received = pending.wait()
    pending.finish()
    assert torch.equal(received, state)
    assert received.data_ptr() != state.data_ptr()
    assert torch.equal(pending.carry_out(), state)
