"""The tokenizer in a Hugging Face folder: encodes by default as in training, without special tokens.

The byte tokenizer is a tokenizer.json with the ids of `data.tokenizer.ByteTokenizer`, which can lie beside any
model. It is recognised and written without importing transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from data.tokenizer import (
    BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    VOCABULARIES,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from zeco_train.errors import DataError
from zeco_train.system.files import write_durably
from zeco_train.system.small_files import read_json, read_small

_SETTINGS_OF_BYTES = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}
# How exports of 0.2 name the byte tokenizer.
_BYT5 = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}


def tokenizer_info(folder: Path) -> dict[str, str] | None:
    """`StoreMeta.tokenizer` of the tokenizer in a folder, without its digest; None if there is none."""
    if not any((folder / name).is_file() for name in (TOKENIZER_CONFIG, *VOCABULARIES)):
        return None
    if _is_of_bytes(folder):
        return {"kind": BYTES}
    return {"kind": "huggingface", "path": str(folder)}


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer's files beside config.json, on which depends what transformers makes of them.

    Raises:
        DataError: transformers would not encode as this tokenizer does.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        write_durably(folder / TOKENIZER_CONFIG, json.dumps(_SETTINGS_OF_BYTES, indent=2) + "\n")
        write_durably(folder / TOKENIZER_FILE, _file_of_bytes())
        return
    tokenizer.save(folder)
    if not tokenizer.is_built_from(folder):
        problem = "from files that it saves itself, transformers builds a tokenizer that encodes otherwise by default"
        raise DataError(tokenizer.info["path"], problem, "training took a tokenizer that no export can hold")


def _is_of_bytes(folder: Path) -> bool:
    file, of_bytes = folder / TOKENIZER_FILE, _file_of_bytes().encode()
    try:
        if file.exists():
            return read_small(file, len(of_bytes)) == of_bytes
        settings = read_json(folder / TOKENIZER_CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings | _BYT5 == settings


def _file_of_bytes() -> str:
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    # The names of bytes in the `tokenizers` library: of those that cannot be shown, the characters from 256 on.
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    special = {"<pad>": 0, "</s>": ByteTokenizer.eos_id, "<unk>": ByteTokenizer.unknown_id}
    vocabulary = special | {names[byte]: byte + ByteTokenizer.offset for byte in range(256)}
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # Special tokens are in the settings only: here they would be found in texts.
    file = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes_alone,
        "decoder": bytes_alone,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(file, ensure_ascii=False) + "\n"
