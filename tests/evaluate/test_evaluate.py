"""`python -m zeco_train.evaluate` as a user runs it."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.data.test_prepare import hugging_face
from tests.support.commands import Outcome, check_line, run_here, snapshot, train_here
from tests.support.stores import write_store
from zeco_train.evaluate.__main__ import main
from zeco_train.tracking.metrics import read_metrics

pytestmark = pytest.mark.numeric

__all__ = ["hugging_face"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on its own store, whose held-out part has 6 sequences of the run's length."""
    folder = tmp_path_factory.mktemp("evaluate")
    store = write_store(folder / "store")
    write_store(store / "validation", num_tokens=64 * 6 + 11, seed=1)
    data = ("data=tokens", f"data.path={store}", "train.dtype=fp64", "train.eval_sequences=5")
    trained = train_here(*data, f"run_dir={folder / 'run'}", "train.steps=2", "sp=dp", "checkpoint.every=1", draws=True)
    assert trained.code == 0, trained
    (folder / "printed.txt").write_text(trained.out)
    return folder / "run"


def evaluate(*arguments: object) -> Outcome:
    return run_here(main, *map(str, arguments))


def results(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "results.json").read_text())
    assert isinstance(found, dict)
    return found


def test_loss_equals_validation_loss_of_training(run: Path, tmp_path: Path) -> None:
    # Training used batches of 4.
    outcome = evaluate(run, "validation.sequences=5", "data.micro_batch=3", "--out", tmp_path / "out")
    assert outcome.code == 0
    # Both say what their loss is of; the other way round the two would seem to contradict each other.
    row, summary = (run.parent / "printed.txt").read_text().splitlines()[-2:]
    of = r"of 5 sequences, 320 tokens\)"
    assert re.search(rf"  val_loss [\d.]+ \({of}", row), row
    assert re.search(rf"\(validation [\d.]+ {of}", summary), summary
    assert re.search(rf" bits a byte  \({of}\n", outcome.out), outcome.out
    found = results(tmp_path / "out")
    loss = read_metrics(run / "metrics.jsonl")[-1]["val_loss"]
    metrics = found["tasks"]["validation"]["metrics"]
    [details] = found["tasks"]["validation"]["lengths"].values()
    assert (details["sequences"], details["tokens"]) == (5, 320)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    assert metrics["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-12)
    assert (found["step"], found["ranks"], found["config"]["data"]["seq_len"]) == (2, 1, 64)
    assert (run / "loss_by_position.png").is_file()
    # An earlier checkpoint has another loss.
    assert evaluate(run / "checkpoints/step_00000001", "validation.sequences=5", "--out", tmp_path / "older").code == 0
    assert results(tmp_path / "older")["tasks"]["validation"]["metrics"]["loss"] != metrics["loss"]


@pytest.mark.slow
def test_other_lengths_report_leftover_tokens(run: Path, tmp_path: Path) -> None:
    outcome = evaluate(run, "validation.lengths=[16,300]", "train.segments=2", "--out", tmp_path)
    assert outcome.code == 0, outcome
    assert "24 of 24 held-out sequences of 16 tokens; left out: 10 tokens behind the last whole one" in outcome.out
    assert "1 of 1 held-out sequences of 300 tokens; left out: 94 tokens behind" in outcome.out
    details = results(tmp_path)["tasks"]["validation"]["lengths"]
    assert all(details[length]["by_position"]["edges"][-1] == int(length) for length in ("16", "300"))
    assert details["300"]["error"] is None


@pytest.mark.slow
def test_settings_replaced_by_data_group_are_reported(run: Path, tmp_path: Path) -> None:
    moved, store = tmp_path / "run", f"data.path={run.parent / 'store'}"
    shutil.copytree(run, moved)
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(text.replace("reset_state_at_document: false", "reset_state_at_document: true"))
    short = ("validation.sequences=1", "data=tokens", store)
    outcome = evaluate(moved, *short)
    line = (
        "data=tokens sets data.reset_state_at_document=false (true in the run); name those that are to be as in the run"
    )
    assert outcome.out.splitlines()[1] == line, outcome
    assert results(moved / "evaluation/step_00000002")["config"]["data"]["reset_state_at_document"] is False
    for arguments in (
        (moved, *short, "data.reset_state_at_document=true"),
        (moved, "validation.sequences=1", store),
        # The training batch and sequence order differ, which no evaluation reads.
        (run, *short, "data.seq_len=32", "--out", tmp_path / "out"),
    ):
        outcome = evaluate(*arguments)
        assert outcome.code == 0
        assert " sets " not in outcome.out


@pytest.mark.slow
def test_repeated_evaluation_overwrites_nothing(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    for name in ("step_00000002", "step_00000002.1"):
        before = snapshot(moved)
        outcome = evaluate(moved, "validation.sequences=1")
        assert outcome.out.splitlines()[-1] == f"results: {moved / 'evaluation' / name / 'results.json'}"
        after = snapshot(moved)
        assert {path: after[path] for path in before} == before
        assert set(after) - set(before) - {"evaluation"} == {
            f"evaluation/{name}{file}" for file in ("", "/results.json", "/loss_by_position.png")
        }
    # The run can still be resumed.
    store = run.parent / "store"
    more = ("data=tokens", f"data.path={store}", "train.dtype=fp64", "train.eval_sequences=5", "train.steps=3", "sp=dp")
    assert train_here(*more, f"run_dir={moved}").code == 0


def test_interrupted_evaluation_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    before = snapshot(tmp_path)
    for out in ([], ["--out", tmp_path / "out" / "folder"]):
        with mock.patch("zeco_train.evaluate.held_out.HeldOut.run", side_effect=KeyboardInterrupt):
            assert evaluate(moved, *out).code == 130
        assert snapshot(tmp_path) == before


def test_results_are_not_written_through_a_link_beside_the_model(run: Path, tmp_path: Path) -> None:
    stranger = shutil.copytree(run, tmp_path / "run", symlinks=True)
    (tmp_path / "thesis").mkdir()
    (stranger / "evaluation").symlink_to(tmp_path / "thesis")
    outcome = evaluate(stranger, "validation.sequences=1")
    check_line(outcome, 2, f"{stranger / 'evaluation'} is a link; remove it, or name a folder with --out")
    assert not any((tmp_path / "thesis").iterdir())


@pytest.mark.slow
def test_evaluation_works_without_training_store(run: Path, tmp_path: Path) -> None:
    moved, held_out = tmp_path / "run", tmp_path / "held_out"
    shutil.copytree(run, moved)
    shutil.copytree(run.parent / "store" / "validation", held_out)
    override = (f"data.path={tmp_path / 'gone'}", f"data.validation_path={held_out}")
    assert evaluate(moved, "validation.sequences=1", *override).code == 0


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_invalid_arguments_are_reported_and_leave_no_files(run: Path, tmp_path: Path, part: int) -> None:
    other = write_store(tmp_path / "other", vocab_size=200, kind="words")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    mistakes: list[tuple[list[object], int, str]] = [
        (["nowhere"], 2, "no such folder"),
        ([run, "--tasks", "validation,"], 2, "must be names with commas between them"),
        ([run, "--tasks=validation,validation"], 2, "names validation twice"),
        ([run, "validation.lenghts=[3]"], 2, "validation.lenghts=[3]: unknown key; did you mean"),
        ([run, "validaton.sequences=3"], 2, "did you mean validation.sequences?"),
        ([run, "lm_eval.limit=3"], 2, "would be ignored; it needs one of lm_eval's tasks"),
        ([run, "validation.sequences=-1"], 2, "validation.sequences=-1: must be ≥ 0"),
        ([run, "validation.lengths=[3,3]"], 2, "names one twice"),
        ([run, "validation.lengths=[64,100000]"], 2, "validation.lengths=100000: longer than the corpus"),
        ([run, "data.seq_len=2", "train.segments=3"], 2, "data.seq_len=2: must be ≥ 3: "),
        ([run, "validation.lengths=[100000]"], 2, "prepare's --validation-fraction decides how much is held out"),
        ([run, "train.kernels=require"], 2, "train.kernels=require: there are no kernels on CPUs; take auto, or a GPU"),
        ([run, "train.steps=3"], 2, "an evaluation does not read it"),
        ([run, "data.global_batch=3"], 2, "an evaluation does not read it"),
        ([run, "+experiment=gla_1b_8m"], 2, "is of a training"),
        ([run, "other"], 2, "one model at a time"),
        ([run, "--out", full], 2, "is not empty; name a new folder"),
        ([run, "--out", full / "file"], 2, f"cannot be written ({full / 'file'} is a file); name a folder with --out"),
        ([run, "--out", full / "file" / "out"], 2, f"({full / 'file'} is a file); name a folder with --out"),
        ([run, f"data.path={other}", f"data.validation_path={other}"], 3, "the model's is {'kind': 'bytes'}"),
        ([run, f"data.path={other}"], 2, "holds nothing out"),
        ([run, f"data.path={tmp_path / 'gone'}"], 2, f"there is no {tmp_path / 'gone'}; name a store with"),
        ([run, "--frobnicate"], 2, "--help lists all"),
    ]
    for arguments, code, problem in mistakes if part else mistakes[::6]:
        before = snapshot(tmp_path), snapshot(run)
        check_line(evaluate(*arguments), code, problem)
        assert (snapshot(tmp_path), snapshot(run)) == before, arguments


def test_lm_eval_task_without_lm_eval_installed(run: Path) -> None:
    with mock.patch.dict(sys.modules, {"lm_eval": None}), mock.patch("importlib.util.find_spec", return_value=None):
        check_line(evaluate(run, "--tasks", "piqa"), 2, "--tasks=piqa: is one of lm_eval's, which is not installed")


@pytest.mark.slow
def test_lm_eval_generation_arguments_are_translated() -> None:
    pytest.importorskip("lm_eval")
    from data.tokenizer import ByteTokenizer
    from zeco_train.errors import ConfigError
    from zeco_train.evaluate.language_model import EvaluatedModel

    model = EvaluatedModel(mock.Mock(), ByteTokenizer(), seed=7)
    sampling, limits = model._settings({"until": "\n", "max_gen_toks": 5, "do_sample": False, "temperature": 0.8})
    assert (sampling.temperature, limits.stops, limits.max_tokens) == (0.0, ("\n",), 5)
    sampling, limits = model._settings({"do_sample": True, "top_k": 4, "top_p": 0.9})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (1.0, 4, 0.9, 7)
    assert (limits.stops, limits.max_tokens) == ((), 256)
    with pytest.raises(ConfigError, match="num_beams"):
        model._settings({"num_beams": 4})
