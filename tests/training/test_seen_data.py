"""A start compares size and time of its token files with those of the last one, and refuses files that changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.store import META_FILE, OFFSETS_FILE, shard_name
from tests.support.commands import Outcome, check_line, snapshot, train_here
from tests.support.stores import write_tokens
from zeco_train.errors import ConfigError, DataError
from zeco_train.training import seen_data
from zeco_train.training.seen_data import RECORD_FILE

DATA = DataError.exit_code
LENGTHS = [150, 250, 600, 40, 960, 500, 500]
VERIFY = "data.verify=true"


def write(folder: Path, lengths: list[int] = LENGTHS, seed: int = 0) -> Path:
    """A store of shards of 1,000 tokens."""
    tokens = np.random.default_rng(seed).integers(2, 259, sum(LENGTHS))
    return write_tokens(folder, tokens, lengths, shard_tokens=1000)


def flip(path: Path) -> None:
    """Flip one bit of a token, which stays within the vocabulary; size and inode are unchanged."""
    with path.open("r+b") as file:
        file.seek(300)
        (value,) = file.read(1)
        file.seek(300)
        file.write(bytes([value ^ 1]))


def touch(store: Path, ahead: int = 0) -> None:
    """Set modification times to now plus some seconds, as a copy does."""
    now = time.time_ns() + ahead * 10**9
    for path in store.rglob("*"):
        os.utime(path, ns=(now, now))


def log_of(run: Path) -> str:
    return (run / "logs" / "rank_0.log").read_text()


class Run:
    """A run of one step on a store of three shards with a validation part of one."""

    def __init__(self, folder: Path, steps: int = 0) -> None:
        self.store, self.run, self.steps = folder / "store", folder / "run", steps

    def start(self, *overrides: str, steps: int = 1) -> Outcome:
        """Resume for some more steps."""
        self.steps += steps
        data = ["data=tokens", f"data.path={self.store}", "train.eval_sequences=2", "train.log_every=1"]
        outcome = train_here(*data, f"run_dir={self.run}", f"train.steps={self.steps}", *overrides)
        self.steps -= steps if outcome.code else 0
        return outcome


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store and a run of one step."""
    folder = tmp_path_factory.mktemp("first")
    write(folder / "store")
    write(folder / "store" / "validation", seed=1)
    assert Run(folder).start().code == 0
    return folder


@pytest.fixture
def run(first: Path, tmp_path: Path) -> Run:
    """A copy with the same times, as if it had always been there."""
    shutil.copytree(first, tmp_path, symlinks=True, dirs_exist_ok=True)
    record = tmp_path / "run" / RECORD_FILE
    record.write_text(record.read_text().replace(str(first), str(tmp_path)))
    return Run(tmp_path, steps=1)


