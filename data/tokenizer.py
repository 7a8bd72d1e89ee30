"""Tokenizers for preparing stores: bytes, or any local Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeco_train.errors import DataError

BYTES = "bytes"


class Tokenizer(Protocol):
    """Text to ids. `info` is what meta.json records of it."""

    vocab_size: int
    eos_id: int
    info: dict[str, str]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens], without an end-of-sequence id or any other addition."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte, with the ids of `transformers.ByT5Tokenizer(extra_ids=0)`: byte + 3; 0 is padding,
    1 ends a document, 2 is unknown and does not occur."""

    vocab_size = 259
    eos_id = 1
    info = {"kind": BYTES}  # noqa: RUF012 - as in the protocol; nobody changes it
    offset = 3

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [bytes] uint16."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16) + self.offset for text in texts]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`; special ids give nothing and broken UTF-8 gives replacement characters."""
        values = ids[ids >= self.offset] - self.offset
        return values.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of transformers, from a local folder or file; nothing is ever downloaded."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises almost anything for files that it cannot use
            reason = " ".join(str(error).split())[:200]
            raise DataError(path, f"transformers cannot load a tokenizer from it ({reason})") from error
        if self._tokenizer.eos_token_id is None:
            remedy = "set eos_token in its tokenizer_config.json: every document ends with it"
            raise DataError(path, "the tokenizer has no end-of-sequence token", remedy)
        vocabulary = self._tokenizer.get_vocab()
        self.eos_id = int(self._tokenizer.eos_token_id)
        # Added tokens can leave holes, so the number of tokens may be less than the largest id.
        self.vocab_size = max(len(self._tokenizer), max(vocabulary.values()) + 1, self.eos_id + 1)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        contents = backend.to_str() if backend is not None else json.dumps(sorted(vocabulary.items()))
        digest = hashlib.sha256(contents.encode("utf-8", errors="surrogatepass")).hexdigest()
        self.info = {"kind": "huggingface", "path": str(Path(path).resolve()), "sha256": digest}

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens] int64."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]


def load_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for "bytes", else the Hugging Face tokenizer at the local path `name`.

    Raises:
        DataError: no such path, nothing there that transformers can load, or a tokenizer without an end of sequence.
    """
    if name == BYTES:
        return ByteTokenizer()
    if not Path(name).exists():
        raise DataError(name, "no such tokenizer", "give 'bytes' or the folder of a tokenizer on this machine")
    return HuggingFaceTokenizer(name)
