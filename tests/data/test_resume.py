"""A preparation killed at any moment and restarted gives the same bytes as an uninterrupted one."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from data import preparation
from data.preparation.pipeline import Part, UnitTokenizer
from data.prepare import PrepareOptions, main, prepare_store
from data.sources import Unit
from data.store import TokenStore
from data.store.writer import StoreWriter
from tests.support.commands import snapshot
from tests.support.stores import documents, write_lines
from zeco_train.errors import DataError


def write_corpus(folder: Path, lines: int, seed: int = 0) -> Path:
    """Lines, a compressed file and text files: all kinds of units; the compressed one has many parts."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir()
    generator = random.Random(seed)
    texts = ["word " * generator.randrange(1, 400) + str(index) for index in range(lines)]
    write_lines(folder / "a.jsonl", [{"text": text} for text in texts])
    with pyarrow.output_stream(str(folder / "b.jsonl.gz"), compression="gzip") as stream:
        stream.write("".join(json.dumps({"text": text[::-1]}) + "\n" for text in texts).encode())
    for index in range(20):
        (folder / f"c{index:02}.txt").write_text(texts[index])
    return folder


class Stopped(Exception):
    """Simulates a kill: only `finally` blocks run after it."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", 24)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A corpus and its store from an uninterrupted run. Read only."""
    folder = tmp_path_factory.mktemp("unbroken")
    corpus = write_corpus(folder / "corpus", 24)
    prepare_store(options(corpus, folder / "store", save_seconds=10.0))
    return corpus, folder / "store"


def options(corpus: Path, out: Path, workers: int = 1, **changes: object) -> PrepareOptions:
    values = {
        "validation_fraction": 0.1,
        "min_tokens": 30,
        "shard_tokens": 7001,
        "unit_bytes": 9000,
        "part_characters": 4000,
        "save_seconds": 0.0,
    }
    return PrepareOptions((corpus,), out, workers=workers, **(values | changes))  # type: ignore[arg-type]


def stop_before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, count: int) -> None:
    """Raise `Stopped` at the `count`th call of a method, from 0."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def stopping(*args: object, **keywords: object) -> object:
        if next(calls) == count:
            raise Stopped
        return method(*args, **keywords)

    monkeypatch.setattr(owner, name, stopping)


def prepare_with_stops(again: PrepareOptions, monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """Stop every run after a few parts, and start it again with one worker; returns the number of runs."""
    for runs in itertools.count(1):
        with monkeypatch.context() as patched:
            stop_before(patched, preparation._Preparation, "_take", count)
            try:
                prepare_store(again)
                return runs
            except Stopped:
                again = replace(again, workers=1)
    raise AssertionError


def test_resume_after_stop_at_every_part(
    unbroken: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, expected = unbroken
    assert prepare_with_stops(options(corpus, tmp_path / "store"), monkeypatch, 2) > 3
    assert snapshot(tmp_path / "store") == snapshot(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.slow
def test_parts_made_ahead_are_reused_on_resume(
    unbroken: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, expected = unbroken
    waiting: set[str] = set()
    for count in range(6, 12):  # where a machine is busy, neither worker may be ahead at the last save
        shutil.rmtree(tmp_path / ".store.preparing", ignore_errors=True)
        with monkeypatch.context() as patched:
            stop_before(patched, preparation._Preparation, "_take", count)
            with pytest.raises(Stopped):
                prepare_store(options(corpus, tmp_path / "store", workers=2))
        state = json.loads((tmp_path / ".store.preparing" / "state.json").read_text())["state"]
        if waiting := {part["name"] for part in state["waiting"]}:
            break
    assert waiting
    made: list[str] = []
    make = UnitTokenizer.parts

    def spy(self: UnitTokenizer, index: int, unit: Unit, first: int) -> Iterator[Part]:
        for part in make(self, index, unit, first):
            made.append(part.name)
            yield part

    monkeypatch.setattr(UnitTokenizer, "parts", spy)
    prepare_store(options(corpus, tmp_path / "store"))
    assert made
    assert not waiting & set(made)
    assert snapshot(tmp_path / "store") == snapshot(expected)


@pytest.mark.few
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        (StoreWriter, "tail_state", 0),
        (StoreWriter, "tail_state", 1),
        (StoreWriter, "copy_tail", 0),
        (StoreWriter, "finish", 0),  # of the validation part
        (StoreWriter, "resume", 0),
        (StoreWriter, "finish", 1),
        (preparation.WorkFolder, "move_to", 0),
        (preparation, "read_meta", 0),  # after the move, before the work folder is gone
    ],
)
def test_resume_after_stop_in_final_phases(
    unbroken: tuple[Path, Path],
    tmp_path: Path,
    owner: type,
    name: str,
    count: int,
    overwrite: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus, expected = unbroken
    if overwrite:
        (tmp_path / "old.txt").write_text("old")
        prepare_store(PrepareOptions((tmp_path / "old.txt",), tmp_path / "store"))
    again = options(corpus, tmp_path / "store", overwrite=overwrite, save_seconds=10.0)
    with monkeypatch.context() as patched:
        stop_before(patched, owner, name, count)
        with pytest.raises(Stopped):
            prepare_store(again)
    assert (tmp_path / ".store.preparing").exists() == (name != "tail_state" or count > 0)
    if overwrite and name != "read_meta":
        assert documents(tmp_path / "store") == ["old"]
    prepare_store(again)
    assert snapshot(tmp_path / "store") == snapshot(expected)
    assert not (tmp_path / ".store.preparing").exists()


@pytest.fixture
def interrupted(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work folder of a preparation of `corpus` interrupted halfway."""
    with monkeypatch.context() as patched:
        stop_before(patched, preparation._Preparation, "_take", 4)
        with pytest.raises(Stopped):
            prepare_store(options(corpus, tmp_path / "store"))
    return tmp_path / ".store.preparing"


