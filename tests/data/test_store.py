"""The token store: files, reads, and error messages for folders that are not stores."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from data import store
from data.store import META_FILE, OFFSETS_FILE, TokenStore, shard_name
from tests.support.stores import edit_json, verify, write_tokens
from zeco_train.errors import DataError, OpenFilesError
from zeco_train.system import files
from zeco_train.system.files import atomic_folder

REPOSITORY = Path(__file__).resolve().parents[2]


def write_store(folder: Path, lengths: list[int], vocab_size: int = 1000) -> np.ndarray:
    """A store of random documents of the given lengths (end of sequence included); returns its tokens."""
    tokens = np.random.default_rng(0).integers(2, vocab_size, sum(lengths))
    tokens[np.cumsum(lengths) - 1] = 1
    write_tokens(folder, tokens, lengths, vocab_size)
    return tokens


def opening_error(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        TokenStore.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("vocab_size", "dtype", "itemsize"), [(65536, "uint16", 2), (65537, "uint32", 4)])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: str, itemsize: int) -> None:
    lengths = [3, 1, 7, 20]
    tokens = write_store(tmp_path / "store", lengths, vocab_size)
    opened = TokenStore.open(tmp_path / "store")
    assert (opened.num_tokens, opened.vocab_size, opened.itemsize) == (31, vocab_size, itemsize)
    assert opened.meta.dtype == dtype
    assert opened.doc_offsets.dtype == np.int64
    assert opened.doc_offsets.tolist() == [0, 3, 4, 11, 31]
    for start, stop in [(0, 31), (0, 0), (5, 6), (30, 31), (31, 31), (4, 20)]:
        got = opened.read(start, stop)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, tokens[start:stop])
    assert opened.bytes_requested == itemsize * (31 + 0 + 1 + 1 + 0 + 16)
    verify(opened)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == sorted(
        [META_FILE, OFFSETS_FILE, shard_name(0)]
    )


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = write_store(tmp_path / "store", [100])
    opened = TokenStore.open(tmp_path / "store")
    whole = os.preadv
    monkeypatch.setattr(store.os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    np.testing.assert_array_equal(opened.read(10, 90), tokens[10:90])


@pytest.mark.processes
def test_concurrent_reads_from_many_threads(tmp_path: Path) -> None:
    tokens = write_store(tmp_path / "store", [50_000])
    opened = TokenStore.open(tmp_path / "store")
    wrong: list[int] = []

    def read(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, 49_000, 100).tolist():
            if not np.array_equal(opened.read(start, start + 1000), tokens[start : start + 1000]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert opened.bytes_requested == 8 * 100 * 1000 * 2


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_limit_of_open_files_is_no_damage(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(tmp_path / "store", [100])
    opened = TokenStore.open(tmp_path / "store")
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    monkeypatch.setattr(Path, "open", os.open)
    limit = "ulimit -n" if number == errno.EMFILE else "fs.file-max"
    for act in (lambda: opened.read(0, 10), lambda: TokenStore.open(tmp_path / "store")):
        with pytest.raises(OpenFilesError, match=limit):
            act()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / META_FILE).unlink(), "not a token store (no meta.json)"),
        (lambda folder: (folder / META_FILE).write_text("{"), "not a token store (meta.json is not JSON"),
        (
            lambda folder: (folder / META_FILE).write_text('{"format": "parquet"}'),
            "not a token store (meta.json has no",
        ),
        (lambda folder: (folder / META_FILE).write_text("[1]"), "not a token store (meta.json has no format"),
        (lambda folder: edit_json(folder / META_FILE, version=99), "format version 99"),
        (lambda folder: edit_json(folder / META_FILE, num_tokens="many"), "num_tokens is 'many', not int"),
        (lambda folder: edit_json(folder / META_FILE, num_tokens=0), "holds no tokens"),
        (lambda folder: edit_json(folder / META_FILE, dtype="uint32"), "do not fit together"),
        (lambda folder: os.truncate(folder / shard_name(0), 59), "truncated: 59 bytes, meta.json says 60"),
        (lambda folder: os.truncate(folder / shard_name(0), 62), "too long: 62 bytes, meta.json says 60"),
        (
            lambda folder: (folder / shard_name(0)).unlink(),
            "tokens-00000.bin: cannot be read (No such file or directory)",
        ),
        (lambda folder: (folder / OFFSETS_FILE).unlink(), "doc_offsets.npy: cannot be read (No such file"),
        (lambda folder: os.truncate(folder / OFFSETS_FILE, 140), "doc_offsets.npy: cannot be read ("),
        (lambda folder: np.save(folder / OFFSETS_FILE, np.array([0, 10, 30])), "expected int64 [4]"),
        (lambda folder: np.save(folder / OFFSETS_FILE, np.array([0, 10, 20, 30.0])), "float64 [4], expected int64 [4]"),
        (
            lambda folder: np.save(folder / OFFSETS_FILE, np.array([0, 10, 20, 31])),
            "runs from 0 to 31, expected 0 to 30",
        ),
        (lambda folder: np.save(folder / OFFSETS_FILE, np.array([0, 20, 10, 30])), "its offsets do not increase"),
    ],
)
def test_damaged_or_foreign_folder_is_refused(tmp_path: Path, damage: object, expected: str) -> None:
    write_store(tmp_path / "store", [10, 10, 10])
    damage(tmp_path / "store")  # type: ignore[operator]
    message = opening_error(tmp_path / "store")
    assert expected in message
    assert str(tmp_path / "store") in message


def test_missing_empty_or_file_path_is_refused(tmp_path: Path) -> None:
    assert opening_error(tmp_path / "none").startswith(f"{tmp_path / 'none'}: no such token store; prepare one with")
    (tmp_path / "empty").mkdir()
    assert "an empty folder, not a token store" in opening_error(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    assert "is a file, a token store is a folder" in opening_error(tmp_path / "file")


@pytest.mark.parametrize("vocab_size", [1000, 65537])
def test_ids_outside_vocabulary_fail_the_read(tmp_path: Path, vocab_size: int) -> None:
    write_store(tmp_path / "store", [100], vocab_size)
    itemsize = TokenStore.open(tmp_path / "store").itemsize
    with (tmp_path / "store" / shard_name(0)).open("r+b") as file:
        for position, token in [(40, vocab_size), (60, vocab_size + 5), (20, vocab_size - 1)]:
            file.seek(position * itemsize)
            file.write(token.to_bytes(itemsize, "little"))
    opened = TokenStore.open(tmp_path / "store")
    problem = f"token 40 is {vocab_size}, meta.json has ids below {vocab_size}; copy the store again or"
    with pytest.raises(DataError, match=f"tokens-00000.bin, bytes {10 * itemsize} to {90 * itemsize}: {problem}"):
        opened.read(10, 90)
    assert opened.read(10, 40)[10] == vocab_size - 1
    assert opened.read(41, 60).shape == (19,)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _rewrite(path: Path) -> None:
    """In place with the same bytes: only the modification time differs."""
    with path.open("r+b") as file:
        file.write(file.read(1))


def _replace(path: Path) -> None:
    """Another file with the same name, contents and times."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (Path.unlink, "was removed or replaced since it was opened"),
        (_replace, "was removed or replaced since it was opened"),
        (_rewrite, "was changed or replaced since it was opened"),
        (_append, "was changed or replaced since it was opened"),
        (lambda path: os.truncate(path, 100), "has become shorter since it was opened: nothing at byte 100"),
        (lambda path: os.truncate(path, 190), "was changed or replaced since it was opened"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_shard_changed_after_opening_fails_the_read(
    change: Callable[[Path], None], problem: str, is_open: bool, tmp_path: Path
) -> None:
    """With the shard file open after an earlier read, and not yet open."""
    write_store(tmp_path / "store", [100])
    opened = TokenStore.open(tmp_path / "store")
    if is_open:
        opened.read(0, 100)
    change(tmp_path / "store" / shard_name(0))
    if not is_open:
        problem = {
            Path.unlink: "cannot be read (No such file or directory)",
            _replace: "was changed or replaced since it was opened",
        }.get(change, problem)
    with pytest.raises(DataError) as caught:
        opened.read(30, 90)
    remedy = "copy the store again or prepare it again" if "cannot" in problem else "leave a store alone while a run"
    where = f"{tmp_path / 'store' / shard_name(0)}, bytes 60 to 180"
    assert str(caught.value).startswith(f"{where}: {problem}; {remedy}")


def test_atomic_folder_leaves_nothing_after_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as folder:  # noqa: PT012
        write_store(folder / "store", [5])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_atomic_folder_replaces_only_with_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:

        def refuse(first: Path, second: Path) -> None:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(files, "_exchange", refuse)
    with atomic_folder(tmp_path / "out", replace=store.check_replaceable) as folder:
        write_store(folder, [5])
    with pytest.raises(DataError, match="exists already"), atomic_folder(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert TokenStore.open(tmp_path / "out").num_tokens == 5
    with atomic_folder(tmp_path / "out", replace=store.check_replaceable) as folder:
        (folder / "thesis.txt").touch()
    expected = pytest.raises(DataError, match="exists and is not a token store")
    with expected, atomic_folder(tmp_path / "out", replace=store.check_replaceable) as folder:
        write_store(folder, [5])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.processes
def test_leftovers_are_removed_unless_owner_is_alive(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from zeco_train.system.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').write_text('x'); print(folder, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        temporary = Path(owner.stdout.readline().strip())
        assert (temporary / "file").exists()
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "mine").write_text("x")
        assert (temporary / "file").exists(), "a live process lost its folder"
        owner.kill()
        owner.wait()
    assert temporary.exists()
    files.remove_leftovers(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_replacement_killed_between_renames_is_undone(tmp_path: Path) -> None:
    temporary = tmp_path / ".out.tmp-1-abc"
    temporary.mkdir()
    old = tmp_path / ".out.tmp-1-abc.old"
    old.mkdir()
    (old / "file").write_text("the only valid store")
    files.lock_path(temporary).touch()
    files.remove_leftovers(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "the only valid store"


def test_unwritable_parent_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    expected = pytest.raises(DataError, match=r"out: cannot be written \(.*\); choose another folder$")
    with expected, atomic_folder(tmp_path / "file" / "out"):
        pytest.fail("the block ran")
