"""Untrusted tokenizers: their code never runs, and no file outside their folder is read, kept or exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from data.preparation import PrepareOptions, prepare_store
from data.tokenizer import load_tokenizer, tokenizer_name
from tests.support.commands import Outcome, run_here, train_here
from tests.support.stores import edit_json, write_lines, write_word_tokenizer
from zeco_train import export as export_command
from zeco_train.errors import DataError
from zeco_train.generate import __main__ as generate_command

SECRET = "-----BEGIN PRIVATE KEY-----"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store with its own copy of a Hugging Face tokenizer."""
    folder = tmp_path_factory.mktemp("stranger")
    source = write_lines(folder / "text.jsonl", [{"text": "w1 w2 w3 w4 " * 100}])
    tokenizer = str(write_word_tokenizer(folder / "tokenizer", eos_token="</s>"))
    prepare_store(PrepareOptions((source,), folder / "store", tokenizer=tokenizer))
    return folder / "store"


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "store"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def _train(store: Path, run: Path) -> Outcome:
    options = ["model.vocab_size=12", "train.steps=1", "checkpoint.every=1"]
    return train_here(f"run_dir={run}", "data=tokens", f"data.path={store}", *options)


def _holds_secret(folder: Path) -> bool:
    return any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def _add_code(folder: Path, marker: Path) -> None:
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine:\n    pass\n")
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_custom_tokenizer_code_never_runs(own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on stdin; even if the answer is yes, no code runs."""
    _add_code(own_store / "tokenizer", marker := tmp_path / "code_ran")
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(DataError, match="needs code of its own, which is never run"):
        load_tokenizer(str(own_store / "tokenizer"))
    assert not marker.exists()
    assert questions == []


@pytest.mark.slow
def test_run_and_export_hold_only_tokenizer_files_and_no_code(own_store: Path, secret: Path, tmp_path: Path) -> None:
    names, run = ("notes.txt", ".hidden", "id_rsa", "README.md"), tmp_path / "run"
    for name in names:
        (own_store / "tokenizer" / name).symlink_to(secret)
    assert _train(own_store, run).code == 0
    assert {path.name for path in (run / "tokenizer").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    # Runs of older versions may hold more files.
    for name in names:
        (run / "tokenizer" / name).write_text(SECRET)
    outcome = run_here(export_command.main, str(run), str(tmp_path / "out"))
    assert outcome.code == 0, outcome.err
    assert not _holds_secret(tmp_path / "out")
    _add_code(run / "tokenizer", marker := tmp_path / "code_ran")
    for outcome in (
        run_here(export_command.main, str(run), str(tmp_path / "another")),
        run_here(generate_command.main, str(run), "--prompt", "w1", "--max-tokens", "2"),
    ):
        assert outcome.code == 3
        assert len(outcome.errors) == 1
        assert "the tokenizer needs code of its own, which is never run" in outcome.errors[0]
    assert not marker.exists()
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "additional_chat_templates/a.jinja"])
def test_run_refuses_tokenizer_file_linked_outside_store(
    name: str, own_store: Path, secret: Path, tmp_path: Path
) -> None:
    link = own_store / "tokenizer" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret)
    outcome = _train(own_store, tmp_path / "run")
    assert outcome.code == 3
    assert outcome.errors == [f"{link}: is a link out of its folder; it is not followed; put the file itself there"]
    assert not _holds_secret(tmp_path / "run")


def test_tokenizer_folder_linked_outside_store_is_refused(own_store: Path, tmp_path: Path) -> None:
    shutil.move(own_store / "tokenizer", tmp_path / "private")
    (own_store / "tokenizer").symlink_to(tmp_path / "private")
    with pytest.raises(DataError, match="is a link to another place; it is not followed; put the folder itself there"):
        tokenizer_name({"kind": "huggingface", "path": ""}, own_store)
    assert _train(own_store, tmp_path / "run").code == 3


def test_dangling_tokenizer_link_is_reported(own_store: Path, tmp_path: Path) -> None:
    link = own_store / "tokenizer" / "added_tokens.json"
    link.symlink_to("gone.json")
    outcome = _train(own_store, tmp_path / "run")
    assert outcome.code == 3
    assert outcome.errors == [f"{link}: is a link to a file that is not there; put the file itself there"]


@pytest.mark.few
@pytest.mark.parametrize("kind", ["outside", "/dev/zero", "fifo", "loop", "folder", "huge"])
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab_file", "tekken.json", "config.json"])
def test_load_refuses_non_regular_or_outside_files(kind: str, name: str, own_store: Path, tmp_path: Path) -> None:
    """Also files that transformers finds by a pattern; nothing blocks on a FIFO or reads /dev/zero to the end."""
    path = own_store / "tokenizer" / name
    if path.exists():
        path.rename(tmp_path / name)
    else:
        (tmp_path / name).write_text("{}")
    make = {
        "outside": lambda: path.symlink_to(tmp_path / name),
        "/dev/zero": lambda: path.symlink_to("/dev/zero"),
        "fifo": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(name),
        "folder": path.mkdir,
        "huge": lambda: (path.touch(), os.truncate(path, 1 << 40)),
    }
    make[kind]()
    problem = {
        "fifo": "is not a regular file",
        "folder": "is not a regular file",
        "loop": "is a link that leads back to itself",
        "huge": "has 1,099,511,627,776 bytes; files of a tokenizer have at most 268,435,456",
    }.get(kind, "is a link out of its folder")
    with pytest.raises(DataError, match=f"{name}: {problem}"):
        load_tokenizer(str(path.parent))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            '{"fast_tokenizer_files": ["../../tokenizer.4.0.json"]}',
            "fast_tokenizer_files may only name files beside it",
        ),
        ('{"fast_tokenizer_files": {"a": 1}}', "fast_tokenizer_files may only name files beside it"),
        ('{"init_inputs": ["/etc/passwd"]}', "init_inputs names files to read"),
        ('{"gguf_file": "/etc/passwd"}', "gguf_file names files to read"),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ("[]", "not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_tokenizer_settings_naming_other_files_are_refused(settings: str, problem: str, own_store: Path) -> None:
    (own_store / "tokenizer" / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=problem):
        load_tokenizer(str(own_store / "tokenizer"))


def test_single_tokenizer_file_must_be_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="is not a regular file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_links_inside_the_folder_are_followed(own_store: Path) -> None:
    folder = own_store / "tokenizer"
    (folder / "tokenizer.json").rename(folder / "shared.json")
    (folder / "tokenizer.json").symlink_to("shared.json")
    assert load_tokenizer(str(folder)).encode(["w7"])[0].tolist() == [9]


@pytest.mark.slow
def test_hub_cache_snapshot_is_copied_as_files(store: Path, tmp_path: Path) -> None:
    """The snapshot has links to ../../blobs; the store and the run get regular files."""
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(store / "tokenizer", cache / "blobs")
    for path in (cache / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    source = write_lines(tmp_path / "text.jsonl", [{"text": "w1 w2 w3 w4 " * 100}])
    prepare_store(PrepareOptions((source,), tmp_path / "store", tokenizer=str(snapshot)))
    assert _train(tmp_path / "store", tmp_path / "run").code == 0
    for folder in (tmp_path / "store", tmp_path / "run"):
        assert not any(path.is_symlink() for path in (folder / "tokenizer").iterdir())
        assert load_tokenizer(str(folder / "tokenizer")).encode(["w7"])[0].tolist() == [9]
    (cache / "blobs" / "vocab.txt").symlink_to("/etc/passwd")
    (snapshot / "vocab.txt").symlink_to("../../blobs/vocab.txt")
    with pytest.raises(DataError, match="is a link out of its folder"):
        load_tokenizer(str(snapshot))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "transformers cannot load a tokenizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}, "cannot encode a text"),
        (
            {
                "model": {"type": "WordLevel", "vocab": {"</s>": 0, "w": 1}, "unk_token": "w"},
                "decoder": {"type": "Strip", "content": "w", "start": 100, "stop": 100},
                "added_tokens": [],
            },
            "cannot decode its ids",
        ),
    ],
)
def test_tokenizers_library_panic_raises_data_error(parts: dict[str, object], problem: str, own_store: Path) -> None:
    edit_json(own_store / "tokenizer" / "tokenizer.json", **parts)
    with pytest.raises(DataError, match=problem):
        _round_trip(own_store / "tokenizer")


def _round_trip(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.decode(tokenizer.encode(["w"])[0])
