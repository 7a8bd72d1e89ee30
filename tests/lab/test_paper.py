"""`lab.paper`: the fits of the papers' tables, our predictions beside them, and the files."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lab.paper import machine, noise, ours
from lab.paper.__main__ import paper
from zeco_train.bench import figures
from zeco_train.errors import ConfigError
from zeco_train.plan.step_time import waited_seconds

pytestmark = pytest.mark.numeric


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


def test_rows_by_hand() -> None:
    """ZeCO, Table 5 at 256 GPUs, and LASP-2's longest row."""
    rows = {(row.table, row.method, row.gpus, row.tokens): row for row in machine.tables()}
    own = machine.fit()
    zeco = rows["ZeCO 5", "zeco", 256, 16_384]
    dp_ms = own.step_16k + own.step_fixed + 5 * own.step_doubling
    zeco_ms = dp_ms + 20 * (2 * (own.start + 255 * own.hop) + own.layer_extra)
    assert zeco.paper == 34_400
    assert zeco.model == pytest.approx(16_384e3 / zeco_ms)
    assert (zeco.paper_ratio, zeco.model_ratio) == pytest.approx((34_400 / 42_838, dp_ms / zeco_ms))
    fixed, per_16k = machine.fit_lasp2()
    assert rows["LASP-2 6", "lasp2", 128, 2_097_152].model == pytest.approx(2_097_152 / (fixed + 128 * per_16k))


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


def test_table_10_of_lasp1_is_stored() -> None:
    rows = {(int(row["seq_len"]), int(row["gpus"])): row for row in figures.reference("lasp1_scalability")}
    assert len(rows) == 48
    assert rows[2048, 16]["ddp_tokens_per_second"] == 1893.3
    assert rows[4_194_304, 128] == {
        "seq_len": 4_194_304,
        "gpus": 128,
        "fsdp_tokens_per_second": 792_705,
        "fsdp_memory_gb_per_gpu": 66.2,
    }


@pytest.mark.campaign  # the plan of one of these is compared with the simulation below
def test_lane_keeps_the_throughput_of_dp_at_256_gpus() -> None:
    """For 8 to 25 µs between nodes, on H100 and H200, with 16k and 32k tokens a GPU."""
    rows = [row for row in ours.predicted() if row.gpus == 256]
    fastest = [row for row in rows if row.backend == "zeco"]
    assert {(row.device, row.tokens, row.alpha) for row in fastest} == {
        (device, tokens, alpha) for device in ours.DEVICES for tokens in ours.TOKENS for alpha in (8, 12, 25)
    }
    assert {row.scan for row in fastest} == {"lane"}
    assert min(row.efficiency for row in fastest) >= 0.97
    # The paper's own algorithm would not.
    assert max(row.efficiency for row in rows if row.backend == "zeco:chain") < 0.85


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


@pytest.mark.campaign
def test_dp_within_the_fastest_shards_keeps_its_throughput() -> None:
    rows = {(row.device, row.tokens, row.backend, row.gpus): row for row in ours.predicted() if row.alpha == ours.ALPHA}
    for device in ours.DEVICES:
        for tokens in ours.TOKENS:
            kept, whole = ([rows[device, tokens, name, gpus].rate for gpus in ours.GPUS] for name in ("dp", "dp:all"))
            assert whole == sorted(whole, reverse=True)
            assert kept[-1] > 0.98 * kept[0]
            assert all(least <= most for least, most in zip(whole, kept, strict=True))
            assert whole[-1] < 0.9 * kept[-1]


@pytest.mark.slow
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


def test_noise_costs_more_the_more_there_is_of_it() -> None:
    step = noise.Step(ranks=64, blocks=20, forward=4e-3, windows=(1e-4, 4e-4), optimizer=0.01)
    found = [step.efficiency(2e-4, sigma) for sigma in (0.0, 0.02, 0.05)]
    assert 1 > found[0] > found[1] > found[2] > 0.9
    # Noise without scans only adds to both.
    assert step.seconds(None, 0.05, 1) > step.seconds(None, 0.0, 1)


@pytest.mark.campaign
def test_paper_writes_figures_and_tables(tmp_path: Path) -> None:
    written = paper([f"out={tmp_path / 'new'}"])
    names = ("figure_1", "figure_3", "figure_4", "lasp2_figure_4", "scaling")
    expected = [*(f"{name}.png" for name in names), "tables.csv", "errors.txt", "predictions.csv", "noise.csv"]
    assert [path.name for path in written] == expected
    for path in written[:5]:
        assert path.read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "new" / "tables.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(machine.tables())
    assert float(rows[0]["model"]) == pytest.approx(float(rows[0]["paper"]) * (1 + float(rows[0]["error"])), rel=1e-3)
    assert "not fitted" in (tmp_path / "new" / "errors.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "^out=: needs a folder"),
        (["in=x"], "^argument=in=x: paper takes out=FOLDER only"),
        (["out="], "^argument="),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paper(arguments)
