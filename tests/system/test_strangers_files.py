"""Untrusted stores, runs and exports: never executed, read within bounds, shown without terminal escapes."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from data import inspect
from data.sources.hugging_face import DatasetSpec, open_dataset
from data.store import TokenStore, is_store, map_array, read_meta
from data.store.writer import StoreWriter
from data.tokenizer import ByteTokenizer, load_tokenizer, tokenizer_name
from tests.support.commands import run_here
from tests.support.stores import edit_json, write_store
from zeco_train.bench.figures import plot_files
from zeco_train.checkpoint.files import read_record
from zeco_train.config.schema import read_config
from zeco_train.errors import CheckpointError, ConfigError, DataError
from zeco_train.generate.__main__ import Printer
from zeco_train.generate.generator import Completion
from zeco_train.hf.folder import stored_weights
from zeco_train.lifecycle.logs import close_logging, setup_logging
from zeco_train.report.__main__ import write_report
from zeco_train.system.figures import label_axes, new_figure, plain, save_figure
from zeco_train.system.small_files import parse_json, read_json, read_small
from zeco_train.system.terminal import visible
from zeco_train.tracking.metrics import read_metrics
from zeco_train.tracking.run_folder import read_identity

# Sets the window title and, on terminals that answer, injects input into the shell.
ESCAPE = "\x1b]0;title\x07\x9b2J\u202e"
SHOWN = r"\x1b]0;title\x07\x9b2J\u202e"

READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "meta.json": (read_meta, "meta.json"),
    "identity.json": (read_identity, "identity.json"),
    "config.json": (lambda folder: read_record(folder / "config.json"), "config.json"),
    "metrics.jsonl": (lambda folder: read_metrics(folder / "metrics.jsonl"), "metrics.jsonl"),
    "config.yaml": (lambda folder: read_config(folder / "config.yaml"), "config.yaml"),
}
REFUSED = (DataError, CheckpointError, ConfigError)


def _link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, _link_to_zero])
@pytest.mark.parametrize("name", READERS)
def test_readers_refuse_fifos_and_endless_devices(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / name)
    read, shown = READERS[name]
    with pytest.raises(REFUSED, match=f"{shown}: cannot be read.*not a regular file"):
        read(tmp_path)
    assert not is_store(tmp_path)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"step": ' + "9" * 4300 + "}"])
@pytest.mark.parametrize("name", READERS)
def test_deep_nesting_and_huge_numbers_give_short_errors(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text + "\n")
    read, shown = READERS[name]
    with pytest.raises(REFUSED, match=shown) as raised:
        read(tmp_path)
    # Not `line`, which joins lines.
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_json_is_read_through_symlink_and_to_a_depth(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"step": [1, {"x": null}]}')
    (tmp_path / "b.json").symlink_to("a.json")
    assert read_json(tmp_path / "b.json") == {"step": [1, {"x": None}]}
    assert parse_json("[" * 31 + "[]" + "]" * 31) is not None
    assert parse_json('"text"') == "text"
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        with pytest.raises(ValueError, match="nested deeper than 32 levels"):
            parse_json(opening * 33 + "1" + closing * 33)


def test_sockets_folders_missing_files_and_loops_raise_os_errors(tmp_path: Path) -> None:
    os.mknod(tmp_path / "socket", 0o140644)
    (tmp_path / "loop").symlink_to("loop")
    kinds = {".": IsADirectoryError, "missing": FileNotFoundError, "loop": OSError, "socket": OSError}
    for name, kind in kinds.items():
        with pytest.raises(kind):
            read_small(tmp_path / name)


def test_file_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert len(read_small(tmp_path / "a", largest=100)) == 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        read_small(tmp_path / "a", largest=99)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 67,108,864 bytes"):
        read_small(tmp_path / "sparse")


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "words",
            ["bytes"],
            5,
            {"kind": 5},
            {"kind": "huggingface", "path": ["a"]},
            {"kind": "bytes", "sha256": None},
        ),
        *({"kind": "huggingface", "path": "x" * 5000}, {"kind": {"a": "x" * 5000}}, {"x" * 5000: "bytes"}),
        *({"kind": "huggingface", "path": path} for path in ("x" * 300, "", "\0", "\ud800")),
    ],
)
def test_tokenizer_entries_of_strangers_give_short_errors(entry: object, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    edit_json(store / "meta.json", tokenizer=entry)
    (store / "identity.json").write_text(json.dumps({"format": 2, "data.tokenizer": entry}))
    for read in (lambda: read_meta(store).tokenizer, lambda: read_identity(store)["data.tokenizer"]):
        with pytest.raises((DataError, CheckpointError)) as raised:
            load_tokenizer(tokenizer_name(read(), store))
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500


def _npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)


def _archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(1))
    return file.getvalue()


@pytest.mark.parametrize(
    "contents",
    [
        _npy("-" * 9000 + "1"),
        _npy("(" * 9000),
        _npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({10**30},)}}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (True,)}"),
        _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
        _npy("__import__('os').system('exit')"),
        _archive(),
        b"\x80\x04N.",
        b"",
    ],
)
def test_damaged_offsets_are_refused(contents: bytes, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    (store / "doc_offsets.npy").write_bytes(contents)
    with pytest.raises(DataError, match=r"doc_offsets.npy: cannot be read"):
        TokenStore.open(store)


@pytest.mark.parametrize("make", [os.mkfifo, _link_to_zero])
def test_arrays_and_weights_must_be_regular_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged: not a regular file"):
        stored_weights(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        map_array(tmp_path / "model.safetensors")


@pytest.mark.slow
def test_dataset_script_is_not_executed(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "texts.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "a.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(DataError, match="Dataset scripts are no longer supported"):
        open_dataset(DatasetSpec(str(folder)), "text")
    assert not (tmp_path / "ran").exists()


def _results(case: str, **changes: object) -> dict[str, Any]:
    row = {"model": "m", "heads": 2, "tokens": 64, "context": 64, "batch": 1, "variant": "zeco", "runs": 1}
    row |= {"median_ms": 2.0, "p10_ms": 1.0, "p90_ms": 3.0, "memory_gb": 1.0}
    row |= {"tokens_per_second": 1e3, "tokens_per_second_per_gpu": 1e3, **changes}
    config = {"strategy": "zero2", "segments": 1, "dtype": "bf16"}
    return {"case": case, "world_size": 1, "environment": {}, "config": config, "rows": [row]}


@pytest.mark.parametrize("name", ["../../x", "/dev/null/x", "..", "", "a\0b", "\ud800"])
@pytest.mark.parametrize("column", ["model", "variant"])
def test_names_in_results_that_lead_out_of_a_folder_are_refused(column: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "in" / "results.json"
    file.parent.mkdir()
    file.write_text(json.dumps(_results("model", **{column: name})))
    for command in (
        lambda: plot_files([str(file), f"out={tmp_path / 'in' / 'out'}"]),
        lambda: write_report([file], tmp_path / "in" / "out", "title"),
    ):
        with pytest.raises(DataError, match=f"row 1: {column} is .*, not a plain name without /; measure again"):
            command()
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "results.json"]


@pytest.mark.slow
def test_report_draws_benchmarks_of_files_named_like_parent_folders(tmp_path: Path) -> None:
    """`...json` without its suffix is `..`."""
    (tmp_path / "...json").write_text(json.dumps(_results("model")))
    with mock.patch("tempfile.tempdir", str(tmp_path)):
        write_report([tmp_path / "...json"], tmp_path / "out", "title")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["...json", "out"]


@pytest.mark.parametrize("case", ["decode", pytest.param("model", marks=pytest.mark.slow)])
def test_results_of_unknown_variants_and_infinite_numbers_are_drawn(case: str, tmp_path: Path) -> None:
    """Nor is a variant's name a formula."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps(_results(case, variant=r"another:$\frac$", tokens_per_second=math.inf)))
    assert len(plot_files([str(file)])) == 1