def test_resume_with_other_arguments_is_refused(corpus: Path, interrupted: Path, tmp_path: Path) -> None:
    before = snapshot(interrupted)
    with pytest.raises(
        DataError,
        match=r"\.store\.preparing: holds an interrupted preparation with min_tokens 30, not 5; give the same "
        r"arguments to continue it, or give --overwrite to start anew, or choose another --out$",
    ):
        prepare_store(options(corpus, tmp_path / "store", min_tokens=5))
    assert snapshot(interrupted) == before
    prepare_store(options(corpus, tmp_path / "store", min_tokens=5, overwrite=True))
    prepare_store(options(corpus, tmp_path / "unbroken", min_tokens=5))
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "unbroken")


def test_resume_with_changed_sources_is_refused(corpus: Path, interrupted: Path, tmp_path: Path) -> None:
    status = (corpus / "a.jsonl").stat()
    text = (corpus / "a.jsonl").read_text()
    (corpus / "a.jsonl").write_text(text.replace("word", "WORD", 1))  # of the same size
    before = snapshot(interrupted)
    with pytest.raises(DataError, match=r"corpus: has changed since the interrupted preparation read it; give --over"):
        prepare_store(options(corpus, tmp_path / "store"))
    after = snapshot(interrupted)
    assert after == {name: before[name] for name in after}  # parts not in the saved state are removed
    (corpus / "a.jsonl").write_text(text)
    os.utime(corpus / "a.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    # Files that were not yet read may change.
    (corpus / "c19.txt").write_text("changed " * 50)
    prepare_store(options(corpus, tmp_path / "store"))
    prepare_store(options(corpus, tmp_path / "unbroken"))
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "unbroken")


def fewer_sources(corpus: Path, folder: Path) -> None:
    for path in corpus.iterdir():
        path.unlink()
    (corpus / "a.txt").write_text("one")


def file_elsewhere(corpus: Path, folder: Path) -> None:
    record = json.loads((folder / "state.json").read_text())
    record["state"]["waiting"] = [asdict(Part(0, "", 0, 1, True, "../../elsewhere", 1, 0, 0.0))]
    (folder / "state.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (fewer_sources, "has changed since the interrupted preparation read it"),
        (
            lambda corpus, folder: os.truncate(folder / "store" / "tokens-00000.bin", 100),
            r"tokens-00000\.bin: has 100 bytes, \d+ were written; prepare the store from",
        ),
        (file_elsewhere, r"state\.json: cannot be read \(part '../../elsewhere' is no file of"),
        (
            lambda corpus, folder: (folder / "store" / "doc_offsets.npy").unlink(),
            r"doc_offsets\.npy: has 0 bytes, \d+ were written; prepare",
        ),
        (
            lambda corpus, folder: os.truncate(folder / "store" / "doc_offsets.npy", 150),
            r"doc_offsets\.npy: has 150 bytes, \d+ were written; prepare",
        ),
    ],
)
def test_damaged_work_folder_or_other_sources_are_refused(
    damage: Callable[[Path, Path], None], problem: str, corpus: Path, interrupted: Path, tmp_path: Path
) -> None:
    damage(corpus, interrupted)
    with pytest.raises(DataError, match=problem):
        prepare_store(options(corpus, tmp_path / "store"))


