"""Runs on mixtures: validation per store, resume on another split, invalid settings, a removed shard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import check_line, snapshot, train_here
from tests.support.stores import write_tokens
from zeco_train.errors import CheckpointError, ConfigError, DataError

pytestmark = pytest.mark.numeric

CONFIG, DATA, CHECKPOINT = ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code


def write(folder: Path, seed: int, num_documents: int = 60, tokenizer: str = "bytes", **preparation: str) -> Path:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 200, num_documents)
    return write_tokens(folder, rng.integers(2, 259, lengths.sum()), lengths, kind=tokenizer, preparation=preparation)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores of some 6000 tokens, web with a validation part, and books without one."""
    folder = tmp_path_factory.mktemp("mixture")
    write(folder / "web", seed=0)
    write(folder / "web" / "validation", seed=1, num_documents=10)
    write(folder / "books", seed=2)
    return folder


def mixture(folder: Path, web: str = "weight: 3", books: str = "min_document_tokens: 100", **more: str) -> list[str]:
    stores = [f"{{path: {folder / 'web'}, {web}}}", f"{{path: {folder / 'books'}, {books}}}"]
    stores += [f"{{path: {path}}}" for path in more.values()]
    return ["data=mixture", f"data.stores=[{', '.join(stores)}]"]


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """A finished run of two steps, with a validation part for books as well."""
    books = f"validation_path: {folder / 'web' / 'validation'}, name: long"
    run = folder / "finished"
    outcome = train_here(*mixture(folder, books=books), f"run_dir={run}", "train.steps=2", "train.eval_sequences=2")
    assert outcome.code == 0, outcome.err
    return run


@pytest.mark.slow
def test_stores_with_different_rules_for_control_strings_are_told(tmp_path: Path) -> None:
    write(tmp_path / "web", seed=0, tokenizer="huggingface", control_strings="text")
    write(tmp_path / "books", seed=1, tokenizer="huggingface")
    outcome = train_here(*mixture(tmp_path), f"run_dir={tmp_path / 'run'}", "train.steps=1")
    assert outcome.code == 0, outcome.err
    assert "became (training store 0: text, training store 1: unknown)" in outcome.err


@pytest.mark.slow
def test_validation_loss_per_store_and_weighted_mean(folder: Path, finished: Path) -> None:
    *_, last = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    web, books = last["val_loss/web"], last["val_loss/long"]
    assert web == books  # the same held-out text
    assert last["val_loss"] == pytest.approx(0.75 * web + 0.25 * books, rel=1e-12)
    # The second store has no validation part: the mean is the first one's, with a message in the log.
    run = folder / "unvalidated"
    options = ["train.steps=1", "train.eval_sequences=2", "data.verify=true", "data.seq_len=32"]
    outcome = train_here(*mixture(folder), f"run_dir={run}", *options)
    assert outcome.code == 0, outcome.err
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["val_loss/web"] == row["val_loss"]
    assert "val_loss/books" not in row
    log = (run / "logs" / "rank_0.log").read_text()
    assert "no validation loss of books: too little is held out for a sequence of data.seq_len=32; a larger --" in log
    assert f"data: web, 0.75 of the sequences, {folder / 'web'}: 60 of 60 documents" in log
    assert "data: books, 0.25 of the sequences" in log


@pytest.mark.slow
def test_changed_mixture_is_refused_and_equivalent_weights_are_not(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    """Other keys of the order and the documents of a run are refused in the same way."""
    run, books = shutil.copytree(finished, tmp_path / "run"), "name: long"
    for data, part in (
        (mixture(folder, "weight: 2", books), f"data.weights=[2, 1]: the run in {run} has [3, 1]"),
        # The weights and the tokens differ as well; the first by name is reported.
        (
            mixture(folder, books=books, third=str(write(tmp_path / "third", seed=9))),
            f"data.min_document_tokens=[0, 0, 0]: the run in {run} has [0, 0]",
        ),
    ):
        check_line(train_here(*data, f"run_dir={run}", "train.steps=4"), CHECKPOINT, part)
    outcome = train_here(*mixture(folder, "weight: 0.75", f"{books}, weight: 0.25"), f"run_dir={run}", "train.steps=3")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("stores", "overrides", "code", "part"),
    [
        (
            {"third": "OTHER"},
            [],
            DATA,
            "OTHER: its tokenizer is {'kind': 'huggingface'}, FOLDER/web's is {'kind'",
        ),
        ({"third": "FOLDER/nothing"}, [], DATA, "data.stores.2.path=FOLDER/nothing: no such token store"),
        (
            {"web": "min_document_tokens: 200"},
            [],
            CONFIG,
            "data.min_document_tokens=200: leaves none of the 60 documents of FOLDER/web; the longest has ",
        ),
        ({}, ["model.vocab_size=100"], CONFIG, "model.vocab_size=100: the token store FOLDER/web has 259 ids"),
    ],
)
def test_invalid_mixtures_are_refused(
    stores: dict[str, str], overrides: list[str], code: int, part: str, folder: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", 3, tokenizer="huggingface")
    before = snapshot(tmp_path)

    def fill(text: str) -> str:
        return text.replace("OTHER", str(other)).replace("FOLDER", str(folder))

    data = mixture(folder, **{key: fill(value) for key, value in stores.items()})
    steps = [f"run_dir={tmp_path / 'run'}", "train.steps=1"]
    check_line(train_here(*data, *map(fill, overrides), *steps), code, fill(part))
    assert snapshot(tmp_path) == before
