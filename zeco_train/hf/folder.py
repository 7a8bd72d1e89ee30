"""Configuration, weight headers and tokenizer of a Hugging Face folder.

Weights are read from safetensors files only: `model.safetensors`, or those named in `model.safetensors.index.json`. The
tokenizer encodes by default as in training, without special tokens; that of bytes is a tokenizer.json with the ids of
`data.tokenizer.ByteTokenizer`, which can lie beside any model, and is recognised and written without transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from data.tokenizer import (
    BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    VOCABULARIES,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from models.spec import spec_of
from zeco_train.checkpoint.files import HF_CONFIG_FILE as CONFIG_FILE
from zeco_train.checkpoint.files import read_record
from zeco_train.errors import CheckpointError, DataError, check_open_files
from zeco_train.hf.config_json import FileTensors, StoredModel, from_config_json, renamed
from zeco_train.system import small_files
from zeco_train.system.files import write_durably
from zeco_train.system.small_files import read_json, read_small

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Provenance of an export by this package, and its format; version 0.2 wrote no number, which means the same.
ORIGIN_FILE, EXPORT_FORMAT = "zeco_train.json", 1
_DTYPES = ("F64", "F32", "F16", "BF16")
# A tied head equals the embedding; files may include it or not.
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Stored:
    """A tensor's entry in the header of a safetensors file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class StoredTensors(NamedTuple):
    """Tensors of a folder's files that hold the rows of some parameters, with their names and shapes there."""

    tensors: FileTensors
    names: list[str]
    shapes: list[tuple[int, ...]]


def checked_model(folder: Path) -> StoredModel:
    """The model of config.json; the headers of the weight files must have exactly its parameters.

    Raises:
        ConfigError: an unsupported model; see `from_config_json`.
        CheckpointError: names the first mismatched parameter, or the file that cannot be read.
    """
    return checked_tensors(folder)[0]


def checked_tensors(folder: Path) -> tuple[StoredModel, list[StoredTensors]]:
    """As `checked_model`, with the tensors in the order of our parameters."""
    parsed = from_config_json(read_record(folder / CONFIG_FILE), folder)
    found = _by_own_names(folder, parsed, stored_weights(folder))
    if parsed.model.num_layers > len(found):
        # Before the model is built, whose number of layers a stranger may have chosen.
        layers = f"{parsed.model.num_layers} layers of {CONFIG_FILE}"
        raise CheckpointError(f"{folder}: {len(found)} tensors are no model of the {layers}")
    if parsed.model.tie_word_embeddings:
        found.pop(_HEAD, None)
    shapes, tensors = spec_of(parsed.model).parameter_shapes, []
    for expected in parsed.tensors():
        names = [renamed(name, parsed.format.other_names) for name in expected.theirs]
        for name, theirs in zip(names, expected.theirs, strict=True):
            if name not in found:
                raise CheckpointError(f"{folder}: {theirs} is missing, which {CONFIG_FILE} asks for")
        stored = [found.pop(name) for name in names]
        _check_shapes(folder, stored, [tuple(shapes[name]) for name in expected.ours])
        tensors.append(StoredTensors(expected, [name for name, _ in stored], [one.shape for _, one in stored]))
    if found:
        extra = min(name for name, _ in found.values())
        raise CheckpointError(f"{folder}: has {extra}, which {CONFIG_FILE} does not describe")
    return parsed, tensors


def _by_own_names(folder: Path, parsed: StoredModel, stored: Mapping[str, Stored]) -> dict[str, tuple[str, Stored]]:
    found: dict[str, tuple[str, Stored]] = {}
    for name, one in stored.items():
        own = renamed(name, parsed.format.other_names)
        if own in found:
            raise CheckpointError(f"{folder}: {name} and {found[own][0]} are the same weights")
        found[own] = name, one
    return found


def _check_shapes(folder: Path, stored: Sequence[tuple[str, Stored]], shapes: Sequence[tuple[int, ...]]) -> None:
    rows, (_, *rest) = sum(shape[0] for shape in shapes), shapes[0]
    for name, one in stored:
        # Of several, each may have any number of the rows.
        own = one.shape[:1] if len(stored) > 1 else (rows,)
        if one.shape != (*own, *rest):
            problem = f"{name} is {list(one.shape)}, {CONFIG_FILE} makes it {[*own, *rest]}"
            raise CheckpointError(f"{folder}: {problem}")
        if one.dtype not in _DTYPES:
            raise CheckpointError(f"{folder}: {name} is {one.dtype}; only {', '.join(_DTYPES)} can be read")
    if (found := sum(one.shape[0] for _, one in stored)) != rows:
        names = ", ".join(name for name, _ in stored)
        raise CheckpointError(f"{folder}: {names} have {found} rows, {CONFIG_FILE} makes them {rows}")


def stored_weights(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder, from the headers of its files.

    Raises:
        CheckpointError: there are none, a file is damaged, or files and index disagree.
    """
    found: dict[str, Stored] = {}
    for file in _files(folder):
        for name, stored in _header(folder / file).items():
            if name in found:
                raise CheckpointError(f"{folder}: {name} is in {found[name].file} and in {file}")
            found[name] = stored
    return found


def _files(folder: Path) -> list[str]:
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX_FILE).is_file():
        table = read_record(folder / INDEX_FILE).get("weight_map")
        if not isinstance(table, dict):
            raise CheckpointError(f"{folder / INDEX_FILE}: cannot be read: it has no weight_map")
        named = sorted({str(name) for name in table.values()})
    else:
        named = [WEIGHTS_FILE]
    if missing := sorted(set(named) - set(present)):
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        hint = f" (there is {others[0]}: convert it with transformers, save_pretrained)" if others else ""
        raise CheckpointError(f"{folder}: {missing[0]} is missing{hint}")
    if extra := sorted(set(present) - set(named)):
        # HuggingFaceStorageReader reads all safetensors files of the folder.
        raise CheckpointError(f"{folder}: {extra[0]} is none of the files that it should have; move it away")
    return named


def _header(path: Path) -> dict[str, Stored]:
    try:
        # Opening a FIFO would block.
        small_files.check_regular(path)
        # Where no more files can be opened, safetensors says that there is no such file.
        path.open("rb").close()
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            return {n: Stored(path.name, part.get_dtype(), tuple(part.get_shape())) for n, part in slices.items()}
    except (OSError, SafetensorError) as error:
        check_open_files(error)
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: damaged: {reason}") from error


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
