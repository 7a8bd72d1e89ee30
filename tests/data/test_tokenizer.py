"""Tokenizers of transformers: exactly tokenizer.json encodes, whatever class or model lies beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, processors, trainers
from tokenizers import pre_tokenizers as split

from data import prepare
from data.config import DataConfig, DataKind, StoreConfig
from data.loader.opening import open_data
from data.preparation import PrepareOptions, prepare_store
from data.store import read_meta
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.support.commands import check_line, run_here
from zeco_train.errors import ConfigError, DataError

TEXT = "hello world, we need to add 9123 and 6\n\n    indented code(x) = y\n\n\nend\n"
SETTINGS = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}


def byte_pairs(*splits: split.PreTokenizer) -> tokenizers.Tokenizer:
    """Of bytes after the given splits, with a template that begins a text with <s> unless it is told not to."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = split.Sequence([*splits, split.ByteLevel(add_prefix_space=False, use_regex=not splits)])
    found.decoder = decoders.ByteLevel()
    alphabet, special = split.ByteLevel.alphabet(), ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    found.train_from_iterator([TEXT] * 20, trainer)
    found.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    found.enable_truncation(8)
    return found


def folder_of(raw: tokenizers.Tokenizer, folder: Path, model_type: str | None = None, **settings: Any) -> Path:
    """A folder as on the hub."""
    folder.mkdir(parents=True)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


LINES = (split.Split(Regex(r"\n+"), "isolated"), split.Digits(individual_digits=True))
BESIDE: list[tuple[tuple[split.PreTokenizer, ...], dict[str, str]]] = [
    (LINES, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    # transformers 5.23 builds other pre-tokenizers for all of these.
    (LINES, {"tokenizer_class": "GPT2Tokenizer"}),
    (LINES, {"model_type": "gpt2"}),
    (LINES, {"model_type": "mamba2"}),
    (LINES[1:], {"tokenizer_class": "PreTrainedTokenizerFast", "model_type": "qwen2"}),
    ((), {"tokenizer_class": "CodeLlamaTokenizer"}),
    ((), {"tokenizer_class": "GemmaTokenizerFast"}),
]


@pytest.mark.parametrize(("splits", "beside"), BESIDE)
def test_file_alone_decides_ids_digest_and_what_is_saved(
    splits: tuple[split.PreTokenizer, ...], beside: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    raw = byte_pairs(*splits)
    tokenizer = HuggingFaceTokenizer(str(folder_of(raw, tmp_path / "hub", **beside)))
    raw.no_truncation()
    ids = raw.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.encode([TEXT])[0].tolist() == ids
    assert (tokenizer.decode(tokenizer.encode([TEXT])[0]), tokenizer.eos_id) == (TEXT, 2)
    plain = HuggingFaceTokenizer(str(folder_of(raw, tmp_path / "plain", tokenizer_class="TokenizersBackend")))
    assert plain.info["sha256"] == tokenizer.info["sha256"]

    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "gla"}')
    assert HuggingFaceTokenizer(str(tmp_path / "saved")).info["sha256"] == tokenizer.info["sha256"]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded(TEXT)["input_ids"] == ids
    assert (loaded.eos_token_id, loaded.bos_token, len(loaded)) == (2, None, tokenizer.vocab_size)
    assert tokenizer.is_built_from(tmp_path / "saved")
    # By default, this one begins a text with <s>, if it does not also split it elsewhere.
    assert not tokenizer.is_built_from(tmp_path / "hub")


def test_tokens_that_the_file_lacks_are_not_added(tmp_path: Path) -> None:
    """transformers would give them ids after the file's own."""
    settings = {"pad_token": "[PAD]", "additional_special_tokens": ["<|user|>"], "tokenizer_class": "TokenizersBackend"}
    raw = byte_pairs()
    tokenizer = HuggingFaceTokenizer(str(folder_of(raw, tmp_path / "hub", **settings)))
    assert tokenizer.vocab_size == raw.get_vocab_size()
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert tokenizer.is_built_from(tmp_path / "saved")
    with pytest.raises(DataError, match=r"an end-of-sequence token without an id, '<end>'; set eos_token in its"):
        HuggingFaceTokenizer(str(folder_of(raw, tmp_path / "endless", eos_token="<end>")))


def test_stores_of_older_digests_are_told_by_their_files(tmp_path: Path) -> None:
    (source := tmp_path / "a.txt").write_text(TEXT * 20)
    options: dict[str, Any] = {"sources": (source,), "validation_fraction": 0}
    for name, splits in (("old", LINES), ("new", LINES), ("other", ())):
        hub = folder_of(byte_pairs(*splits), tmp_path / f"hub of {name}", tokenizer_class="TokenizersBackend")
        prepare_store(PrepareOptions(out=tmp_path / name, tokenizer=str(hub), **options))
    meta = tmp_path / "old" / "meta.json"
    record = json.loads(meta.read_text())
    record["tokenizer"]["sha256"] = "of what transformers built"
    meta.write_text(json.dumps(record))

    def mixed(*names: str) -> None:
        stores = [StoreConfig(path=str(tmp_path / name), weight=1.0) for name in names]
        config = DataConfig(kind=DataKind.mixture, stores=stores, seq_len=16, cache_dir=str(tmp_path / "cache"))
        open_data(config, vocab_size=1000, validate=False)

    mixed("old", "new")
    with pytest.raises(DataError, match="prepare both with the same tokenizer"):
        mixed("new", "other")
    shutil.rmtree(tmp_path / "old" / "tokenizer")
    with pytest.raises(DataError, match="prepare both with the same tokenizer"):
        mixed("old", "new")


def test_class_that_transformers_cannot_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="transformers cannot load a tokenizer from it"):
        HuggingFaceTokenizer(str(folder_of(byte_pairs(), tmp_path / "hub", model_type="rag")))


