"""Errors in a run's data, folder and checkpoints: one line each, and nothing is overwritten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import check_line, snapshot, train_here
from tests.support.stores import write_store
from zeco_train.errors import CheckpointError, ConfigError, DataError

# Exit codes by kind of error.
CONFIG, DATA, CHECKPOINT = ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run of two steps that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    outcome = train_here(*on(store), f"run_dir={folder}", "train.steps=2")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def on(store: Path) -> list[str]:
    return ["data=tokens", f"data.path={store}"]


def _keep(store: Path) -> None:
    pass


def _empty(store: Path) -> None:
    for path in store.iterdir():
        path.unlink()


def _foreign(store: Path) -> None:
    _empty(store)
    (store / "data-00000.arrow").write_bytes(b"ARROW1")


def _remove(store: Path) -> None:
    shutil.rmtree(store)


@pytest.mark.parametrize(
    ("damage", "overrides", "code", "parts"),
    [
        (
            _remove,
            [],
            DATA,
            ["data.path=", "/store: no such token store; prepare one with"],
        ),
        (_foreign, [], DATA, ["not a token store (no meta.json)"]),
        (_keep, ["model.vocab_size=100"], CONFIG, ["model.vocab_size=100: ", "259 or more"]),
    ],
)
def test_unusable_token_store_is_reported(
    damage: Callable[[Path], None], overrides: list[str], code: int, parts: list[str], store: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(store, tmp_path / "store")
    damage(copy)
    before = snapshot(tmp_path)
    check_line(train_here(f"run_dir={tmp_path / 'run'}", *on(copy), *overrides), code, *parts)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed=1", "seed=1: the run in RUN has 0"),
        ("data.seq_len=128", "data.seq_len=128: the run in RUN has 64"),
        ("data.path=OTHER_TOKENS", "data: these are not the tokens that the run in RUN began with"),
    ],
)
def test_resume_with_changed_identity_is_refused(
    override: str, part: str, run: Path, store: Path, tmp_path: Path
) -> None:
    if "OTHER_TOKENS" in override:
        override = override.replace("OTHER_TOKENS", str(write_store(tmp_path / "other", seed=1)))
    elif "OTHER_TOKENIZER" in override:
        override = override.replace("OTHER_TOKENIZER", str(write_store(tmp_path / "other", kind="huggingface")))
    before = snapshot(run)
    outcome = train_here(*on(store), f"run_dir={run}", "train.steps=4", override)
    check_line(outcome, CHECKPOINT, part.replace("RUN", str(run)), f"checkpoint.load={run}")
    assert snapshot(run) == before


def test_finished_run_has_nothing_to_do(run: Path, store: Path) -> None:
    again = [*on(store), f"run_dir={run}", "train.steps=2"]
    # The first start updates run_dir in config.yaml, since the folder was copied.
    train_here(*again)
    before = snapshot(run)
    outcome = train_here(*again)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"the run in {run} has finished its 2 steps; nothing to do\n"
    after = snapshot(run)
    assert before.keys() == after.keys()
    assert [path for path in before if before[path] != after[path]] == ["logs/rank_0.log", "overrides.txt"]


def test_unusable_run_folders_are_reported(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    cases = {
        f"{tmp_path / 'file'}": "cannot be written (File exists)",
        f"{tmp_path / 'file' / 'run'}": "cannot be written (Not a directory)",
        "/proc/run": "cannot be written (No such file or directory)",
        f"{tmp_path / ('x' * 300)}": "cannot be looked up (File name too long)",
        f"{tmp_path / 'folder'}": "is not empty and not a run's folder; name a new one",
    }
    before = snapshot(tmp_path)
    for folder, part in cases.items():
        check_line(train_here(*on(store), f"run_dir={folder}"), CONFIG, f"run_dir={folder}: {part}")
    assert snapshot(tmp_path) == before


def test_damaged_identity_file_is_reported(run: Path, store: Path) -> None:
    (run / "identity.json").write_bytes(b"\xff")
    before = snapshot(run)
    outcome = train_here(*on(store), f"run_dir={run}")
    check_line(outcome, CHECKPOINT, f"{run / 'identity.json'}: cannot be read")
    assert snapshot(run) == before


@pytest.mark.slow
def test_load_refuses_missing_or_mismatched_weights(run: Path, store: Path, tmp_path: Path) -> None:
    """`checkpoint.load` of no checkpoint, of another model, and (valid) of a run's folder."""
    (tmp_path / "empty").mkdir()
    before = snapshot(run)
    for number, path in enumerate([tmp_path / "nothing", tmp_path / "empty", run / "config.yaml"]):
        outcome = train_here(*on(store), f"run_dir={tmp_path / f'new{number}'}", f"checkpoint.load={path}")
        check_line(outcome, CONFIG, f"checkpoint.load={path}: holds no complete checkpoint")
    load = [f"checkpoint.load={run}", "train.steps=1"]
    other = train_here(*on(store), *load, f"run_dir={tmp_path / 'other'}", "model.hidden_size=64")
    problem = "model.embeddings.weight is [259, 32], the run's configuration makes it [259, 64]"
    check_line(other, CHECKPOINT, f"{run / 'checkpoints' / 'step_00000002'}: {problem}")
    assert not (tmp_path / "other").exists()
    # With equal shapes it may be intended: a warning only.
    other = train_here(*on(store), *load, f"run_dir={tmp_path / 'other'}", "model.feature_map=relu")
    assert other.code == 0, other.err
    assert f"checkpoint.load={run}: these weights were trained with model.feature_map=None, not relu" in other.err
    right = train_here(*on(store), *load, f"run_dir={tmp_path / 'right'}", "seed=5")
    assert (right.code, "trained with" in right.err) == (0, False), right.err
    assert snapshot(run) == before


def test_damaged_checkpoint_is_reported_and_left_alone(run: Path, store: Path) -> None:
    path = run / "checkpoints" / "step_00000002" / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    (run / "checkpoints" / "lock").write_text(str(run))
    before = snapshot(run / "checkpoints")
    outcome = train_here(*on(store), f"run_dir={run}", "train.steps=4")
    check_line(outcome, CHECKPOINT, str(path.parent))
    assert snapshot(run / "checkpoints") == before
