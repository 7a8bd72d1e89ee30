"""Data sets of the `datasets` library: its real loading paths on small local ones, and error messages."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet

from data import preparation
from data.prepare import main, prepare_store
from data.sources.hugging_face import RECIPES, Recipe, load_recipe, recipe_names
from data.store import TokenStore, read_meta
from tests.data.test_resume import Stopped, options, prepare_with_stops, stop_before
from tests.support.commands import check_line, run_here, snapshot
from tests.support.stores import documents
from zeco_train.errors import ConfigError

TEXTS = [f"document {index} " + "é" * (index % 50) for index in range(300)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the library's cache to a temporary folder."""
    import datasets  # late: every worker would import it at collection, for 2 s

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def write_rows(path: Path, kind: str, rows: list[dict[str, Any]], group: int = 30) -> None:
    """A file of this kind, whose suffix is added."""
    table, path = pyarrow.Table.from_pylist(rows), path.with_name(f"{path.name}.{kind}")
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=group)
    elif kind == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=17)
    else:
        compression = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd"}[kind]
        with pyarrow.output_stream(str(path), compression=compression) as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def write_dataset(folder: Path, kind: str, field: str = "text") -> Path:
    """A local data set in three files of this kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(3):
        part = TEXTS[index * 100 : index * 100 + 100]
        write_rows(folder / f"train-{index:05d}", kind, [{field: text, "id": i} for i, text in enumerate(part)])
    return folder


def prepare(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.few(3, quick=1)
@pytest.mark.parametrize("streaming", ["--streaming", "--no-streaming"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_local_dataset_is_prepared(tmp_path: Path, kind: str, streaming: str) -> None:
    folder = write_dataset(tmp_path / "corpus", kind)
    assert prepare("--dataset", folder, streaming, "--out", tmp_path / "store", "--workers", "1") == 0
    assert documents(tmp_path / "store") == TEXTS
    preparation_of = read_meta(tmp_path / "store").preparation
    assert (preparation_of["name"], preparation_of["split"]) == (str(folder), "train")
    # The same files, read without the library.
    assert prepare(folder, "--out", tmp_path / "plain", "--workers", "1") == 0
    assert documents(tmp_path / "plain") == TEXTS


def test_changed_dataset_is_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_dataset(tmp_path / "corpus", "parquet")
    arguments = ["--dataset", str(folder), "--streaming", "--out", str(tmp_path / "store")]
    arguments += ["--save-seconds", "0", "--workers", "1"]
    with monkeypatch.context() as patched:
        stop_before(patched, preparation._Preparation, "_take", 5)
        with pytest.raises(Stopped):
            prepare(*arguments)
    os.utime(folder / "train-00002.parquet", (1, 1))
    problem = "corpus: has changed since the interrupted preparation read it; give --over"
    check_line(run_here(main, *arguments), 3, problem)


def test_save_to_disk_dataset_is_prepared(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    rows.save_to_disk(tmp_path / "one")
    chosen = rows.select(range(0, 300, 7))
    datasets.DatasetDict(train=rows, validation=chosen).save_to_disk(tmp_path / "splits")
    assert prepare(tmp_path / "one", "--out", tmp_path / "store", "--workers", 1) == 0
    assert documents(tmp_path / "store") == TEXTS
    assert prepare(tmp_path / "splits", "--split", "validation", "--out", tmp_path / "held_out", "--workers", 1) == 0
    assert documents(tmp_path / "held_out") == TEXTS[::7]
    assert prepare("--dataset", tmp_path / "one", "--streaming", "--out", tmp_path / "again", "--workers", 1) == 0
    assert documents(tmp_path / "again") == TEXTS
    one, splits = str(tmp_path / "one"), str(tmp_path / "splits")
    outcome = run_here(main, splits, "--split", "test", "--out", str(tmp_path / "none"))
    check_line(outcome, 3, f"{splits}: no split 'test'; its splits: train, validation (--split)")
    outcome = run_here(main, one, splits, "--out", str(tmp_path / "none"))
    check_line(outcome, 3, "is a data set of save_to_disk, which stands alone")


@pytest.mark.parametrize("kind", ["link", "card", "card with an absolute path", "save_to_disk"])
def test_files_outside_of_a_data_set_are_refused(kind: str, tmp_path: Path) -> None:
    """The data set may be a stranger's, the file a private one."""
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["private"]})
    folder = tmp_path / "corpus"
    if kind == "save_to_disk":
        rows.save_to_disk(tmp_path / "home")
        rows.save_to_disk(folder)
        private = next((tmp_path / "home").glob("*.arrow"))
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"] = [{"filename": f"../home/{private.name}"}]
        (folder / "state.json").write_text(json.dumps(state))
    else:
        private = tmp_path / "private.parquet"
        rows.to_parquet(private)
        write_dataset(folder, "parquet")
    if kind == "link":
        (folder / "train-more.parquet").symlink_to(private)
    elif kind != "save_to_disk":
        named = "../private.parquet" if kind == "card" else private
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")
    outcome = run_here(main, "--dataset", str(folder), "--out", str(tmp_path / "store"))
    check_line(outcome, 3, f"is a file outside of the data set {folder}; put the file itself there")