@pytest.mark.slow
def test_changed_files_are_refused_until_all_are_verified(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed token is found by its file's time and then by its digest, a copy is accepted after one verification."""
    for name in ("_ROUND_SECONDS", "_REPORT_SECONDS"):
        monkeypatch.setattr(seen_data, name, 0.0)
    path = run.store / shard_name(1)
    flip(path)
    before = snapshot(run.run)
    check_line(run.start(), DATA, f"{path}: changed since the run's last start; ", VERIFY, "python -m data.inspect")
    assert snapshot(run.run) == before
    check_line(run.start(VERIFY), DATA, f"{path}: its contents differ from what was prepared; copy the store again")
    assert snapshot(run.run) == before
    flip(path)
    touch(run.store)
    check_line(run.start(), DATA, f"{run.store / shard_name(0)}: changed since", "with 2 more files")
    outcome = run.start(VERIFY)
    assert outcome.code == 0, outcome.err
    assert re.search(r"^data: 2.00kB of 12.0kB compared, 0:00:\d\d left$", outcome.out, re.M)
    assert re.search(r"data: 6 token files \(12.0kB\) read in 0:00:\d\d; they are as prep", log_of(run.run), re.M)
    # Other paths with the same times are the same files.
    run.store = run.store.rename(run.store.with_name("moved"))
    outcome = run.start()
    assert (outcome.code, outcome.err) == (0, "")


def _shorten(store: Path) -> str:
    os.truncate(path := store / shard_name(1), 10)
    return f"{path}: truncated: 10 bytes"


def _shift(store: Path) -> str:
    """Move a border between two documents, consistent with meta.json except for the digest."""
    offsets = np.load(path := store / OFFSETS_FILE)
    offsets[2] += 5
    np.save(path, offsets)
    return f"{path}: its contents differ from what was prepared; copy the store again"


def _prepare_otherwise(store: Path) -> str:
    """With other borders of documents: verification compares with meta.json, so that store is intact, not the run's."""
    shutil.rmtree(store)
    write(store, [LENGTHS[0] + 5, LENGTHS[1] - 5, *LENGTHS[2:]], seed=1)
    return f"{store / META_FILE}: gives other documents than at the run's last start"


@pytest.mark.parametrize(("change", "part"), [(_shorten, ""), (_shift, ""), (_prepare_otherwise, "validation")])
def test_damaged_and_other_files_are_refused(change: Callable[[Path], str], part: str, run: Run) -> None:
    line = change(run.store / part)
    for settings in ([], [VERIFY]):
        check_line(run.start(*settings), DATA, line)


@pytest.mark.slow
def test_run_without_record_resumes_and_records_data(run: Run) -> None:
    """As after a kill before the first record."""
    (run.run / RECORD_FILE).unlink()
    touch(run.store)
    outcome = run.start()
    assert (outcome.code, outcome.err) == (0, "")
    assert f"{RECORD_FILE}: not there yet; the data are recorded" in log_of(run.run)
    flip(run.store / shard_name(0))
    check_line(run.start(), DATA, "changed since the run's last start")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.slow
def test_damaged_records_are_refused_until_all_is_verified(run: Run) -> None:
    path = run.run / RECORD_FILE
    sound = path.read_text()
    stores = json.loads(sound)["stores"]
    store = stores["training store 0"]
    texts = [
        "",
        sound[: len(sound) // 2],
        "[]",
        "null",
        # Of version 0.2.
        '{"stores": {}, "files": {}}',
        '{"version": 3, "stores": {}}',
        '{"version": 2, "stores": []}',
        json.dumps({"version": 2, "stores": {"training store 0": {}}}),
        json.dumps({"version": 2, "stores": {"training store 0": {**store, "other": 1}}}),
        json.dumps({"version": 2, "stores": {"training store 0": {**store, "files": {"a": 1}}}}),
        f'{{"version": 2, "stores": {{"a": 1{"0" * 5000}}}}}',
        "[" * 100_000,
        '"\\ud800"',
    ]
    damages: list[Callable[[Path], object]] = [lambda path, text=text: path.write_text(text) for text in texts]  # type: ignore[misc]
    damages += [lambda path: os.truncate(path, 1 << 40), lambda path: path.write_bytes(b"\xff\xfe\0"), _zeros, _fifo]
    for damage in damages:
        path.unlink()
        path.write_text(sound)
        damage(path)
        with pytest.raises(DataError, match=f"^{path}: cannot be read .*{VERIFY}"):
            seen_data._read(run.run, False, [])
    # The last one is a FIFO without a writer.
    check_line(run.start(), DATA, f"{path}: cannot be read", VERIFY)
    assert run.start(VERIFY).code == 0
    assert path.is_file()
    assert json.loads(path.read_text())["stores"] == stores
    _folder(path)
    outcome = run.start(VERIFY)
    assert outcome.code == ConfigError.exit_code
    assert outcome.errors == [
        f"run_dir={run.run}: {RECORD_FILE} cannot be written (Is a directory); name another folder"
    ]
