"""Scans of the benchmarks that stand in for others: gathered, switched, copied."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from tests.support.bench_settings import QUICK
from tests.support.distributed import run_distributed
from zeco_train.bench.backends import SwitchedScan
from zeco_train.bench.model_config import ModelConfig
from zeco_train.bench.session import Session
from zeco_train.bench.variants import GatheredScan, LocalCopyScan
from zeco_train.distributed.mesh import Launch
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
    assert GatheredScan().ends == session.scan("lasp1", 24).ends == (rank == 0, rank == world_size - 1)
    # A view, as of an adjoint: its strides are not those of a new tensor.
    for reverse, transition in itertools.product((False, True), (log_decay, matrices, matrices.mT)):
        results = []
        for scan in (GatheredScan(), session.scan("lasp1", 24)):
            pending = scan.launch(ScanRequest(state, transition, reverse, carry_in, want_carry=True))
            received = pending.wait()
            pending.finish()
            results.append((received, pending.carry_out()))
        for found, expected in zip(*results, strict=True):
            assert relative_error(found, expected) < 1e-14
    session.drain()


@pytest.mark.slow
def test_gathered_scan_equals_lasp1() -> None:
    run_distributed(_gathered_scan_is_right, 3)


def test_switched_scan_delegates_to_current_scan() -> None:
    scan, state = SwitchedScan(), torch.randn(1, 2, 3, 4)
    log_decay, carry_in = torch.zeros(1, 2, 3), torch.randn(1, 2, 3, 4)
    assert torch.equal(scan.launch(ScanRequest(state, log_decay, carry_in=carry_in)).wait(), carry_in)
    assert scan.ends == (True, True)
    scan.current = GatheredScan()
    ranks = mock.patch.multiple(torch.distributed, get_rank=lambda: 1, get_world_size=lambda: 3)
    with ranks:
        assert scan.ends == (False, False)
    scan.current = LocalCopyScan()
    assert torch.equal(scan.launch(ScanRequest(state, log_decay, want_carry=True)).carry_out(), state)