@pytest.mark.parametrize(
    ("case", "column"),
    [("decode", "tokens_per_second"), ("decode", "memory_gb"), ("model", "tokens_per_second_per_gpu")],
)
def test_results_without_a_drawn_column_are_refused(case: str, column: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(_results(case, **{column: None})))
    with pytest.raises(DataError, match=rf"results\.json: row 1: lacks {column}; measure again"):
        plot_files([str(file)])


@pytest.mark.parametrize(
    ("case", "column", "value"),
    [("model", "p10_ms", 0), ("model", "p90_ms", 0), ("operator", "p90_ms", math.inf), ("collectives", "size_mb", -1)],
)
def test_results_that_no_axis_can_show_are_refused(case: str, column: str, value: float, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    row = {"size_mb": 1, "mode": "eager", "key_dim": 64, "value_dim": 64, "pass": "forward_backward", column: value}
    file.write_text(json.dumps(_results(case, **row)))
    with pytest.raises(DataError, match=f"row 1: {column} is {value}, not a finite number > 0"):
        write_report([file], tmp_path / "out", "title")


def test_errors_escape_control_characters() -> None:
    assert DataError(f"a{ESCAPE}", "is bad").line == f"error: a{SHOWN}: is bad"
    assert ConfigError("name", f"{ESCAPE}\n\tx", "no").line == f"error: name={SHOWN} x: no"


def test_visible_escapes_only_control_characters() -> None:
    text = "tab\tline\r\nnaïve שלום 日本語 👩‍🚀 ‏‎"
    assert visible(text) == text
    assert visible("a\rb") == r"a\rb"


def test_inspect_escapes_control_characters(tmp_path: Path) -> None:
    """In the text and in the provenance of meta.json."""
    ids = ByteTokenizer().encode([f"text {ESCAPE} text\nsecond line"])[0]
    with StoreWriter(tmp_path / "store", vocab_size=259, eos_id=1, tokenizer={"kind": "bytes"}) as writer:
        writer.append(np.append(ids, ByteTokenizer.eos_id), [len(ids) + 1])
        writer.finish("sources")
    meta = json.loads((tmp_path / "store" / "meta.json").read_text())
    meta["tokenizer"]["path"], meta["preparation"] = ESCAPE, {"dataset": ESCAPE, "sources": [ESCAPE]}
    (tmp_path / "store" / "meta.json").write_text(json.dumps(meta))
    outcome = run_here(lambda arguments: inspect.main(arguments), str(tmp_path / "store"))
    assert outcome.code == 0, outcome.err
    assert outcome.out.count(SHOWN) == 4
    assert visible(outcome.out) == outcome.out
    assert "             | second line" in outcome.out.splitlines()


def test_export_errors_escape_control_characters(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from zeco_train.evaluate import __main__ as evaluate

    (tmp_path / "config.json").write_text(json.dumps({"model_type": f"gla{ESCAPE}", "architectures": [ESCAPE]}))
    save_file({ESCAPE: np.zeros(1)}, tmp_path / "model.safetensors")
    outcome = run_here(evaluate.main, str(tmp_path))
    assert outcome.code != 0
    assert len(outcome.errors) == 1
    assert SHOWN in outcome.err
    assert ESCAPE not in outcome.err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "expected"), [(_Terminal(), SHOWN), (io.StringIO(), ESCAPE)])
def test_generated_text_is_escaped_on_terminals_only(out: io.StringIO, expected: str) -> None:
    """Files and pipes get the text unchanged."""
    printer = Printer(1, 1, out)
    printer.emit(0, 0, f"text\t{ESCAPE}\n", True)
    printer.finish([Completion(0, 0, f"text\t{ESCAPE}\n", [], "limit")])
    assert out.getvalue() == f"text\t{expected}\n"


def test_logs_escape_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = setup_logging(tmp_path, 0)
    logging.getLogger("zeco_train.test").warning("of %s", ESCAPE)
    close_logging()
    assert f"of {SHOWN}" in path.read_text()
    assert capsys.readouterr().err == f"warning: of {SHOWN}\n"


def test_texts_of_figures_reach_no_terminal(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """matplotlib warns of a character without a glyph by printing it."""
    figure = new_figure("\x1b]0;title\x07", (3, 2), dpi=50, title_size=8)
    axes = figure.subplots()
    axes.plot([1, 2], [1, 2], label="\x9b2J")
    label_axes(axes, "of \udcff", "\x1b[2J", "y")
    axes.set_yticks([1, 2], [plain("\x1bc"), "two"])
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert not [str(warning.message) for warning in recwarn.list]
