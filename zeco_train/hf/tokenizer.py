"""The tokenizer in a Hugging Face folder.

The byte tokenizer is transformers' `ByT5Tokenizer(extra_ids=0)`, with the same ids as `data.tokenizer.ByteTokenizer`.
It is recognised and written without importing transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from data.tokenizer import BYTES, ByteTokenizer, Tokenizer
from data.tokenizer_files import TOKENIZER_CONFIG, VOCABULARIES, copy_tokenizer
from zeco_train.system.files import write_durably
from zeco_train.system.small_files import read_json

_OF_BYTES = {
    "tokenizer_class": "ByT5Tokenizer",
    "extra_ids": 0,
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "additional_special_tokens": [],
}


def tokenizer_info(folder: Path) -> dict[str, str] | None:
    """`StoreMeta.tokenizer` of the tokenizer in a folder, without its digest; None if there is none."""
    if not any((folder / name).is_file() for name in (TOKENIZER_CONFIG, *VOCABULARIES)):
        return None
    if _is_of_bytes(folder / TOKENIZER_CONFIG):
        return {"kind": BYTES}
    return {"kind": "huggingface", "path": str(folder)}


def write_tokenizer(tokenizer: Tokenizer, files: Path | None, folder: Path) -> None:
    """Write a tokenizer's files.

    Args:
        tokenizer: the byte tokenizer, or one of Hugging Face.
        files: the folder with its files, which are copied unchanged; None: use `Tokenizer.save`.
        folder: to write to.

    Raises:
        DataError: a file is a link out of that folder; see `check_tokenizer`.
    """
    if isinstance(tokenizer, ByteTokenizer):
        write_durably(folder / TOKENIZER_CONFIG, json.dumps(_OF_BYTES, indent=2) + "\n")
    elif files is None:
        tokenizer.save(folder)
    else:
        copy_tokenizer(files, folder)


def _is_of_bytes(path: Path) -> bool:
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        return False
    wanted = ("tokenizer_class", "extra_ids")
    return isinstance(stored, dict) and all(stored.get(key) == _OF_BYTES[key] for key in wanted)
