"""`lab.paper`: the fits of the papers' tables, our predictions beside them, and the files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lab.paper import machine, noise, ours
from zeco_train.bench import figures
from zeco_train.plan.step_time import waited_seconds

pytestmark = [pytest.mark.campaign, pytest.mark.numeric]


def test_seven_parameters_explain_dp_all_scan_and_zeco() -> None:
    assert len(dataclasses.fields(machine.Machine)) == 7
    found = machine.fit()
    # Times of a start, a hop and a step, in ms.
    assert min(dataclasses.astuple(found)) > 0
    rows = [row for row in machine.tables() if row.table.startswith("ZeCO")]
    fitted = [row for row in rows if row.method in machine.FITTED]
    assert (len(rows), len(fitted)) == (12 + 30 + 44, 6 + 10 + 24)
    for row in fitted:
        assert abs(row.error) <= 0.1, row
        assert row.ratio_error is None or abs(row.ratio_error) <= 0.03, row
    assert sum(row.ratio_error is not None for row in fitted) == 12


def test_two_parameters_explain_table_6_of_lasp2() -> None:
    rows = [row for row in machine.tables() if row.table == "LASP-2 6"]
    assert len(rows) == 38
    assert max(abs(row.error) for row in rows) <= 0.1


def test_fit_finds_known_parameters() -> None:
    generator = np.random.default_rng(0)
    system, exact = generator.random((30, 3)), np.array([2.0, -1.0, 0.5])
    assert machine._fit(system, system @ exact) == pytest.approx(exact)
    # One wrong target in 30 spoils least squares by more than the limit, which weights restore.
    targets = system @ exact
    targets[0] += 0.15
    plain = np.linalg.lstsq(system, targets, rcond=None)[0]
    assert np.abs(system @ plain - targets).max() > machine._LIMIT
    assert np.abs(system @ machine._fit(system, targets) - targets).max() <= machine._LIMIT


def test_rings_explain_what_dp_of_the_paper_loses() -> None:
    """With 16k tokens a GPU, without a fitted parameter, if nothing hides them."""
    paper = {
        int(row["gpus"]): row["seq_len_per_gpu"] / row["dp"]
        for row in figures.reference("zeco_model_tokens_per_second_per_gpu")
        if row["seq_len_per_gpu"] == 16_384
    }
    for gpus in (16, 32, 64, 128, 256):
        share = (ours.ring_seconds(gpus) - ours.ring_seconds(8)) / (paper[gpus] - paper[8])
        assert 0.8 < share < 1, gpus


def test_simulation_without_noise_is_the_plan() -> None:
    """And by hand: 2 layers on 2 ranks, whose scans take 3 and 2 s longer than their windows."""
    step = noise.Step(ranks=2, blocks=2, forward=10.0, windows=(1.0, 2.0), optimizer=5.0, drift=0.12)
    assert step.seconds(None, 0.0, 0) == 2 * 10 + 2 * 20 + 5
    # The first rank waits for none, but is held within a share of a block, and by as much the other's second state
    # comes earlier. In the backward pass that share exceeds the delay, which is waited for once.
    drift = step.drift * 10
    assert 0 < drift < 2 < step.drift * 20
    assert step.seconds(4.0, 0.0, 0) == pytest.approx(13 + 13 - drift + 22 + 20 + 5)
    # That is the planner's rule.
    waits = [2 * waited_seconds(late, step.drift * block, 2) for late, block in ((3.0, 10.0), (2.0, 20.0))]
    assert waits == pytest.approx([3 + 3 - drift, 2])
    # Ranks that wait for each other stay together, so they wait each time.
    assert dataclasses.replace(step, together=2).seconds(4.0, 0.0, 0) == pytest.approx(2 * 13 + 2 * 22 + 5)
    for alpha in (8.0, 25.0):
        row = next(row for row in ours._rows("h200", 256, 16_384, alpha) if row.backend == "zeco")
        planned = noise.Step.of(ours.gla_1b("h200", 256, 16_384, alpha))
        assert planned.efficiency(row.microseconds * 1e-6, 0.0, seeds=1) == pytest.approx(row.efficiency, abs=1e-4)