@pytest.mark.parametrize("is_file", [False, True])
def test_file_of_the_tokenizers_library_needs_only_its_end_token(is_file: bool, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    byte_pairs().save(str(file := tmp_path / "own" / "tokenizer.json"))
    place = str(file if is_file else file.parent)
    (source := tmp_path / "a.txt").write_text(TEXT * 20)
    arguments = [str(source), "--out", str(tmp_path / "store"), "--tokenizer", place]
    outcome = run_here(prepare.main, *arguments)
    check_line(
        outcome, DataError.exit_code, f"{place}: the tokenizer has no end-of-sequence token", "--eos", "</s>, <s>"
    )
    outcome = run_here(prepare.main, *arguments, "--eos", "<end>")
    check_line(outcome, ConfigError.exit_code, f"--eos=<end>: is no token of {place}; its control tokens: </s>, <s>")
    assert run_here(prepare.main, *arguments, "--eos", "</s>").code == 0
    store = read_meta(tmp_path / "store")
    assert (store.eos_id, store.vocab_size) == (2, byte_pairs().get_vocab_size())
    # What lies in the store says it by itself.
    saved = HuggingFaceTokenizer(str(tmp_path / "store" / "tokenizer"))
    assert (saved.eos_id, saved.info["sha256"]) == (2, store.tokenizer["sha256"])
    assert saved.decode(saved.encode([TEXT])[0]) == TEXT


def test_end_token_of_settings_gives_way_to_the_named_one(tmp_path: Path) -> None:
    place = str(folder_of(byte_pairs(), tmp_path / "hub"))
    assert [load_tokenizer(place, eos=eos).eos_id for eos in (None, "<s>")] == [2, 1]
    with pytest.raises(ConfigError, match="--eos=</s>: would be ignored"):
        load_tokenizer("bytes", eos="</s>")


@pytest.mark.parametrize("name", ["mistyped.json", "here/mistyped", "./mistyped", "../mistyped"])
def test_mistyped_paths_are_looked_up_nowhere_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    with pytest.raises(DataError, match="no such tokenizer; give the folder or file of a tokenizer on this machine"):
        load_tokenizer(name, download=True)


def test_files_that_are_no_tokenizer_are_refused_in_a_line(tmp_path: Path) -> None:
    byte_pairs().save(str(whole := tmp_path / "whole.json"))
    text = whole.read_text()
    contents = {
        "empty": b"",
        "cut": text[: len(text) // 2].encode(),
        "binary": bytes(range(256)),
        "deep": b"[" * 100_000,
        "list": b"[]",
        "pickle": b"cos\nsystem\n(S'touch ran'\ntR.",
        "other": json.dumps(
            {**json.loads(text), "model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}}
        ).encode(),
    }
    for name, content in contents.items():
        (file := tmp_path / f"{name}.json").write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_tokenizer(str(file), eos="</s>")
        assert str(caught.value).startswith(f"{file}: transformers cannot load a tokenizer from it ("), name
        assert "\n" not in str(caught.value)
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(DataError, match="files of a tokenizer have at most"):
        load_tokenizer(str(tmp_path / "huge.json"), eos="</s>")
