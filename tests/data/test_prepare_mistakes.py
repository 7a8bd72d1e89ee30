"""Error messages of `python -m data.prepare` for unusable texts and arguments; nothing is written."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.preparation import pipeline
from data.prepare import PrepareOptions, main, prepare_store
from tests.support.commands import check_line, run_here
from tests.support.stores import write_lines
from zeco_train.errors import DataError

KINDS = ".txt .md .py .jsonl .jsonl.gz .jsonl.zst .parquet .arrow"


def column(kind: pyarrow.DataType, *values: object, name: str = "text") -> bytes:
    """A .parquet file of one column."""
    sink = pyarrow.BufferOutputStream()
    array = (
        pyarrow.array(values, pyarrow.binary()).view(kind) if kind == pyarrow.string() else pyarrow.array(values, kind)
    )
    parquet.write_table(pyarrow.table({name: array}), sink)
    return sink.getvalue().to_pybytes()


JSON = "each line must be one JSON object"
# Name of a file in the folder, its contents (a path: a link there), and the line without "FOLDER".
PROBLEMS: dict[str, tuple[str, bytes | Path, str]] = {
    "not UTF-8": ("b.txt", b"12345\xff", "/b.txt: not UTF-8 at byte 5; convert it, for example with iconv"),
    "lines not UTF-8": (
        "a.jsonl",
        b'{"text": "1"}\n{"text": "\xe9"}\n',
        "/a.jsonl: not UTF-8 at byte 24; convert it, for example with iconv",
    ),
    "no field": (
        "a.jsonl",
        b'{"text": "x"}\n' * 20 + b'{"id": 1, "body": "y"}',
        "/a.jsonl, line 21: no field 'text'; fields there: id, body; choose one with --text-field",
    ),
    "field is no text": ("a.jsonl", b'{"text": ["x"]}', "/a.jsonl, line 1: field 'text' is of type list, not text"),
    "lone surrogate": (
        "a.jsonl",
        b'{"text": "ok"}\n{"text": "ab\\ud800"}\n',
        "/a.jsonl, line 2: field 'text' has a lone surrogate at character 2",
    ),
    "not JSON": ("a.jsonl", b'\n{"text": "ok"}\n{"text": \n', f"/a.jsonl, line 3: not JSON (Expecting value); {JSON}"),
    "not an object": ("a.jsonl", b'["text"]\n', f"/a.jsonl, line 1: a JSON list, not an object; {JSON}"),
    "no column": (
        "a.parquet",
        partial(column, pyarrow.int64(), 1, name="id"),
        "/a.parquet: no column 'text'; columns there: id; choose one with --text-field",
    ),
    "column is no text": (
        "a.parquet",
        partial(column, pyarrow.int64(), 1),
        "/a.parquet: column 'text' holds int64, not text",
    ),
    "column not UTF-8": (
        "a.parquet",
        partial(column, pyarrow.string(), b"fine", b"12\xff"),
        "/a.parquet, row 1: not UTF-8 at byte 2 of column 'text'",
    ),
    "not parquet": ("a.parquet", b"no", "/a.parquet: cannot be read as parquet ("),
    "nothing known": ("a.csv", b"x", f": no text found; read are files of {KINDS}; skipped: .csv 1"),
    "nothing": (".hidden", b"", f": no text found; read are files of {KINDS}; skipped: hidden 1"),
    "only empty files": ("a.txt", b"", ": no text in 1 files; left out 1 documents without text"),
    "dangling link": ("a.txt", Path("none"), "/a.txt: is a link to nothing; remove it or repair it"),
    "link to a folder": ("a.txt", Path(), f": no text found; read are files of {KINDS}; skipped: link to a folder 1"),
    "link out of the folder": (
        "a.txt",
        Path(__file__),
        "/a.txt: is a link out of its folder; put the file itself there, or give files by name",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_unusable_text_is_reported(problem: str, tmp_path: Path) -> None:
    name, contents, expected = PROBLEMS[problem]
    folder = tmp_path / "corpus"
    folder.mkdir()
    # Made here: pyarrow imports pandas for its tables.
    contents = contents() if isinstance(contents, partial) else contents
    if isinstance(contents, bytes):
        (folder / name).write_bytes(contents)
    else:
        (folder / name).symlink_to(contents)
    outcome = run_here(main, str(folder), "--out", str(tmp_path / "store"))
    check_line(outcome, 3, f"{folder}{expected}")
    assert outcome.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_error_in_worker_names_file_and_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [*[{"text": "x" * 50}] * 20, {"id": 1}, *[{"text": "x"}] * 20])
    options = PrepareOptions((source,), tmp_path / "store", workers=2, unit_bytes=100)
    with pytest.raises(DataError, match=r"a\.jsonl, line 21: no field 'text'; fields there: id; choose one with"):
        prepare_store(options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


class Unpicklable(Exception):
    def __init__(self, field: str, value: str) -> None:
        super().__init__(f"{field}: {value}")


class FailingPipe:
    """A worker's: gives one task, and keeps what is sent as the other end would read it."""

    def __init__(self) -> None:
        self.tasks, self.sent = [(0, None, 0)], []

    def recv(self) -> object:
        if not self.tasks:
            raise EOFError
        return self.tasks.pop()

    def send(self, answer: object) -> None:
        self.sent.append(pickle.loads(pickle.dumps(answer)))


