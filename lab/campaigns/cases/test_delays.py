"""Benchmark case `delays`: where its delays take effect, what the planner predicts, and the case on two CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lab.delays import __main__ as delays
from lab.delays.__main__ import _Measurement
from lab.delays.config import DelaysConfig
from lab.delays.model import OVERLAPS, PATTERNS, Predicted, late_by
from lab.delays.spins import Place, SpinningScan, Spins
from tests.support.bench_settings import TINY
from tests.support.distributed import run_distributed
from zeco_train.bench.session import Session
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.backend import LocalScan

pytestmark = pytest.mark.campaign

MODEL = [text.replace("model.num_layers=", "layers=") for text in TINY if not text.startswith("heads")]
QUICK = [*MODEL, "model.num_heads=2", "device=cpu", "dtype=fp32", "warmup=1", "runs=3", "steps=3", "flush_mb=1"]
QUICK += ["hops=5", "heads=[2]", "tokens=[32]", "drift_tokens=32", "delays_us=[10000,100000]", "drift_us=[20000]"]


def test_spins_follow_the_layers_of_each_direction() -> None:
    layers, spent = 3, list[tuple[Place, bool, int]]()
    spins = Spins(layers, torch.device("cpu"))
    inner = LocalScan()
    with (
        mock.patch.object(spins, "spend", lambda *where: spent.append(where)),
        mock.patch.object(inner, "worker", return_value=mock.Mock(launch=lambda job: job.run())),
    ):
        scan = SpinningScan(inner, spins)
        state = torch.randn(1, 2, 3, 4)
        for reverse in (False,) * layers + (True,) * layers + (False,):
            scan.launch(ScanRequest(state, torch.zeros(1, 2, 3), reverse))
    order = [*((False, layer) for layer in (0, 1, 2)), *((True, layer) for layer in (2, 1, 0)), (False, 0)]
    assert spent == [(place, *each) for each in order for place in Place]


_BLOCK = 25.0


def _predicted(drift: float, hidden: float, layers: int) -> Predicted:
    return Predicted(1.0, (1.0 + hidden, 1.0 + hidden), drift, True, layers, (1.0, 1.0), _BLOCK)


def test_late_ranks_share_their_delays_only_within_the_drift() -> None:
    layers, delay = 100, 5.0
    for reverse in (False, True):
        coupled, free = _predicted(0.0, 1.0, layers), _predicted(100.0, 100.0, layers)
        shares = [
            {pattern: each.late_growth(pattern, reverse, delay) / layers / delay for pattern in PATTERNS}
            for each in (coupled, free)
        ]
        assert shares[0] == pytest.approx({"same": 1.0, "alternating": 1.0, "once": 0.01})
        assert shares[1] == pytest.approx({"same": 1.0, "alternating": 0.5, "once": 0.01})
        # Beyond twice the drift, max(1/2, 1 − drift / delay) of the delay is waited for.
        between = _predicted(2.0, 100.0, layers).late_growth("alternating", reverse, delay)
        assert between / layers / delay == pytest.approx(1 - 2.0 / delay, abs=0.01)
    assert [late_by("alternating", rank, 3, 1.0) for rank in range(2)] == [[1, 0, 1], [0, 1, 0]]


def test_constants_are_those_that_explain_what_was_measured() -> None:
    predicted, delay = _predicted(2.0, 100.0, 20), 5.0
    for reverse in (False, True):
        growth = predicted.late_growth("alternating", reverse, delay)
        assert predicted.drift_of(reverse, delay, growth) == pytest.approx(2.0 / _BLOCK, abs=1e-3)
        # Ranks that wait in every layer; and those that never do, which may be apart by half of the delay at least.
        assert predicted.drift_of(reverse, delay, 20 * delay) == pytest.approx(0.0, abs=1e-6)
        assert predicted.drift_of(reverse, delay, 0.0) >= delay / 2 / _BLOCK
        assert predicted.overlap_of(reverse, 0.0) == OVERLAPS[reverse]


def _one_failure_spares_the_rest(rank: int, world_size: int, folder: str) -> tuple[list[str], set[str]]:
    """Run the case with a part that fails on rank 1 only; returns the failures, and the parts with rows."""
    config = DelaysConfig.load([*QUICK, f"out={folder}", "parts=[hops,operator]"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))

    def fail(*rest: Any) -> None:
        if rank == 1:
            raise RuntimeError("no such kernel")

    with mock.patch.object(_Measurement, "_hops", fail):
        report = delays.CASE.measure(config, session)
    session.drain()
    return report.failures, {row["part"] for row in report.rows}


def test_a_failing_part_is_noted_and_the_others_are_measured(tmp_path: Path) -> None:
    for failures, parts in run_distributed(_one_failure_spares_the_rest, 2, str(tmp_path)):
        assert failures == ["hops of 2 heads: rank 1: RuntimeError: no such kernel"]
        assert parts == {"operator"}
