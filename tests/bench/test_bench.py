"""Benchmarks: statistics on known samples, error messages, and two cases on two CPU ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.bench_settings import error_line, measure
from tests.support.commands import run_here
from tests.support.distributed import run_distributed
from zeco_train.bench import __main__ as command
from zeco_train.bench.case import Report, log_lines
from zeco_train.bench.config import CollectivesConfig, OperatorConfig
from zeco_train.bench.session import Session, WrongResultError, check_results
from zeco_train.bench.timing import Runner, Summary, slowest_rank
from zeco_train.bench.variants import LocalCopyScan, Variant, backend_variant, over_all_ranks
from zeco_train.config.overrides import load_settings
from zeco_train.lifecycle.join import Launch
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanTransport
from zeco_train.sp.backend_registry import SHARING, Backend
from zeco_train.system.numbers import relative_error

QUICK = ["device=cpu", "warmup=1", "runs=3", "flush_mb=1", "timeout_seconds=60"]
SMALL_STATES = [*QUICK, "sizes_mb=[0.03125]"]
SMALL_STEPS = [*QUICK, "dtype=fp64", "heads=[2]", "dims=[[8,16]]", "tokens=[64]", "check_tokens=80"]


def test_summary_uses_slowest_rank_of_each_run() -> None:
    by_rank = [[1.0, 9.0, 3.0, 4.0, 5.0], [2.0, 1.0, 1.0, 1.0, 7.0]]
    assert slowest_rank(by_rank) == [2.0, 9.0, 3.0, 4.0, 7.0]
    summary = Summary.of(by_rank)
    assert (summary.median, summary.min, summary.max, summary.runs) == (4.0, 2.0, 9.0, 5)
    # Percentiles of 2, 3, 4, 7, 9: 0.4 of the way from the first to the second, 0.6 from the fourth to the fifth.
    assert (summary.p10, summary.p90) == pytest.approx((2.4, 8.2))
    assert Summary.of([[1.0, 2.0]]).median == 1.5
    assert summary.as_row()["p10_ms"] == summary.p10
    for wrong in ([], [[]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError):  # noqa: PT011
            Summary.of(wrong)


def test_errors_are_relative_to_the_norm() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.0, 2.0]), torch.zeros(2)) == 2.0
    check_results("zeco", 0, {"o": (expected, expected)}, 1e-12)
    for wrong in (expected + 1, expected * torch.nan):
        with pytest.raises(
            WrongResultError, match=r"zeco is wrong, nothing is timed: dq on rank 1 .* allowed are 1e-03"
        ):
            check_results("zeco", 1, {"o": (expected, expected), "dq": (wrong, expected)}, 1e-3)


def test_settings_are_yaml_values() -> None:
    config = load_settings(
        OperatorConfig, ["heads=[4]", "dims=[[64, 128]]", "dtype=fp32", "graph=true", "variants=[dp,zeco:chain]"]
    )
    assert (config.heads, config.dims, config.graph, config.variants) == ([4], [[64, 128]], True, ["dp", "zeco:chain"])
    assert load_settings(CollectivesConfig, ["sizes_mb=[1, 0.5]"]).heads(0.5) == 16
    # Text stays text even if Hydra parses it as a number.
    assert load_settings(CollectivesConfig, ["commit=1234e56"]).commit == "1234e56"
    paper = backend_variant("zeco:chain:symmetric:paper").sp_config(32 * 64 * 128)
    assert (paper.backend, paper.all_scan.num_blocks) == (Backend.zeco, 16)
    assert (paper.all_scan.algorithm, paper.all_scan.transport) == (AllScanAlgorithm.chain, AllScanTransport.symmetric)
    whole, parts, more = (repr(backend_variant(f"lasp2{of}").sp_config(1)) for of in ("", ":3", ":64"))
    # `Session.exchange` tells exchanges apart by it.
    assert len({whole, parts, more}) == 3


_ZECO = ", ".join(SHARING)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("collective", "case=collective: must be collectives, operator, attention, model, decode, longest or plot"),
        ("collectives size_mb=[1]", "size_mb=[1]: unknown key; did you mean sizes_mb?"),
        ("collectives sizes_mb=[0.7]", "sizes_mb=0.7: must be a multiple of 0.03125"),
        ("collectives runs", "argument=runs: must be KEY=VALUE"),
        ("collectives runs=0", "runs=0: must be ≥ 1"),
        ("collectives budget_seconds=.inf", "budget_seconds=.inf: must be a number"),
        ("collectives variants=[dp]", f"variants=dp: must be one of all_gather, all_reduce, {_ZECO}"),
        ("collectives variants=[lasp2:0]", "variants=lasp2:0: must be one of all_gather, all_reduce"),
        ("collectives variants=[zeco:tree]", "variants=zeco:tree: tree must be one of auto, chain, two_shot"),
        ("operator variants=[zeco:chain:p2p:0]", "sp.all_scan.blocks=0: must be ≥ 1"),
        ("operator dims=[64,128]", "dims=[64,128]: must be a list [a list [a whole number, …], …]"),
        ("operator dims=[[64]]", "must be a list of pairs [K, V]"),
        ("operator operator=rwkv", "operator=rwkv: must be one of gla, scalar_decay, fixed_decay, delta, gated_delta"),
        ("operator groups=2", "groups=2: gla has none; take another operator"),
        ("operator operator=scalar_decay groups=3", "groups=3: must be ≥ 1 and divide heads=[16, 32]"),
        ("operator decay=none", "decay=none: gla draws its decays; take operator=fixed_decay"),
        ("operator operator=fixed_decay decay=alibi", "decay=alibi: must be one of retention, none"),
        ("operator passes=[backward]", "passes=['backward']: must be a list of forward, forward_backward"),
        ("operator tokens=[]", "tokens=[]: must be a list of numbers ≥ 1"),
        ("operator variants=[fla:compile]", f"variants=fla:compile: must be one of dp, copy, {_ZECO}, fla"),
        ("operator device=cpu kernels=require", "kernels=require: there are no kernels on CPUs"),
        (
            "attention variants=[dp,flash]",
            "variants=['dp', 'flash']: must be a list of different ones of dp, all_gather, ",
        ),
        ("attention variants=[]", "variants=[]: must be a list of different ones"),
        ("attention key_heads=3", "key_heads=3: must be ≥ 1 and divide heads=16"),
        ("attention window=0", "window=0: must be ≥ 1, or null"),
        ("attention graph=true", "graph=True: a method's messages are not captured; take graph=false"),
        ("decode model=gla_tiny contexts=[64,32]", "contexts=[64, 32]: must rise"),
        ("decode model=gla_tiny variants=[fast]", "must be a list of different ones of eager, graph"),
        ("decode model=gla_9b", "gla_tiny"),
        ("decode model=gla_tiny device=cpu variants=[graph]", "variants=['graph']: CUDA graphs need CUDA"),
        ("plot", "needs results.json"),
        ("plot /nowhere.json", "/nowhere.json: cannot be read"),
    ],
)
def test_invalid_arguments_print_one_error_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in error_line(arguments.split(), capsys)


def _wrong_backend_is_caught(rank: int, world_size: int, folder: str) -> list[str]:
    """Run both cases with a wrong lasp2: nothing is timed or written. Returns the error messages."""
    found = []
    for case, kind, arguments in (
        ("collectives", CollectivesConfig, SMALL_STATES),
        ("operator", OperatorConfig, SMALL_STEPS),
    ):
        config: Any = load_settings(kind, [*arguments, f"out={folder}/{case}", "variants=[lasp1,lasp2]"])  # type: ignore[type-var]
        session = Session.open(config, Launch(rank, world_size, rank, world_size))
        right = session.exchange

        def exchange(variant: Variant, *rest: Any, right: Any = right) -> Any:
            return over_all_ranks(LocalCopyScan()) if variant.kind == "lasp2" else right(variant, *rest)

        with mock.patch.object(session, "exchange", exchange), mock.patch.object(Runner, "rows") as measure:
            try:
                command.CASES[case].measure(config, session)
            except WrongResultError as error:
                found.append(str(error))
            measure.assert_not_called()
        session.drain()
    return found


def test_backend_with_wrong_results_is_not_timed(tmp_path: Path) -> None:
    for found in run_distributed(_wrong_backend_is_caught, 2, str(tmp_path)):
        collectives, operator = found
        # All ranks raise the error of the first failing rank.
        assert "lasp2 is wrong, nothing is timed: forward on rank 0" in collectives
        assert "lasp2 is wrong, nothing is timed: o on rank 0" in operator
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_collectives_case_on_two_ranks(tmp_path: Path) -> None:
    run_distributed(measure, 2, "collectives", *SMALL_STATES, f"out={tmp_path}")
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["format"], results["world_size"], results["config"]["runs"]) == (1, 2, 3)
    assert {"python", "packages", "commit", "device", "device_name", "variables"} <= results["environment"].keys()
    rows = {row["variant"]: row for row in results["rows"]}
    assert rows.keys() == {*load_settings(CollectivesConfig, []).variants}
    for row in (row for row in rows.values() if "note" not in row):
        samples = row["samples_ms_by_rank"]
        assert [len(of_rank) for of_rank in samples] == [3, 3]
        assert row["median_ms"] == Summary.of(samples).median
        assert row["min_ms"] <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] <= row["max_ms"]
    assert rows["all_gather"]["ratio"] == 1.0
    assert rows["zeco:two_shot:p2p"]["choice"] == "two_shot by gloo"
    assert rows["lasp2"]["ratio"] == rows["lasp2"]["median_ms"] / rows["all_gather"]["median_ms"]
    assert 0.0 < rows["all_reduce"]["relative_error"] < 1e-6
    table = (tmp_path / "table.txt").read_text()
    assert "need CUDA" in table.replace("needs", "need")
    assert "no CUDA graphs on a CPU" in table
    assert (tmp_path / "collectives.png").exists()


@pytest.mark.slow
def test_exceeded_budget_skips_remaining_sizes(tmp_path: Path) -> None:
    # The first size is measured; a second one would exceed the budget.
    arguments = [*SMALL_STATES, f"out={tmp_path}", "variants=[all_gather]", "sizes_mb=[0.03125,0.0625]"]
    with mock.patch.object(Session, "spent", lambda self, seconds: setattr(self, "_longest", 1e6)):
        outcome = run_here(command.main, "collectives", *arguments)
    assert outcome.code == 0, outcome
    assert "0.0625 MiB and what follows is not measured: budget_seconds=540" in outcome.out
    assert "budget_seconds=540" in (tmp_path / "table.txt").read_text()
    assert [row["size_mb"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]] == [0.03125]


def test_repeated_log_lines_are_reported_once() -> None:
    session = mock.Mock(spec=Session)
    logger = logging.getLogger("zeco_train.sp.zeco")
    with log_lines(session) as lines:
        for _ in range(2):
            logger.info("all-scan of %g MB: two_shot", 1.0)
        logger.debug("no")
    logger.info("later")
    assert lines == ["all-scan of 1 MB: two_shot"]
    session.say.assert_called_once_with("all-scan of 1 MB: two_shot")


def test_failures_are_printed_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = mock.Mock(rank=0, world_size=1, is_main=True, device=torch.device("cpu"))
    session = Session(mesh, 60)
    with mock.patch.object(session, "agree", lambda action: action()):
        report = Report("collectives", CollectivesConfig(out=str(tmp_path)), session, {})
        report.note("two ranks")
        report.fail("rank 1 read other tokens than its own")
    wrong = "FAILED: rank 1 read other tokens than its own"
    assert tuple(capsys.readouterr()) == ("two ranks\n", f"{wrong}\n")
    assert (report.failures, report.notes) == ([wrong.removeprefix("FAILED: ")], ["two ranks", wrong])
