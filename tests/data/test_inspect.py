"""`python -m data.inspect`: its report on intact stores, and the shard it names in damaged ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.inspect import draw_lengths, main
from data.prepare import PrepareOptions, prepare_store
from data.store import META_FILE, TokenStore, shard_name
from tests.data.test_prepare import QUOTING, control_tokens, hugging_face
from tests.support.commands import check_line, run_here
from tests.support.stores import edit_json, write_lines

__all__ = ["control_tokens", "hugging_face"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    texts = [f"text {index}: " + "Ähnlich. " * (index * index) for index in range(60)]
    source = write_lines(folder / "texts.jsonl", [{"text": text} for text in texts])
    options = PrepareOptions((source,), folder / "store", validation_fraction=0.1, shard_tokens=100_000)
    prepare_store(options)
    return folder / "store"


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "store")


def test_inspect_reports_intact_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(store), "--document", "3"]) == 0
    printed = capsys.readouterr()
    opened = TokenStore.open(store)
    assert printed.out.startswith(f"{store}: 58 documents, {opened.num_tokens:,} tokens of uint16\n")
    assert f"shards       {opened.num_shards}, of up to 100,000 tokens" in printed.out
    assert "made with    text_field=text" in printed.out
    assert "| text 3: " + "Ähnlich. " * 9 in printed.out
    assert re.search(r"lengths      9 to [\d,]+ tokens, mean [\d,]+; 50% ≤ [\d,]+, 90% ≤", printed.out)
    shards = opened.num_shards + TokenStore.open(store / "validation").num_shards
    assert re.search(
        rf"integrity    {shards} shards, offsets and ends of documents are as prepared: .*B/s\)", printed.out
    )
    assert printed.err == ""
    # The store itself is unchanged.
    assert TokenStore.open(store).meta == opened.meta
    assert sorted(path.name for path in store.parent.iterdir()) == ["store"]
    assert main([str(store), "--quick", "--png", str(store.parent / "lengths.png")]) == 0
    assert f"histogram    {store.parent / 'lengths.png'}\n" in capsys.readouterr().out
    assert (store.parent / "lengths.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_documents_are_decoded_with_tokenizer_of_store(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(hugging_face / "whole", tmp_path / "tokenizer")
    source = write_lines(tmp_path / "a.jsonl", [{"text": "w7 w70000 w5"}, {"text": "w1 w2 w3 w4"}])
    prepare_store(PrepareOptions((source,), tmp_path / "store", tokenizer=str(copy), validation_fraction=0.6))
    shutil.rmtree(copy)  # the store has its own copy
    assert main([str(tmp_path / "store"), "--document", "0"]) == 0
    assert "| w7 w70000 w5 </s>" in capsys.readouterr().out
    assert main([str(tmp_path / "store" / "validation"), "--document", "0"]) == 0
    assert "| w1 w2 w3 w4 </s>" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "store" / "tokenizer")
    assert main([str(tmp_path / "store"), "--document", "0"]) == 0
    assert f"| [9, 70002, 7, 1] … (not decoded: {copy}: no such tokenizer" in capsys.readouterr().out


@pytest.mark.slow
def test_control_ids_inside_documents_are_counted(
    control_tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store = write_lines(tmp_path / "a.jsonl", [{"text": QUOTING}] * 3), tmp_path / "store"
    for rule, found in (("text", "none"), ("ids", "</s> 6, <pad> 3")):
        options = PrepareOptions((source,), store, tokenizer=str(control_tokens), overwrite=True, control_strings=rule)
        prepare_store(replace(options, validation_fraction=0.4))
        assert main([str(store)]) == 0
        assert f"control ids  inside documents: {found}; control strings: {rule}\n" in capsys.readouterr().out
    # A store of an earlier version, without its tokenizer.
    meta = json.loads((store / META_FILE).read_text())
    del meta["preparation"]["control_strings"]
    (store / META_FILE).write_text(json.dumps(meta | {"tokenizer": {"kind": "huggingface", "path": "gone"}}))
    shutil.rmtree(store / "tokenizer")
    assert main([str(store)]) == 0
    printed = capsys.readouterr().out
    assert "inside documents: end of sequence 6 (not counted: others, since" in printed
    assert "; control strings: unknown\n" in printed


def change_bytes(path: Path, change: Callable[[bytearray], object]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def flip(store: Path) -> str:
    path = change_bytes(store / shard_name(2), lambda data: data.__setitem__(8002, data[8002] ^ 1))
    return f"{path}: its contents differ from what was prepared; copy the store again or prepare it again"


def beyond(store: Path) -> str:
    return f"{change_bytes(store / shard_name(1), lambda data: data.__setitem__(slice(10, 12), bytes([231, 3])))}"


def missing(store: Path) -> str:
    (store / shard_name(2)).unlink()
    return f"{store / shard_name(2)}: cannot be read (No such file or directory)"


def truncated(store: Path) -> str:
    return f"{change_bytes(store / shard_name(2), lambda data: data.pop())}: truncated: "


def in_validation(store: Path) -> str:
    path = change_bytes(store / "validation" / shard_name(0), lambda data: data.__setitem__(0, data[0] ^ 1))
    return f"{path}: its contents differ from what was prepared"


def other_offsets(store: Path) -> str:
    """Offsets with valid count and range: only their digest shows the damage."""
    offsets = np.load(path := store / "doc_offsets.npy")
    offsets[10] -= 1
    np.save(path, offsets)
    return f"{path}: its contents differ from what was prepared"


@pytest.mark.parametrize("damage", [flip, beyond, missing, truncated, in_validation, other_offsets])
def test_damaged_store_is_reported(damage: Callable[[Path], str], store: Path) -> None:
    expected = damage(store)
    check_line(run_here(main, str(store)), 3, expected)
    if damage is flip:
        quick = run_here(main, str(store), "--quick")
        assert quick.code == 0
        assert "the shards were not read (--quick)" in quick.out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"eos_id": 2}, "tokens-00000.bin: document 0 does not end with the end-of-sequence id 2; copy the"),
        ({"vocab_size": 150}, "has ids below 150; copy the"),
    ],
)
def test_tokens_inconsistent_with_meta_are_reported(store: Path, change: dict[str, int], expected: str) -> None:
    """Digests match, but the store was prepared wrongly, or meta.json belongs to another store."""
    edit_json(store / META_FILE, **change)
    check_line(run_here(main, str(store), "--sample-tokens", "1"), 3, expected)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["none"], 3, "none: no such token store"),
        (["store", "--document", "58"], 2, "--document=58: allowed: 0 to 57"),
        (["store", "--document", "x"], 2, "argument --document: invalid int value: 'x'"),
        (["store", "--png", "none/x.png"], 2, "--png=none/x.png: its folder does not exist"),
        (["store", "--png", "x.nope"], 3, "x.nope: cannot be written ("),
    ],
)
def test_invalid_arguments_print_one_error_line(
    arguments: list[str], code: int, expected: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    check_line(run_here(main, *arguments), code, expected)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1, 10**9], [5, 5, 5]])
def test_histogram_of_any_document_lengths(tmp_path: Path, lengths: list[int]) -> None:
    draw_lengths(np.array(lengths, dtype=np.int64), tmp_path / "a", "a store")
    assert (tmp_path / "a").read_bytes().startswith(b"\x89PNG")
