"""Tokenizers for preparing stores: bytes, or any Hugging Face tokenizer, local or, at preparation only, of the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data.tokenizer_files import check_tokenizer, tokenizer_files
from zeco_train.errors import DataError

BYTES = "bytes"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Tokenizer(Protocol):
    """Text to ids. `info` is what meta.json records of it."""

    vocab_size: int
    eos_id: int
    info: dict[str, str]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens], without an end-of-sequence id or any other addition."""

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`."""

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` needs into `folder`; none for bytes."""


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

    def save(self, folder: Path) -> None:
        """See Tokenizer."""


class HuggingFaceTokenizer:
    """A tokenizer of transformers, from a local folder or file, or by its name on the hub.

    Args:
        name: the path or the name.
        local: do not ask the hub: `name` is a path, or a name that was downloaded before.
        remedy: what to do where it cannot be loaded.

    Raises:
        DataError: it cannot be loaded, or has no end of sequence.
    """

    def __init__(self, name: str, local: bool = True, remedy: str = "") -> None:
        import huggingface_hub.utils
        import transformers
        from transformers import AutoTokenizer

        # Problems are ours to report, in one line.
        transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
        huggingface_hub.utils.logging.set_verbosity(huggingface_hub.utils.logging.CRITICAL)
        if Path(name).exists():
            check_tokenizer(Path(name))
        with _failures(name, "transformers cannot load a tokenizer from it", remedy):
            # Left out, it has transformers ask on stdin whether to run a folder's own code.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        if self._tokenizer.eos_token_id is None:
            remedy = "set eos_token in its tokenizer_config.json: every document ends with it"
            raise DataError(name, "the tokenizer has no end-of-sequence token", remedy)
        vocabulary = self._tokenizer.get_vocab()
        self.eos_id = int(self._tokenizer.eos_token_id)
        # Added tokens can leave holes, so the number of tokens may be less than the largest id.
        self.vocab_size = max(len(self._tokenizer), max(vocabulary.values(), default=0) + 1, self.eos_id + 1)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        contents = backend.to_str() if backend is not None else json.dumps(sorted(vocabulary.items()))
        digest = hashlib.sha256(contents.encode("utf-8", errors="surrogatepass")).hexdigest()
        place = str(Path(name).resolve()) if Path(name).exists() else name
        self.info = {"kind": "huggingface", "path": place, "sha256": digest}

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens] int64."""
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        with _failures(self.info["path"], "this tokenizer cannot encode a text"):
            encoded = self._tokenizer(list(texts), **options)
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`, special tokens included."""
        with _failures(self.info["path"], "this tokenizer cannot decode its ids"):
            return str(self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """See Tokenizer."""
        self._tokenizer.save_pretrained(folder)


@contextmanager
def _failures(name: str, problem: str, remedy: str = "") -> Iterator[None]:
    """Make a DataError of whatever a tokenizer's files make transformers and its libraries raise."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the `tokenizers` library is no Exception
        if "trust_remote_code" in str(error):
            remedy = "give a tokenizer that transformers has a class for"
            raise DataError(name, "the tokenizer needs code of its own, which is never run", remedy) from error
        reason = " ".join(str(error).split())[:200]
        raise DataError(name, f"{problem} ({reason})", remedy) from error


def load_tokenizer(name: str, download: bool = False) -> Tokenizer:
    """The byte tokenizer for "bytes", else the Hugging Face tokenizer at a local path or of that name on the hub.

    Args:
        download: ask the hub for what is not on this machine; without, a name of the hub must be in its cache.

    Raises:
        DataError: no such path, nothing there that transformers can load, or a tokenizer without an end of sequence.
    """
    if name == BYTES:
        return ByteTokenizer()
    if Path(name).exists():
        return HuggingFaceTokenizer(name)
    remedy = "give 'bytes', the folder of a tokenizer on this machine, or a name that the hub knows"
    if not _HUB_NAME.fullmatch(name):
        raise DataError(name, "no such tokenizer", remedy)
    return HuggingFaceTokenizer(name, local=not download, remedy=remedy)


def tokenizer_name(info: Mapping[str, str], *folders: Path) -> str:
    """What `load_tokenizer` takes for the tokenizer that `info` describes (see `StoreMeta`): its own files in the first
    of `folders` that has them, and else the place that it once came from."""
    if info.get("kind") == BYTES:
        return BYTES
    own = tokenizer_files(*folders)
    return str(own) if own else info.get("path", "")


def comparable(value: Any) -> Any:
    """A tokenizer's `info` without its place: it is what its digest says wherever it lies. Others stay."""
    return {key: part for key, part in value.items() if key != "path"} if isinstance(value, dict) else value
