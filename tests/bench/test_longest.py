"""The search for the longest sequence: bisection, what a trial's end means, the table, and the plan beside it."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.commands import is_running, run_here
from zeco_train.bench import __main__ as command
from zeco_train.bench import longest
from zeco_train.bench.config import LongestConfig
from zeco_train.bench.longest import FailedTrialError, Trials
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.advice import longest_sequence
from zeco_train.plan.case import build_case
from zeco_train.plan.config import parse
from zeco_train.plan.memory import plan_memory
from zeco_train.system.numbers import largest

TINY = ["model=gla_tiny", "model.num_layers=1", "model.hidden_size=32", "dtype=fp32", "warmup=1"]
OUT_OF_MEMORY = 7, "error: rank 0: step 1: out of memory (CUDA out of memory. Tried to allocate 2 GiB); less\n"


@pytest.mark.parametrize("guess", [0, 1, 7, 60, 100, 900])
@pytest.mark.parametrize("precision", [0.0, 0.05])
def test_largest_number_is_found_within_its_precision(guess: int, precision: float) -> None:
    for right in (0, 1, 2, 59, 60, 61, 99, 100):
        tried: list[int] = []

        def works(number: int, right: int = right, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number <= right

        found = largest(works, guess, 100, precision)
        assert right - max(1, precision * found) < found <= right, (right, tried)
        assert found in (0, *tried)
        assert {*tried} <= {*range(1, 101)}
        assert len(tried) == len({*tried}) <= 15, (right, tried)
    # A guess that is right is confirmed by two trials and halves of a tenth.
    assert largest(lambda number: number <= 1000, 990, 10_000, 0.1) == 990


def _fake(monkeypatch: pytest.MonkeyPatch, fits: Any) -> list[list[str]]:
    """Replace the processes of trials: `fits(settings)` is whether a run succeeds, or its exit code and output."""
    started: list[list[str]] = []

    def start(trials: Trials, settings: list[str]) -> tuple[int, str]:
        started.append(settings)
        values = dict(text.split("=", 1) for text in settings)
        outcome = fits({"tokens": int(values["data.seq_len"]), **values})
        if outcome is not True:
            return outcome or OUT_OF_MEMORY
        folder = Path(values["run_dir"].strip("'"))
        folder.mkdir()
        row = {"step": 2, "memory_gb": int(values["data.seq_len"]) / 1e6, "tokens_per_second": 5.0}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return 0, ""

    monkeypatch.setattr(Trials, "_start", start)
    return started


def test_table_has_the_longest_of_each_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"none": 10_000, "full": 40_000}
    settings = ["ranks=2", "variants=[dp,zeco]", "strategies=[zero1,torch_ddp]", "recompute=[none,full]", "unit=512"]
    settings += ["precision=0", "most=30000", "device=cpu", f"out={tmp_path}"]
    started = _fake(monkeypatch, lambda run: run["tokens"] <= limits[run["train.recompute"]] // int(run["sp.size"]))
    outcome = run_here(command.main, "longest", *TINY, *settings)
    assert outcome.code == 0, outcome
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    found = {(row["strategy"], row["recompute"], row["variant"]): row["tokens"] for row in rows}
    # Multiples of 512 tokens a rank, at most 30,000.
    expected = {("none", "dp"): 9728, ("none", "zeco"): 4096, ("full", "dp"): 29_696, ("full", "zeco"): 19_456}
    assert found == {(name, *rest): tokens for name in ("zero1", "torch_ddp") for rest, tokens in expected.items()}
    assert all(row["memory_gb"] == row["tokens"] / 1e6 for row in rows)
    # A search that is cut has said what it tried.
    tried = [line.split(" after")[0] for line in outcome.out.splitlines() if " after " in line]
    assert {"9,728 tokens: trained", "10,240 tokens: out of memory"} <= {*tried}
    assert len(tried) == len(started)
    assert all({"train.device=cpu", "train.steps=2", "parallel.timeout_seconds=120.0"} <= {*each} for each in started)


def test_refused_and_failed_settings_are_rows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, lambda run: (2, "warning: a\nerror: data.path: not there\n"))
    settings = ["dtype=bf16", "device=cpu", "variants=[dp]", "strategies=[torch_ddp,zero1]", "recompute=[none]"]
    outcome = run_here(command.main, "longest", *TINY, *settings, f"out={tmp_path}")
    assert outcome.code == 1
    refused, failed = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert refused["note"].startswith("refused: train.dtype=bf16: must be fp32 or fp64 with parallel=torch_ddp")
    assert failed["note"] == "1,024 tokens: error: data.path: not there"


def test_what_fitted_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, lambda run: run["tokens"] <= 4096 or (1, "error: late\n"))
    outcome = run_here(command.main, "longest", *TINY, "device=cpu", "recompute=[none]", f"out={tmp_path}")
    assert outcome.code == 1
    # On one rank the backends train alike: one row.
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["variant"], row["tokens"], row["memory_gb"], row["tokens_per_second"]) == ("dp", 4096, 0.004096, 5.0)
    assert row["note"].startswith("at least; stopped by ")
    assert row["note"].endswith(" tokens: error: late")


def test_no_length_is_tried_that_the_model_is_not_defined_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, lambda run: True)
    settings = ["model=cosformer_tiny", "dtype=fp32", "device=cpu", "recompute=[none]"]
    assert run_here(command.main, "longest", *settings, f"out={tmp_path}").code == 0
    # `model.max_document`.
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["tokens"] == 8192


def test_setting_that_has_no_plan_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: LongestConfig, run: Config, gpu: str) -> int | None:
        if run.train.recompute is Recompute.none:
            raise ConfigError("a", 1, "not planned")
        return None

    monkeypatch.setattr(longest, "planned_tokens", refuse)
    _fake(monkeypatch, lambda run: run["tokens"] <= 4096)
    outcome = run_here(command.main, "longest", *TINY, "device=cpu", "recompute=[none,full]", f"out={tmp_path}")
    assert outcome.code == 0, outcome
    refused, found = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (refused["note"], found["tokens"]) == ("refused: a=1: not planned", 4096)


@pytest.mark.parametrize(
    ("output", "limited", "is_answer"),
    [
        ("error: rank 1: step 2: NCCL: Last error: Cuda failure 2 'out of memory'", False, True),
        ("RuntimeError: can't start new thread", True, True),
        ("RuntimeError: can't start new thread", False, False),
    ],
)
def test_signs_of_memory(output: str, limited: bool, is_answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongestConfig.load([*TINY, *["memory_gb=2"] * limited])
    overrides = config.trial_overrides(None, Strategy.zero1, Recompute.none, "dp")
    trials = Trials(config, config.load_trial(overrides), overrides, "cpu")
    _fake(monkeypatch, lambda run: (6, output))
    with nullcontext() if is_answer else pytest.raises(FailedTrialError, match="thread"):
        assert not trials.fits(64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_gpus_that_are_not_there_are_refused() -> None:
    outcome = run_here(command.main, "longest", *TINY, "device=cuda")
    assert outcome.errors == ["device=cuda: 1 ranks on this machine, 0 CUDA devices; or device=cpu"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signal_ends_the_trial(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial stops its own command, and would sleep on."""
    trial = tmp_path / "trial"
    trial.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nkill -{int(number)} $PPID\nexec sleep 100\n")
    trial.chmod(0o700)
    monkeypatch.setattr(longest.sys, "executable", str(trial))
    with pytest.raises(SystemExit) as end:
        run_here(command.main, "longest", *TINY, "device=cpu", f"out={tmp_path}/out")
    assert end.value.code == 128 + number
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_search_begins_at_the_planned_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan takes the place of the GPUs, too: this compares the two commands, not their figures with a GPU's."""
    gpu = "gpu=h100"
    overrides = ["world_size=2", "sp.size=2", "model=gla_340m", "data=tokens", "data.path=store", "train.dtype=bf16"]
    case, _ = build_case(parse([*overrides, "parallel=zero1", "data.global_batch=1", gpu]))
    expected = longest_sequence(case, 0.05)
    assert plan_memory(case.with_changes(seq_len=expected), 0.05).fits
    assert not plan_memory(case.with_changes(seq_len=expected + 2048), 0.05).fits
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(longest, "query_gpus", lambda names: [{"name": "NVIDIA H100 80GB HBM3"}] * 2)
    _fake(monkeypatch, lambda run: plan_memory(case.with_changes(seq_len=run["tokens"]), 0.05).fits)
    settings = ["model=gla_340m", "ranks=2", "variants=[zeco]", "strategies=[zero1]", "recompute=[none]"]
    outcome = run_here(command.main, "longest", *settings, "precision=0", f"out={tmp_path}")
    assert outcome.code == 0, outcome
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["tokens"], row["planned_tokens"], row["ratio"]) == (expected, expected, 1.0)
    # The count is torch's; without nvidia-smi, or if it fails, only the name is missing.
    failure = subprocess.CalledProcessError(9, "nvidia-smi")
    for smi in (mock.Mock(return_value=[]), mock.Mock(side_effect=failure)):
        monkeypatch.setattr(longest, "query_gpus", smi)
        assert run_here(command.main, "longest", *settings, "precision=0.5", f"out={tmp_path}").code == 0
        (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
        assert row["planned_tokens"] is None
    limited = run_here(command.main, "longest", *settings, "memory_gb=1", f"out={tmp_path}")
    assert limited.errors == ["memory_gb=1.0: limits processes on CPUs; GPUs are measured whole"]


@pytest.mark.slow
@pytest.mark.processes
def test_real_trials_fit_run_out_and_fail() -> None:
    config = LongestConfig.load([*TINY, "ranks=2", "memory_gb=2", "device=cpu"])
    overrides = config.trial_overrides(None, Strategy.zero1, Recompute.none, "zeco")
    trials = Trials(config, config.load_trial(overrides), overrides, "cpu")
    assert trials.fits(100)
    assert trials.longest["step"] == 2
    assert not trials.fits(1_000_000)
    trials.overrides.append("train.steps=0")
    with pytest.raises(FailedTrialError, match=r"^100 tokens: error: train.steps=0: must be"):
        trials.fits(100)
    assert (trials.count, trials.longest["seq_len"]) == (3, 100)
