"""A start compares its data with those of the last one: changed files are hashed once and refused if they differ."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from data.digests import hash_in_parts
from data.store import META_FILE, OFFSETS_FILE, shard_name
from data.store_writer import StoreWriter
from tests.support.commands import Outcome, check_line, snapshot, train_here
from tests.support.distributed import run_distributed
from tests.support.training import train
from zeco_train.errors import ConfigError, DataError, ZecoError
from zeco_train.training import seen_data
from zeco_train.training.seen_data import RECORD_FILE, DataRecord

DATA = DataError.exit_code
LENGTHS = [150, 250, 600, 40, 960, 500, 500]
SKIP = "data.verify_changed=false"


def write(folder: Path, lengths: list[int] = LENGTHS, seed: int = 0) -> Path:
    """A store of shards of 1,000 tokens."""
    tokens = np.random.default_rng(seed).integers(2, 259, sum(LENGTHS))
    with StoreWriter(folder, vocab_size=259, eos_id=1, tokenizer={"kind": "bytes"}, shard_tokens=1000) as writer:
        writer.append(tokens, lengths)
        writer.finish("sources")
    return folder


def flip(path: Path) -> None:
    """Flip one bit of a token, which stays within the vocabulary; size and inode are unchanged."""
    with path.open("r+b") as file:
        file.seek(300)
        (value,) = file.read(1)
        file.seek(300)
        file.write(bytes([value ^ 1]))


def shift(store: Path) -> None:
    """Move a border between two documents, consistent with meta.json except for the digest."""
    offsets = np.load(store / OFFSETS_FILE)
    offsets[2] += 5
    np.save(store / OFFSETS_FILE, offsets)


def touch(store: Path, ahead: int = 0) -> None:
    """Set modification times to now plus some seconds, as a copy does."""
    now = time.time_ns() + ahead * 10**9
    for path in store.rglob("*"):
        os.utime(path, ns=(now, now))


def log_of(run: Path) -> str:
    return (run / "logs" / "rank_0.log").read_text()


@pytest.fixture
def hashed() -> Iterator[list[str]]:
    """Names of the files that a check of seen data hashes."""
    names: list[str] = []

    def spy(path: Path, *arguments: object) -> Iterator[int]:
        names.append(path.name)
        return hash_in_parts(path, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(seen_data, "hash_in_parts", spy):
        yield names


class Run:
    """A run of one step on a store of three shards with a validation part of one."""

    def __init__(self, folder: Path) -> None:
        self.store, self.run = write(folder / "store"), folder / "run"
        write(folder / "store" / "validation", seed=1)
        self.steps = 0
        assert self.start().code == 0

    def start(self, *overrides: str, steps: int = 1) -> Outcome:
        """Resume for some more steps."""
        self.steps += steps
        data = ["data=tokens", f"data.path={self.store}", "train.eval_sequences=2", "train.log_every=1"]
        outcome = train_here(*data, f"run_dir={self.run}", f"train.steps={self.steps}", *overrides)
        self.steps -= steps if outcome.code else 0
        return outcome


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_flipped_tokens_are_refused(run: Run) -> None:
    flip(run.store / shard_name(1))
    before = snapshot(run.run)
    for _ in range(2):
        outcome = run.start()
        problem = "changed since the run's last start, and its contents differ from what was prepared"
        remedy = f"copy the store again or prepare it again, or go on with it as it is by {SKIP}"
        check_line(outcome, DATA, f"{run.store / shard_name(1)}: {problem}; {remedy}")
        assert snapshot(run.run) == before
    # Skipping the check does not record the file as checked.
    outcome = run.start(SKIP)
    assert outcome.code == 0, outcome.err
    line = f"{SKIP}: {run.store / shard_name(1)}, changed since the last start, not checked"
    assert outcome.err == f"warning: {line}\n"
    assert line in log_of(run.run)
    check_line(run.start(), DATA, f"{run.store / shard_name(1)}: changed since")


@pytest.mark.slow
def test_flipped_validation_tokens_are_refused(run: Run) -> None:
    flip(run.store / "validation" / shard_name(2))
    check_line(run.start(), DATA, f"{run.store / 'validation' / shard_name(2)}: changed since the run's last start")
    # Without validation the store is neither read nor dropped from the record.
    assert run.start("train.eval_sequences=0").code == 0
    check_line(run.start(), DATA, f"{run.store / 'validation' / shard_name(2)}: changed since the run's last start")


@pytest.mark.few(1)
@pytest.mark.parametrize("part", ["", "validation"])
def test_shifted_document_borders_are_refused(part: str, run: Run) -> None:
    shift(run.store / part)
    line = f"{run.store / part / OFFSETS_FILE}: its contents differ from what was prepared; copy the store again"
    check_line(run.start(), DATA, line)
    check_line(run.start(SKIP), DATA, line)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", ["", "validation"])
def test_same_tokens_with_other_document_borders_are_refused(part: str, run: Run) -> None:
    shutil.rmtree(run.store / part / "validation", ignore_errors=True)
    lengths = [LENGTHS[0] + 5, LENGTHS[1] - 5, *LENGTHS[2:]]
    for path in (run.store / part).iterdir():
        if path.is_file():
            path.unlink()
    write(run.store / part, lengths, seed=1 if part else 0)
    outcome = run.start()
    check_line(
        outcome, DATA, f"{run.store / part / META_FILE}: gives other documents than at the run's last start", SKIP
    )
    assert run.start(SKIP).code == 0
    assert f"{SKIP}: {run.store / part / META_FILE} gives other documents" in log_of(run.run)


@pytest.mark.slow
def test_validation_store_may_change_and_is_then_checked(run: Run, tmp_path: Path) -> None:
    other = write(tmp_path / "other", seed=5)
    assert run.start(f"data.validation_path={other}").code == 0
    flip(other / shard_name(0))
    check_line(run.start(f"data.validation_path={other}"), DATA, f"{other / shard_name(0)}: changed since")


@pytest.mark.slow
def test_copied_store_is_hashed_once(run: Run, hashed: list[str]) -> None:
    assert run.start().code == 0
    assert hashed == []
    touch(run.store)
    outcome = run.start()
    assert (outcome.code, outcome.err) == (0, "")
    assert hashed == [shard_name(0), shard_name(1), shard_name(2)] * 2
    assert re.search(r"data: 6 token files \(12.0kB\) hashed in 0:00:\d\d; they are as prep", log_of(run.run), re.M)
    assert run.start().code == 0
    assert len(hashed) == 6
    touch(run.store)
    assert run.start(SKIP).code == 0
    assert len(hashed) == 6
    named = ", ".join(str(run.store / shard_name(number)) for number in range(3))
    assert f"{SKIP}: {named}, {run.store / 'validation' / shard_name(0)}, " in log_of(run.run)
    assert "and 1 more, changed since the last start, not checked" in log_of(run.run)


def test_change_with_same_size_and_mtime_needs_verify(run: Run) -> None:
    path = run.store / shard_name(0)
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run.start().code == 0
    line = f"{path}: its contents differ from what was prepared; copy the store again or prepare it again\n"
    assert run.start("data.verify=true").err == f"error: {line}"


@pytest.mark.slow
def test_embedded_corpus_is_checked(tmp_path: Path) -> None:
    cache, settings = tmp_path / "cache", [f"run_dir={tmp_path / 'run'}", "train.steps=1"]
    settings.append(f"data.cache_dir={cache}")
    assert train_here(*settings).code == 0
    (store,) = cache.glob("embedded-*")
    flip(store / shard_name(0))
    line = f"remove {store}, which the next start prepares again, or go on"
    check_line(train_here(*settings, "train.steps=2"), DATA, f"{store / shard_name(0)}: changed since", line)
    shutil.rmtree(store)
    assert train_here(*settings, "train.steps=2").code == 0


def test_each_store_of_mixture_is_checked(tmp_path: Path) -> None:
    stores = [write(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    settings = ["data=mixture", f"data.stores=[{{path: {stores[0]}}}, {{path: {stores[1]}}}]"]
    settings += [f"run_dir={tmp_path / 'run'}"]
    assert train_here(*settings, "train.steps=1").code == 0
    flip(stores[1] / shard_name(2))
    check_line(train_here(*settings, "train.steps=2"), DATA, f"{stores[1] / shard_name(2)}: changed since")


def test_synthetic_task_writes_no_record(tmp_path: Path) -> None:
    settings = ["data=synthetic", "data.synthetic.facts=2", "data.seq_len=64", f"run_dir={tmp_path / 'run'}"]
    assert train_here(*settings, "train.steps=1").code == 0
    assert not (tmp_path / "run" / RECORD_FILE).exists()


@pytest.mark.slow
def test_run_without_record_resumes_and_records_data(run: Run) -> None:
    (run.run / RECORD_FILE).unlink()
    touch(run.store)
    outcome = run.start()
    assert (outcome.code, outcome.err) == (0, "")
    assert f"{RECORD_FILE}: not there yet; the data are noted as they are now, and compared" in log_of(run.run)
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
def test_damaged_records_are_reported_and_rewritten(run: Run) -> None:
    """Each gives one warning; the start continues if it can write a new record."""
    path = run.run / RECORD_FILE
    sound = path.read_text()
    texts = [
        "",
        sound[: len(sound) // 2],
        "[]",
        "null",
        '{"stores": {}, "files": []}',
        '{"stores": {"training store 0": {}}, "files": {}}',
        '{"stores": {}, "files": {"a": [[1, 2, 3]]}}',
        '{"stores": {}, "files": {"a": [[1, "2"]]}}',
        '{"stores": {}, "files": {"a": [[1, true]]}}',
        f'{{"stores": {{}}, "files": {{"a": [[1, 1{"0" * 5000}]]}}}}',
        "[" * 100_000,
        '"\\ud800"',
    ]
    damages: list[Callable[[Path], object]] = [lambda path, text=text: path.write_text(text) for text in texts]  # type: ignore[misc]
    damages += [lambda path: os.truncate(path, 1 << 40), lambda path: path.write_bytes(b"\xff\xfe\0"), _zeros, _fifo]
    for damage in damages:
        path.unlink()
        path.write_text(sound)
        damage(path)
        messages: list[tuple[int, str]] = []
        seen = seen_data.SeenData(messages=messages)
        assert seen_data._read(run.run, True, seen) == DataRecord()
        ((_, message),) = messages
        assert message.startswith(f"{path}: cannot be read (")
        assert message.endswith("); the data are noted as they are now, without a comparison")
    # The last one is a FIFO without a writer.
    outcome = run.start()
    assert outcome.code == 0
    assert outcome.err == f"warning: {message}\n"
    assert path.read_text() == sound
    assert path.is_file()
    _folder(path)
    outcome = run.start()
    assert outcome.code == ConfigError.exit_code
    assert outcome.errors == [
        f"run_dir={run.run}: {RECORD_FILE} cannot be written (Is a directory); name another folder"
    ]


def test_record_keeps_at_most_64_copies(tmp_path: Path) -> None:
    record = DataRecord()
    for number in range(200):
        record.note("a", (1, number))
    record.note("a", (1, 150))
    record.write(tmp_path)
    stored = DataRecord.read(tmp_path).files["a"]
    assert (len(stored), stored[-2:]) == (64, [(1, 199), (1, 150)])


def _starts(rank: int, world_size: int, folder: str) -> list[str | list[str]]:
    """Results of starts on four ranks, of which 2 and 3 share another copy: files hashed by this rank, or the error."""
    own = Path(folder, "copy" if rank >= 2 else "store")
    settings = ["data=tokens", f"data.path={own}", "sp.size=2", "data.seq_len=64", "train.eval_sequences=0"]
    results: list[str | list[str]] = []
    names: list[str] = []

    def spy(path: Path, *arguments: object) -> Iterator[int]:
        names.append(path.name)
        return hash_in_parts(path, *arguments)  # type: ignore[arg-type]

    changes: list[Callable[[], object]] = [lambda: None, lambda: None, lambda: touch(own, ahead=rank), lambda: None]
    changes += [lambda: flip(own / shard_name(1)) if rank == 3 else None]
    for step, change in enumerate(changes, start=1):
        # Changed by one rank of each copy.
        if rank in (0, 3):
            change()
        dist.barrier()
        names.clear()
        with mock.patch.object(seen_data, "hash_in_parts", spy), mock.patch.object(seen_data, "_ROUND_SECONDS", 0.0):
            try:
                train(rank, world_size, f"{folder}/run", *settings, f"train.steps={step}")
                results.append([*names])
            except ZecoError as error:
                results.append(f"{type(error).__name__}: {error}")
    return results


@pytest.mark.slow
def test_each_copy_is_hashed_once_across_its_ranks(tmp_path: Path) -> None:
    """Ranks with the same files share the hashing, each copy is hashed separately, and all ranks agree."""
    write(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    touch(tmp_path / "copy")
    by_rank = run_distributed(_starts, 4, str(tmp_path))
    shards = [shard_name(number) for number in range(3)]
    halves = [shards[0::2], shards[1::2]] * 2
    for rank, results in enumerate(by_rank):
        assert results[:4] == [[], [], halves[rank], []], rank
        assert results[4].startswith(f"DataError: {tmp_path / 'copy' / shards[1]}: changed since the run's last start")
    record = DataRecord.read(tmp_path / "run")
    # Two copies, each before and after `touch`.
    assert [len(notes) for notes in record.files.values()] == [4] * 3


@pytest.mark.slow
def test_killed_check_keeps_its_progress(
    run: Run, hashed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record is written during the check, and progress is shown."""
    touch(run.store)
    for name in ("_ROUND_SECONDS", "_REPORT_SECONDS", "_SAVE_SECONDS"):
        monkeypatch.setattr(seen_data, name, 0.0)

    class Killed(BaseException):
        pass

    compare = seen_data._compare

    def killed(*arguments: object) -> Iterator[int]:
        for number, size in enumerate(compare(*arguments)):  # type: ignore[arg-type]
            if number == 3:
                raise Killed
            yield size

    with mock.patch.object(seen_data, "_compare", killed), pytest.raises(Killed):
        run.start()
    assert len(hashed) == 4
    assert len([1 for notes in DataRecord.read(run.run).files.values() if len(notes) == 2]) == 2
    hashed.clear()
    outcome = run.start(steps=0)
    assert outcome.code == 0, outcome.err
    # The third file was read completely, but not yet compared.
    assert hashed == [shard_name(2), *map(shard_name, range(3))]
    assert re.search(r"^data: 2.00kB of 8.00kB compared, 0:00:\d\d left$", outcome.out, re.M)


def test_contradictory_verify_settings_are_refused(tmp_path: Path) -> None:
    outcome = train_here("data.verify=true", SKIP, f"run_dir={tmp_path / 'run'}")
    check_line(outcome, ConfigError.exit_code, f"{SKIP}: data.verify=true reads all token files; set one of them")