def test_error_of_a_worker_that_does_not_pickle_is_reported_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: object) -> None:
        raise Unpicklable("row 3", "broken")

    monkeypatch.setattr(pipeline, "UnitTokenizer", fail)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    pipe = FailingPipe()
    pipeline._work(pipe, None)  # type: ignore[arg-type]
    (answer,) = pipe.sent
    assert isinstance(answer, DataError)
    assert answer.line == "error: a worker process: Unpicklable (row 3: broken)"


def end_at_once(pipe: object, job: object) -> None:
    os._exit(1)


@pytest.mark.slow
def test_dead_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.txt"
    source.write_text("x")
    monkeypatch.setattr(pipeline, "_work", end_at_once)  # as if killed for lack of memory
    with pytest.raises(DataError, match="a worker process ended by itself"):
        prepare_store(PrepareOptions((source,), tmp_path / "store", workers=2))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["none.txt", "--out", "s"], 3, "SOURCE=none.txt: no such file or folder; give folders, or files of .txt"),
        (["a.csv", "--out", "s"], 3, f"SOURCE=a.csv: unknown kind of file '.csv'; known are {KINDS}"),
        (["/dev/null", "--out", "s"], 3, "SOURCE=/dev/null: is neither a file nor a folder"),
        (["a.txt", "--out", "a.txt/s"], 3, "a.txt is a file); choose another folder"),
        (["a.txt", "--out", "a.csv"], 3, "--out=a.csv: exists and is not a token store; choose another folder"),
        (["a.txt", "--out", "folder"], 3, "--out=folder: exists and is not a token store; choose another folder"),
        (["a.txt", "--out", "folder", "--overwrite"], 3, "folder: exists and is not a token store"),
        (["a.txt", "--out", "s", "--tokenizer", "no/such/path"], 3, "--tokenizer=no/such/path: no such tokenizer; "),
        (["a.txt", "--out", "s", "--validation-fraction", "0.5"], 3, "the validation part: would be empty: its "),
        (["a.txt", "--out", "s", "--validation-fraction", "1"], 2, "--validation-fraction=1.0: allowed: from 0"),
        (["a.txt", "--out", "s", "--control-strings", "id"], 2, "--control-strings=id: allowed: text, ids"),
        (["a.txt", "--out", "s", "--max-document-bytes", "0"], 2, "--max-document-bytes=0: allowed: 1 or more"),
        (["a.txt", "--out", "s", "--workers", "0"], 2, "--workers=0: allowed: 1 or more"),
        (["a.txt", "--out", "s", "--min-tokens", "0"], 2, "--min-tokens=0: allowed: 1 or more"),
        (["", "--out", "s"], 2, "argument SOURCE: is empty"),
        (["a.txt", "--out", ""], 2, "argument --out: is empty"),
        (["a.txt", "--out", "/"], 2, "--out=/: must be a folder that holds nothing else"),
        (["a.txt", "--dataset", "x", "--out", "s"], 2, "give either SOURCE (files and folders) or --dataset"),
        (["--out", "s"], 2, "give either SOURCE (files and folders) or --dataset"),
        (["a.txt", "--config", "x", "--out", "s"], 2, "--config=x: goes with --dataset or --recipe only"),
        (["a.txt"], 2, "the following arguments are required: --out"),
        (["a.txt", "--out", "s", "--workers", "two"], 2, "argument --workers: invalid int value: 'two'"),
    ],
)
def test_unusable_arguments_are_reported(
    arguments: list[str], code: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("a.csv").write_text("text")
    Path("folder").mkdir()
    Path("folder", "precious").write_text("text")
    check_line(run_here(main, *arguments), code, expected)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.csv", "a.txt", "folder", "precious"]
