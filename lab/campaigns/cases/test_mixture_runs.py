"""Mixtures on other splits, and a shard that is removed meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.store import META_FILE, shard_name
from tests.support.commands import torchrun
from tests.support.distributed import run_distributed
from tests.support.training import train
from tests.training.test_mixture_runs import CONFIG, DATA, folder, mixture
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
        ({"third": "FLIPPED"}, ["data.verify=true"], DATA, "FLIPPED/tokens-00000.bin: its contents differ from what"),
        ({}, ["data.cache_dir=FOLDER/web/meta.json"], 0, ""),  # unused: no index of a store of this size is cached
    ],
)
def test_invalid_mixtures_are_refused(
    stores: dict[str, str], overrides: list[str], code: int, part: str, folder: Path, tmp_path: Path
) -> None:
    refuse(stores, overrides, code, part, folder, tmp_path)