@pytest.mark.few
@pytest.mark.parametrize("streaming", ["--streaming", "--no-streaming"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text-field", "body"], "no column 'body'; columns there: text, id; choose one with --text-field"),
        (["--text-field", "id"], "column 'id' holds int64, not text"),
        (["--split", "test"], "--config, --split, --data-dir and --data-files"),
        (["--config", "other"], "cannot be loaded (BuilderConfig 'other' not found. Available: ['default']); check"),
        (["--data-files", "no/*"], "cannot be loaded ("),
    ],
)
def test_invalid_dataset_options_print_one_error_line(
    tmp_path: Path, streaming: str, arguments: list[str], expected: str
) -> None:
    folder = str(write_dataset(tmp_path / "corpus", "parquet"))
    outcome = run_here(main, "--dataset", folder, streaming, *arguments, "--out", str(tmp_path / "store"))
    check_line(outcome, 3, f"{folder}: ", expected)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_truncated_file_is_reported(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "corpus", "jsonl.gz")
    path = folder / "train-00001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-40])
    for source in (["--dataset", str(folder), "--streaming"], [str(folder)]):
        check_line(
            run_here(main, *source, "--out", str(tmp_path / "store"), "--workers", "1"), 3, str(folder), "cannot be "
        )
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.slow
def test_names_that_the_hub_cannot_give_are_announced_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library tries for a minute to reach it."""
    from huggingface_hub import constants

    told = {
        "data set": (["--dataset", "a/b"], "--dataset=a/b: cannot be loaded (gone); check the name"),
        "tokenizer": (
            ["a.txt", "--tokenizer", "a/b"],
            "--tokenizer=a/b: transformers cannot load a tokenizer from it (gone); give",
        ),
    }
    for offline, (arguments, line) in itertools.product((False, True), told.values()):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with (
            mock.patch("transformers.AutoTokenizer.from_pretrained", side_effect=OSError("gone")),
            mock.patch("datasets.load_dataset_builder", side_effect=OSError("gone")),
        ):
            assert prepare(*arguments, "--out", tmp_path / "store") == 3
        *announced, error = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: {line}")
        assert [text.startswith("asking the Hugging Face hub for a/b (") for text in announced] == [True] * (
            not offline
        )
        assert not (tmp_path / "store").exists()
    # The library itself, without a network.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert prepare("--recipe", "pg19", "--tokenizer", "bytes", "--out", tmp_path / "store") == 3
    error = capsys.readouterr().err
    assert error.startswith("error: --dataset=emozilla/pg19: cannot be loaded (")
    assert "check the name and the network" in error


# File kind and columns of each recipe's data set.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "slimpajama": ("jsonl.zst", {"text": "", "meta": {"redpajama_set_name": "RedPajamaC4"}}),
    "common_pile": ("jsonl.gz", {"id": "1", "text": "", "source": "x", "metadata": {"license": "CC0"}}),
    "stack_v2_edu": ("jsonl.gz", {"id": "1", "text": "", "source": "x", "metadata": {"license": "MIT"}}),
    "fineweb_edu": (
        "parquet",
        dict.fromkeys(("text", "id", "dump", "url", "file_path", "language"), "x")
        | dict.fromkeys(("language_score", "score"), 0.9)
        | dict.fromkeys(("token_count", "int_score"), 3),
    ),
    "pg19": ("parquet", {"short_book_title": "x", "publication_date": 1880, "url": "x", "text": ""}),
    "starcoderdata": (
        "parquet",
        {"max_stars_repo_path": "a.py", "max_stars_repo_name": "x", "max_stars_count": 1, "id": "1", "content": ""},
    ),
}


def write_like(folder: Path, name: str, recipe: Recipe) -> list[str]:
    """Write a local data set with the layout, columns and file kind of a recipe's; returns its documents."""
    kind, row = SHAPES[name]
    place = folder / (recipe.data_dir or ("sample/10BT" if recipe.config else "data"))
    place.mkdir(parents=True)
    if recipe.config:
        configs = [{"config_name": recipe.config, "data_files": [{"split": "train", "path": "sample/10BT/*"}]}]
        (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    texts = [f"{name} {index} " + "word " * (index % 9) for index in range(120)]
    for number in range(2):
        rows = [{**row, recipe.text_field: text} for text in texts[number * 60 : number * 60 + 60]]
        write_rows(place / f"train-{number}", kind, rows, group=25)
    return texts


def test_recipes_are_complete_and_tested() -> None:
    assert sorted(SHAPES) == recipe_names()
    required = {"description", "homepage", "licence", "size", "dataset", "split", "text_field", "tokenizer"}
    for name in SHAPES:
        recipe = load_recipe(name)
        given = OmegaConf.load(RECIPES / f"{name}.yaml")
        assert required | {"min_tokens", "validation_fraction", "streaming"} <= set(given), name
        assert recipe.homepage.endswith(recipe.dataset), name
        assert recipe.streaming, name


QUICK = {"fineweb_edu", "slimpajama"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SHAPES]
)
def test_recipe_prepares_data_of_its_schema(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its loading path reads data with its columns."""
    recipe = load_recipe(name)
    texts = write_like(tmp_path / "corpus", name, recipe)
    arguments = ["--recipe", name, "--dataset", tmp_path / "corpus", "--tokenizer", "bytes", "--workers", "1"]
    flags = ["--validation-fraction", "0.1"] if recipe.validation_fraction else []
    assert prepare(*arguments, *flags, "--out", tmp_path / "store") == 0, capsys.readouterr().err
    held_out = documents(tmp_path / "store" / "validation") if recipe.validation_fraction else []
    assert documents(tmp_path / "store") + held_out == texts
    recorded = TokenStore.open(tmp_path / "store").meta.preparation
    assert (recorded["recipe"], recorded["licence"]) == (name, recipe.licence)


def test_user_recipe_is_prepared_or_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "corpus", "parquet", field="body")
    values = {"description": "d", "homepage": "h", "licence": "l", "size": "s", "dataset": str(folder)}
    (tmp_path / "mine.yaml").write_text(json.dumps({**values, "tokenizer": "bytes", "text_field": "body"}))
    flags = ["--min-tokens", "40", "--workers", 1]
    assert prepare("--recipe", tmp_path / "mine.yaml", "--out", tmp_path / "store", *flags) == 0
    assert documents(tmp_path / "store") == [text for text in TEXTS if len(text.encode()) >= 40]
    for text, expected in [
        (json.dumps({**values, "tokenizer": "bytes", "min_tokens": "many"}), "'many'"),
        (json.dumps({**values, "tokenizer": "bytes", "text_feild": "body"}), "text_feild"),
        ("dataset: [a\n b: c: d", "expected ',' or ']', but got ':'"),
        ("- dataset", "not a mapping"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        check_line(run_here(main, "--recipe", str(tmp_path / "bad.yaml"), "--out", str(tmp_path / "none")), 2, expected)
    (tmp_path / "less.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="tokenizer"):
        load_recipe(str(tmp_path / "less.yaml"))
    outcome = run_here(main, "--recipe", "the_pile", "--out", str(tmp_path / "none"))
    check_line(outcome, 2, f"--recipe=the_pile: allowed: {', '.join(recipe_names())}, or the path of")


@pytest.mark.parametrize(
    ("kind", "streaming", "workers"),
    [
        pytest.param("parquet", True, 1, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in (("jsonl.gz", True, 2), ("parquet", False, 1))),
    ],
)
def test_workers_and_interruptions_do_not_change_the_store(
    kind: str, streaming: bool, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation that stops after every few parts and is resumed gives the same bytes as one without a stop."""
    folder = write_dataset(tmp_path / "corpus", kind)
    spec = preparation.DatasetSpec(str(folder), streaming=streaming)
    changes = {"sources": (), "dataset": spec, "min_tokens": 20, "shard_tokens": 2000, "part_characters": 2500}
    some = replace(options(folder, tmp_path / "unbroken"), unit_bytes=4000, **changes)
    prepare_store(some)
    again = replace(some, out=tmp_path / "store", workers=workers)
    assert prepare_with_stops(again, monkeypatch, 2) > 2
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "unbroken")
    kept = documents(tmp_path / "store") + documents(tmp_path / "store" / "validation")
    assert kept == [text for text in TEXTS if len(text.encode()) >= 20]
