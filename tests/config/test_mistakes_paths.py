"""Impossible paths and unwritable results: one error line before the work, and no files left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from data import inspect, prepare
from tests.support.commands import Outcome, check_line, run_here, snapshot, train_here
from tests.support.stores import write_store
from zeco_train import compare, export
from zeco_train.bench import __main__ as bench
from zeco_train.config.overrides import load_settings
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.generate import __main__ as generate
from zeco_train.generate.__main__ import parse as parse_generate
from zeco_train.plan import __main__ as plan
from zeco_train.report import __main__ as report
from zeco_train.system.paths import path_problem
from zeco_train.verify import __main__ as verify
from zeco_train.verify.config import VerifyConfig

CONFIG = ConfigError.exit_code
LOAD = "checkpoint.load"
TOO_LONG, LOOP = "cannot be looked up (File name too long)", "cannot be looked up (Too many levels of symbolic links)"
# Path.exists() and similar return False for some of them and raise for others.
IMPOSSIBLE = {
    "x" * 300: TOO_LONG,
    "x/" * 2500 + "x": "is too long for a path (",
    "loop": LOOP,
    "loop/sub": LOOP,
    "a\0b": "contains a NUL character",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run` of one step, its token store `store`, the text `text.txt` and a link to itself."""
    folder = tmp_path_factory.mktemp("paths")
    store = write_store(folder / "store")
    data = ["data=tokens", f"data.path={store}"]
    outcome = train_here(*data, f"run_dir={folder / 'run'}", "train.steps=1")
    assert outcome.code == 0, outcome.err
    (folder / "text.txt").write_text("some text\n" * 50)
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`trained` as the current folder; tests must leave it unchanged."""
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "argv", ["command"])
    before = snapshot(trained)
    yield trained
    assert snapshot(trained) == before


def _train(*overrides: str) -> Outcome:
    return train_here("data=tokens", "data.path=store", "run_dir=new", "train.steps=1", *overrides)


def _generate(*arguments: str) -> Outcome:
    return run_here(generate.main, *arguments, "--prompt", "a", "--max-tokens", "1")


READERS: dict[str, Callable[[str], Outcome]] = {
    "data.path": lambda path: _train(f"data.path={path}"),
    "data.validation_path": lambda path: _train(f"data.validation_path={path}", "train.eval_sequences=1"),
    "data.stores.0.path": lambda path: train_here("data=mixture", f"data.stores=[{{path:'{path}'}}]", "run_dir=new"),
    "data.cache_dir": lambda path: train_here(f"data.cache_dir={path}", "run_dir=new"),
    "data.synthetic.tokenizer": lambda path: train_here(
        "data=synthetic", "data.synthetic.task=needle", f"data.synthetic.tokenizer={path}", "run_dir=new"
    ),
    LOAD: lambda path: _train(f"checkpoint.load={path}"),
    f"{LOAD}=hf:": lambda path: _train(f"checkpoint.load=hf:{path}"),
    "run_dir": lambda path: _train(f"run_dir={path}"),
    "RUN": lambda path: run_here(evaluate.main, path),
    "RUN of generate": _generate,
    "RUN of export": lambda path: run_here(export.main, path, "new"),
    "SOURCE": lambda path: run_here(prepare.main, path, "--out", "new"),
    "--tokenizer": lambda path: run_here(prepare.main, "text.txt", "--out", "new", "--tokenizer", path),
    "--dataset": lambda path: run_here(prepare.main, "--dataset", path, "--out", "new"),
    "STORE": lambda path: run_here(inspect.main, path),
    "RUN_DIR": lambda path: run_here(compare.main, path, "--out", "new"),
    "PATH": lambda path: run_here(report.main, path, "--out", "new"),
    "--prompt-file": lambda path: run_here(generate.main, "run", "--prompt-file", path),
}
# Arguments that name a file or folder for results.
WRITERS: dict[str, Callable[[str], Outcome]] = {
    "OUT": lambda path: run_here(export.main, "run", path),
    "--out of prepare": lambda path: run_here(prepare.main, "text.txt", "--out", path),
    "--out of evaluate": lambda path: run_here(evaluate.main, "run", "--out", path, "data=embedded", "data.seq_len=64"),
    "--out of compare": lambda path: run_here(compare.main, "run", "--out", path),
    "--out of report": lambda path: run_here(report.main, "run", "--out", path),
    "--png": lambda path: run_here(inspect.main, "store", "--png", path),
    "--json": lambda path: _generate("run", "--json", path),
    "out": lambda path: run_here(verify.main, f"out={path}"),
    "out of bench": lambda path: run_here(bench.main, "collectives", f"out={path}"),
    "json": lambda path: run_here(plan.main, f"json={path}"),
}


@pytest.mark.few(5, quick=3)
@pytest.mark.parametrize("name", [*READERS, *WRITERS])
def test_impossible_paths_are_reported(name: str, here: Path) -> None:
    for path, problem in IMPOSSIBLE.items():
        outcome = (READERS | WRITERS)[name](path)
        check_line(outcome, CONFIG, name.partition(" of ")[0], problem)
        assert len(outcome.err) < 1300


# Characters with a meaning to Hydra's grammar, to argparse or to a shell.
ODD = 'it\'s "a" = [b], {c: d} (e) 1e3 \\ #~$ü日本'
OVERRIDES: dict[str, Callable[[str], object]] = {
    "name": lambda text: load_config([f"name={text}"]).name,
    "run_dir": lambda text: load_config([f"run_dir={text}"]).run_dir,
    "data.path": lambda text: load_config(["data=tokens", f"data.path={text}"]).data.path,
    "data.stores.0.path": lambda text: (
        load_config(["data=mixture", "data.stores=[{path:a,name:n}]", f"data.stores.0.path={text}"]).data.stores[0].path
    ),
    LOAD: lambda text: load_config([f"{LOAD}={text}"]).checkpoint.load,
    "out": lambda text: load_settings(VerifyConfig, [f"out={text}"]).out,
    "RUN": lambda text: evaluate.parse([text]).path,
    "RUN of generate": lambda text: parse_generate([text, "--prompt", "a"]).run,
    "SOURCE": lambda text: prepare._parse([text, "--out", "a"]).sources[0],
    "--out": lambda text: prepare._parse(["a", f"--out={text}"]).out,
    "--tokenizer": lambda text: prepare._parse(["a", "--out=a", f"--tokenizer={text}"]).tokenizer,
}


# Of the keys of a configuration one is quick.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("name", "data.path", LOAD) else []) for name in OVERRIDES],
)
def test_names_and_paths_arrive_as_typed(name: str) -> None:
    """Without quotes beside those of the shell; a positional argument that begins with - would be an option."""
    signs = ",=+[]{}()'\"\\#~$ü" + "-" * (name.partition(" ")[0] not in ("RUN", "SOURCE"))
    # Composing takes 15 ms, and other commands' keys, which have each sign alone, are parsed alike.
    if name in ("name", "run_dir", "data.path", "data.stores.0.path", LOAD):
        signs = ",'"
    for text in (
        ODD,
        *(sign + "a" for sign in signs),
        *("a" + sign for sign in signs),
        "range(1,3)",
        "{a: b}",
        "[a, b]",
    ):
        assert str(OVERRIDES[name](text)) == text


def test_values_wholly_in_quotes_lose_them() -> None:
    for text, value in (("'a, b'", "a, b"), ('"a"', "a"), ("null", None), ("'null'", "null"), ("\"'a'\"", "'a'")):
        assert load_config([f"{LOAD}={text}"]).checkpoint.load == value


def test_name_that_looks_like_an_option_is_explained(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "-texts", "--out", "new"])
    check_line(READERS["SOURCE"]("-texts"), CONFIG, "-texts", "a name that begins with - is written ./-NAME")


@pytest.mark.parametrize("name", ["run_dir", "name", "model.name", "data.path", "data.stores.0.path"])
def test_bytes_that_are_no_utf8_are_refused_before_anything_is_written(name: str, here: Path) -> None:
    command = READERS.get(name, lambda path: _train(f"{name}={path}"))
    check_line(
        command("x\udcff"), CONFIG, f"{name}=x\\udcff: stored configurations are UTF-8, and this has other bytes"
    )


def test_export_to_a_name_that_is_no_utf8_is_refused(here: Path) -> None:
    check_line(WRITERS["OUT"]("x\udcff"), CONFIG, "OUT=x\\udcff: has bytes that are no UTF-8")


@pytest.mark.parametrize("name", ["--json", "out", "json"])
def test_unwritable_file_is_reported_before_work(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", _no_work)
    monkeypatch.setattr("zeco_train.plan.__main__.make_plan", _no_work)
    cases = {
        "run": "is a folder; name a file",
        "missing/new.json": "its folder does not exist",
        "text.txt/new.json": "its folder is a file",
    }
    for path, problem in cases.items():
        check_line(WRITERS[name](path), CONFIG, name.partition(" of ")[0], problem)


def _no_work(*arguments: object, **options: object) -> None:
    raise AssertionError("work was begun")


@pytest.mark.parametrize("name", ["OUT", "--out of evaluate", "--out of compare", "--out of report", "out of bench"])
def test_unwritable_folder_is_reported_before_work(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeco_train.export._fill", _no_work)
    monkeypatch.setattr(compare, "describe", _no_work)
    monkeypatch.setattr(report, "read", _no_work)
    monkeypatch.setattr(evaluate, "_run", _no_work)
    monkeypatch.setattr(bench.collectives, "Runner", _no_work)
    for path in ("text.txt/new", "text.txt/deeper/new"):
        check_line(WRITERS[name](path), CONFIG, name.partition(" of ")[0], "text.txt is a file)")


def test_output_without_write_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission is mocked, since the tests may run as root."""
    monkeypatch.setattr("zeco_train.system.paths.os.access", lambda path, mode: Path(path) != tmp_path)
    for main, argument in (
        (plan.main, f"json={tmp_path / 'plan.json'}"),
        (verify.main, f"out={tmp_path / 'out.json'}"),
    ):
        check_line(run_here(main, argument), CONFIG, f"cannot be written ({tmp_path}: Permission denied)")


def test_failed_export_leaves_no_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("zeco_train.export.write_checksums", full)
        outcome = run_here(export.main, "run", "new")
    assert outcome.code != 0
    assert outcome.err == "error: new: cannot be written (No space left on device); name another OUT\n"
    for path in ("y" * 250, "run/../" + "y" * 250):
        outcome = run_here(export.main, "run", path)
        assert outcome.code != 0
        assert outcome.err.endswith(": cannot be written (File name too long); name another OUT\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_path_in_inaccessible_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "private" / "store").mkdir(parents=True)
    (tmp_path / "private").chmod(0o700)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.seteuid(65534)
            os.write(write, str(path_problem(tmp_path / "private" / "store")).encode())
        finally:
            # Never return into pytest, whatever happened.
            os._exit(0)
    os.close(write)
    os.wait()
    assert os.read(read, 1000).decode() == "cannot be looked up (Permission denied)"
    os.close(read)
