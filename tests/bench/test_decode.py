"""The decode benchmark on a CPU: results, error messages, and no timing of wrong results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.language_model import LanguageModel
from tests.support.commands import run_here
from zeco_train.bench import __main__ as command
from zeco_train.bench import decode
from zeco_train.generate.decode import Decoder

pytestmark = pytest.mark.numeric

TINY = ["model=gla_tiny", "model.num_layers=2", "model.hidden_size=32", "dtype=fp64", "device=cpu", "check_tokens=80"]
QUICK = [*TINY, "contexts=[70,200]", "batches=[1,3]", "steps=4", "warmup=1", "prefill_tokens=64"]
# Of what does not depend on chunks, or on several contexts.
SHORT = [*QUICK, "contexts=[70]", "check_tokens=8"]


def test_result_rows_and_plot_are_written(tmp_path: Path) -> None:
    outcome = run_here(command.main, "decode", *QUICK, f"out={tmp_path}")
    assert outcome.code == 0, outcome
    assert "graph is not measured" in outcome.out
    result = json.loads((tmp_path / "results.json").read_text())
    rows = result["rows"]
    assert [(row["context"], row["batch"], row["variant"]) for row in rows] == [
        (context, batch, "eager") for context in (70, 200) for batch in (1, 3)
    ]
    for row in rows:
        assert row["runs"] == 4
        assert row["relative_error"] < 1e-12
        # 2 layers of 4 heads with K 4 and V 8, in fp64.
        assert row["state_mb"] == pytest.approx(row["batch"] * 2 * 4 * 4 * 8 * 8 / 1e6)
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["median_ms"])
        assert row["memory_gb"] > 0
        assert row["prefill_tokens_per_second"] > 0
    assert (tmp_path / "decode.png").is_file()


def test_exceeded_budget_skips_remaining_contexts(tmp_path: Path) -> None:
    outcome = run_here(command.main, "decode", *SHORT, "budget_seconds=0.001", f"out={tmp_path}")
    assert outcome.code == 0, outcome
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["rows"] == []
    assert "contexts from 70 on are not measured: budget_seconds is over" in result["notes"]


def test_decode_with_wrong_logits_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoder.step

    def forgetful(self: Decoder, tokens: Tensor) -> Tensor:
        for state in self._states:
            state *= 0.5
        return step(self, tokens)

    monkeypatch.setattr(Decoder, "step", forgetful)
    outcome = run_here(command.main, "decode", *SHORT, f"out={tmp_path}")
    assert outcome.code == 8
    assert "eager is wrong, nothing is timed: logits by steps" in outcome.errors[0]
    assert not (tmp_path / "results.json").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_decode_is_not_timed_if_logits_of_chunks_are_not_finite(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compute = [], decode.whole_logits

    def broken(*arguments: Any) -> Tensor:
        logits = compute(*arguments)
        # The first call is the one in fp64.
        if calls:
            logits[0, -1, -1] = value
        calls.append(1)
        return logits

    monkeypatch.setattr(decode, "whole_logits", broken)
    outcome = run_here(command.main, "decode", *SHORT, f"out={tmp_path}")
    assert outcome.code == 8
    error = f"eager is wrong, nothing is timed: logits by chunks on rank 0 has a relative error of {value}, allowed "
    assert outcome.errors[0].startswith(error)
    assert not (tmp_path / "results.json").exists()


def test_each_turn_starts_from_the_states_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, begun, positions_begun = Decoder.__init__, [], []

    def remember(
        self: Decoder, model: LanguageModel, states: list[Tensor], positions: Tensor, cuda_graph: bool
    ) -> None:
        begun.append(states[0].clone())
        positions_begun.append(positions.tolist())
        made(self, model, states, positions, cuda_graph)

    monkeypatch.setattr(Decoder, "__init__", remember)
    outcome = run_here(command.main, "decode", *SHORT, "batches=[1]", f"out={tmp_path}")
    assert outcome.code == 0, outcome
    # The first decoder belongs to the correctness check.
    _, first, *others = begun
    assert len(others) == 3
    assert all(torch.equal(states, first) for states in others)
    assert positions_begun[1:] == [[70]] * 4
