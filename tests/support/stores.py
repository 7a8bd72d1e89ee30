"""Token stores and texts for tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.store import TokenStore
from data.store.writer import StoreWriter
from data.tokenizer import ByteTokenizer
from zeco_train.system.files import sha256_of


def documents(path: Path) -> list[str]:
    opened = TokenStore.open(path)
    verify(opened)
    ids = [opened.read(start, stop) for start, stop in itertools.pairwise(opened.doc_offsets.tolist())]
    assert all(tokens[-1] == 1 and not (tokens[:-1] == 1).any() for tokens in ids)
    return [ByteTokenizer().decode(tokens) for tokens in ids]


def write_word_tokenizer(folder: Path, numbers: Iterable[int] = range(10), **special: str) -> Path:
    """A Hugging Face tokenizer of the words w0, w1, …, whose ids are their numbers + 2; </s> is 1, unknown words 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in numbers}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def verify(store: TokenStore) -> None:
    """The shards are as their digests in meta.json say; those of the offsets are checked when a store is opened."""
    assert [sha256_of(store.path / shard.name) for shard in store.meta.shards] == [s.sha256 for s in store.meta.shards]


def write_lines(path: Path, records: list[Any]) -> Path:
    """A .jsonl file of the records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def edit_json(path: Path, **changes: object) -> None:
    """Replace entries of a JSON file's object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_tokens(
    folder: Path,
    tokens: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    vocab_size: int = 259,
    kind: str = "bytes",
    preparation: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    with StoreWriter(folder, vocab_size=vocab_size, eos_id=1, tokenizer={"kind": kind}, **options) as writer:
        writer.append(tokens, lengths)
        writer.finish("sources", preparation)
    return folder


def write_numbered_store(folder: Path, lengths: list[int], first: int = 0) -> TokenStore:
    """A store whose token t is `first` + t, so that values reveal their positions."""
    tokens = np.arange(first, first + sum(lengths))
    return TokenStore.open(write_tokens(folder, tokens, lengths, vocab_size=1000))


def write_store(
    folder: Path, num_tokens: int = 4000, seed: int = 0, vocab_size: int = 259, kind: str = "bytes"
) -> Path:
    """A store of one random document."""
    tokens = np.random.default_rng(seed).integers(2, vocab_size, num_tokens)
    tokens[-1] = 1
    return write_tokens(folder, tokens, [num_tokens], vocab_size, kind)