@pytest.mark.parametrize("name", ["store/validation", "store", "parts", "", "thesis.txt"])
def test_links_and_other_files_in_work_folder_are_refused(
    name: str, corpus: Path, interrupted: Path, tmp_path: Path
) -> None:
    """Through a link, the store's files would be written, and its leftovers deleted, in another folder."""
    if name == "thesis.txt":
        (interrupted / name).touch()
    else:
        if (interrupted / name).exists():
            (interrupted / name).rename(tmp_path / "elsewhere")
        (interrupted / name).symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match=rf"{name or interrupted.name}: is not a preparation's; move it away"):
        prepare_store(options(corpus, tmp_path / "store", overwrite=True))
    assert snapshot(tmp_path) == before


def test_second_process_on_same_store_is_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = preparation._Preparation._take
    seen: list[str] = []

    def second(self: object, writer: StoreWriter, part: Part) -> bool:
        if not seen:
            seen.append("")
            with pytest.raises(DataError, match=r"store: another process is preparing it; wait for it, or choose") as e:
                prepare_store(options(corpus, tmp_path / "store"))
            seen.append(str(e.value))
        return taken(self, writer, part)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation._Preparation, "_take", second)
    prepare_store(options(corpus, tmp_path / "store"))
    assert len(seen) == 2


def test_error_in_text_keeps_earlier_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / "a.jsonl", [{"text": "x" * 300_000}] * 3)
    bad = tmp_path / "texts" / "b.jsonl"
    bad.write_text('{"text": "y"}\nno json\n')
    flags = ["--out", str(tmp_path / "store"), "--workers", "1", "--save-seconds", "0"]
    assert main([str(tmp_path / "texts"), *flags]) == 3
    line = f"{bad}, line 2: not JSON (Expecting value); each line must be one JSON object"
    kept = "900,003 tokens are kept, the same command goes on from there"
    assert capsys.readouterr().err == f"error: {line}; {kept}\n"
    bad.write_text('{"text": "y"}\n{"text": "z"}\n')
    assert main([str(tmp_path / "texts"), *flags]) == 0
    assert "went on from 900,003 tokens of an interrupted preparation" in capsys.readouterr().out
    assert documents(tmp_path / "store")[3:] == ["y", "z"]


def test_interrupted_preparation_restarts_with_overwrite(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x" * 3_000_000}] * 3)
    arguments = [str(source), "--out", str(tmp_path / "store"), "--workers", "1", "--save-seconds", "0"]
    calls = iter(range(10))
    taken = preparation._Preparation._take

    def interrupt(self: object, writer: StoreWriter, part: Part) -> bool:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return taken(self, writer, part)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(preparation._Preparation, "_take", interrupt)
        assert main(arguments) == 128 + signal.SIGINT
    kept = "3,000,001 tokens are kept, the same command goes on from there"
    assert capsys.readouterr().err == f"interrupted: {kept}\n"
    source.write_text('{"text": "new"}\n')
    assert main(arguments) == 3
    assert capsys.readouterr().err.endswith("; give --overwrite to start anew, or choose another --out\n")
    assert main([*arguments, "--overwrite"]) == 0
    assert documents(tmp_path / "store") == ["new"]


def test_max_tokens_ends_at_next_document_end(corpus: Path, tmp_path: Path) -> None:
    prepare_store(options(corpus, tmp_path / "all", validation_fraction=0.0, save_seconds=10.0))
    prepare_store(options(corpus, tmp_path / "some", validation_fraction=0.0, max_tokens=9_000))
    whole, some = TokenStore.open(tmp_path / "all"), TokenStore.open(tmp_path / "some")
    assert some.num_tokens == whole.doc_offsets[np.searchsorted(whole.doc_offsets, 9_000)]
    assert 9_000 <= some.num_tokens < whole.num_tokens
    np.testing.assert_array_equal(some.read(0, some.num_tokens), whole.read(0, some.num_tokens))


def test_resume_after_max_tokens_adds_no_documents(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the last wanted document, before that is saved: the resumed run reads no further."""
    save = preparation._Preparation._save

    def stopping(self: preparation._Preparation, writer: StoreWriter, phase: str = preparation.READING) -> None:
        if phase != preparation.READING:
            raise Stopped
        save(self, writer, phase)

    for most in range(2_000, 8_000, 1_500):
        some = options(corpus, tmp_path / "store", validation_fraction=0.0, max_tokens=most, overwrite=True)
        with monkeypatch.context() as patched:
            patched.setattr(preparation._Preparation, "_save", stopping)
            with pytest.raises(Stopped):
                prepare_store(some)
        found = prepare_store(some)
        assert found.earlier_tokens < most
        assert found.meta == prepare_store(some).meta, most
