"""Mixtures on other splits, and a shard that is removed meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.store import META_FILE, shard_name
from tests.support.commands import check_line, torchrun, train_here
from tests.support.distributed import run_distributed
from tests.support.training import train
from tests.training.test_mixture_runs import CHECKPOINT, CONFIG, DATA, folder, mixture, write
from tests.training.test_mixture_runs import test_invalid_mixtures_are_refused as refuse

# Fixtures.
__all__ = ["folder"]
pytestmark = pytest.mark.campaign


def _train(rank: int, world_size: int, folder: str, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Runs in the same folder, one after another."""
    base = ["train.dtype=fp64", "sched=constant", "data.seq_len=480", "train.eval_sequences=0", "checkpoint.every=3"]
    results = []
    for overrides in runs:
        name, *rest = overrides
        results.append(train(rank, world_size, f"{folder}/{name}", *base, *mixture(Path(folder)), *rest))
    return results


@pytest.mark.parametrize("reset", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_resume_on_another_split_in_mid_epoch(reset: bool, folder: Path, tmp_path: Path) -> None:
    """6 steps of 4 sequences, 1.4 epochs of one store and 0.7 of the other: unbroken, and resumed with sp = 2.

    With and without a reset of the state at documents.
    """
    for name in ("web", "books"):
        shutil.copytree(folder / name, tmp_path / name)
    documents, other = (f"data.reset_state_at_document={value}" for value in (reset, not reset))
    alone = [["unbroken", documents, "train.steps=6"], ["run", documents, "train.steps=3"]]
    unbroken, _, differs = run_distributed(_train, 1, str(tmp_path), [*alone, ["other", other, "train.steps=1"]])[0]
    split = ["sp.size=2", "train.segments=2"]
    [first], [second] = run_distributed(_train, 2, str(tmp_path), [["run", documents, "train.steps=6", *split]])
    assert len(first["sequence_ids"]) == 3
    assert first["sequence_ids"] == second["sequence_ids"] == unbroken["sequence_ids"][3:]
    losses = [[row["loss"] for row in result["rows"]] for result in (first, unbroken)]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    assert unbroken["rows"][0]["loss"] != differs["rows"][0]["loss"]


@pytest.mark.processes
def test_shard_removed_in_mid_run_gives_one_line_error(folder: Path, tmp_path: Path) -> None:
    """Both ranks detect it; one line names the shard and the bytes, and no rank hangs."""
    for name in ("web", "books"):
        shutil.copytree(folder / name, tmp_path / name)
    options = [*mixture(tmp_path), "run_dir=run", "train.steps=100000", "sp.size=2"]
    with torchrun(2, tmp_path, *options) as command:
        metrics = tmp_path / "run" / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, "4 steps")
        (tmp_path / "books" / shard_name(0)).unlink()
        outcome = command.wait()
    assert outcome.code != 0
    [line] = outcome.errors
    assert line.startswith(f"{tmp_path / 'books' / shard_name(0)}, bytes ")
    assert ": was removed or replaced since it was opened; " in line
    assert (tmp_path / "books" / META_FILE).exists()


@pytest.mark.parametrize(
    ("stores", "overrides", "code", "part"),
    [
        ({"third": "FOLDER/nothing"}, [], DATA, "FOLDER/nothing: no such token store"),
        (
            {"books": "min_document_tokens: 190"},
            ["data.seq_len=4096"],
            CONFIG,
            "data.seq_len=4096: longer than the corpus FOLDER/books (its documents of 190 tokens or more) of ",
        ),
    ],
)
def test_invalid_mixtures_are_refused(
    stores: dict[str, str], overrides: list[str], code: int, part: str, folder: Path, tmp_path: Path
) -> None:
    refuse(stores, overrides, code, part, folder, tmp_path)


def test_flipped_bit_of_a_store_of_a_mixture_is_found(folder: Path, tmp_path: Path) -> None:
    """The id stays within the vocabulary."""
    path = write(tmp_path / "flipped", 3) / shard_name(0)
    contents = bytearray(path.read_bytes())
    contents[1000] ^= 1
    path.write_bytes(contents)
    steps = [f"run_dir={tmp_path / 'run'}", "train.steps=1", "data.verify=true"]
    outcome = train_here(*mixture(folder, third=str(path.parent)), *steps)
    check_line(outcome, DATA, f"{path}: its contents differ from what")


def test_index_folder_that_nothing_is_written_to_may_be_a_file(folder: Path, tmp_path: Path) -> None:
    """No index of a store of this size is cached."""
    options = [f"run_dir={tmp_path / 'run'}", "train.steps=1", f"data.cache_dir={folder / 'web' / 'meta.json'}"]
    assert train_here(*mixture(folder), *options).code == 0


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (["data.shuffle=documents"], "data.shuffle=documents: the run in"),
        (["data.min_document_tokens=9"], "data.min_document_tokens=9: the run in"),
    ],
)
def test_run_goes_on_with_its_order_and_documents_only(
    change: list[str], part: str, folder: Path, tmp_path: Path
) -> None:
    data = ["data=tokens", f"data.path={folder / 'web'}", f"run_dir={tmp_path / 'run'}"]
    assert train_here(*data, "train.steps=1").code == 0
    check_line(train_here(*data, "train.steps=3", *change), CHECKPOINT, part)
