"""Tokenizers: bytes, or any Hugging Face tokenizer, local or (during preparation only) from the hub."""

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
from zeco_train.errors import DataError, check_open_files

BYTES = "bytes"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Tokenizer(Protocol):
    """Converts text to ids. `info` is its entry in meta.json."""

    vocab_size: int
    eos_id: int
    info: dict[str, str]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens], without end-of-sequence or other special ids."""

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`."""

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` needs into `folder`; none for bytes."""


class ByteTokenizer:
    """One token per UTF-8 byte, with the ids of `transformers.ByT5Tokenizer(extra_ids=0)`.

    Ids are byte + 3; 0 is padding, 1 is end of sequence, 2 is unknown and does not occur.
    """

    vocab_size = 259
    eos_id = 1
    unknown_id = 2
    info = {"kind": BYTES}  # noqa: RUF012 - as in the protocol; never modified
    offset = 3

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [bytes] uint16."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16) + self.offset for text in texts]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`; special ids are dropped, invalid UTF-8 becomes replacement characters."""
        values = ids[ids >= self.offset] - self.offset
        return values.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """See Tokenizer."""


class HuggingFaceTokenizer:
    """A transformers tokenizer, from a local folder or file, or by its hub name.

    Args:
        name: the path or the hub name.
        local: do not access the hub: `name` is a path, or a name in the hub's local cache.
        remedy: advice in the message if it cannot be loaded.

    Raises:
        DataError: it cannot be loaded, or has no end-of-sequence token.
    """

    def __init__(self, name: str, local: bool = True, remedy: str = "") -> None:
        import huggingface_hub.utils
        import transformers
        from transformers import AutoTokenizer

        # Problems are reported as one-line DataErrors instead.
        transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
        huggingface_hub.utils.logging.set_verbosity(huggingface_hub.utils.logging.CRITICAL)
        if Path(name).exists():
            check_tokenizer(Path(name))
        with _failures(name, "transformers cannot load a tokenizer from it", remedy):
            # Without trust_remote_code=False, transformers asks on stdin whether to run the folder's code.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        if self._tokenizer.eos_token_id is None:
            remedy = "set eos_token in its tokenizer_config.json: every document ends with it"
            raise DataError(name, "the tokenizer has no end-of-sequence token", remedy)
        vocabulary = self._tokenizer.get_vocab()
        self.eos_id = int(self._tokenizer.eos_token_id)
        # Added tokens can leave gaps, so the largest id may exceed the number of tokens.
        self.vocab_size = max(len(self._tokenizer), max(vocabulary.values(), default=0) + 1, self.eos_id + 1)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # Slow tokenizers have no backend to serialise; their vocabulary stands for them.
        contents = backend.to_str() if backend is not None else json.dumps(sorted(vocabulary.items()))
        digest = hashlib.sha256(contents.encode("utf-8", errors="surrogatepass")).hexdigest()
        place = str(Path(name).resolve()) if Path(name).exists() else name
        self.info = {"kind": "huggingface", "path": place, "sha256": digest}

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens] int64."""
        # `verbose`: a document may be longer than the tokenizer's model allows, without a warning.
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        with _failures(self.info["path"], "this tokenizer cannot encode a text"):
            encoded = self._tokenizer(list(texts), **options)
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`, special tokens included."""
        with _failures(self.info["path"], "this tokenizer cannot decode its ids"):
            # Clean-up would remove spaces before punctuation, which the text had.
            return str(self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """See Tokenizer."""
        self._tokenizer.save_pretrained(folder)


@contextmanager
def _failures(name: str, problem: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception from transformers or its libraries to DataError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the `tokenizers` library is not an Exception
        check_open_files(error)
        if "trust_remote_code" in str(error):
            remedy = "give a tokenizer that transformers has a class for"
            raise DataError(name, "the tokenizer needs code of its own, which is never run", remedy) from error
        reason = " ".join(str(error).split())[:200]
        raise DataError(name, f"{problem} ({reason})", remedy) from error


def load_tokenizer(name: str, download: bool = False) -> Tokenizer:
    """The byte tokenizer for "bytes", else the Hugging Face tokenizer at a local path or with that hub name.

    Args:
        name: "bytes", a local path, or a hub name.
        download: allow downloads; otherwise a hub name must be in the local cache.

    Raises:
        DataError: no such path, not loadable by transformers, or a tokenizer without an end-of-sequence token.
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
    """The argument of `load_tokenizer` for the tokenizer described by `info` (see `StoreMeta`).

    That is the tokenizer's folder in the first of `folders` that has one, else its original path.
    """
    if info.get("kind") == BYTES:
        return BYTES
    own = tokenizer_files(*folders)
    return str(own) if own else info.get("path", "")


def comparable(value: Any) -> Any:
    """A tokenizer's `info` without its path, since its digest identifies it. Other values are returned unchanged."""
    return {key: part for key, part in value.items() if key != "path"} if isinstance(value, dict) else value
