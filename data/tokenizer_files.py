"""Validation and copying of tokenizer folders.

Token stores, runs and exports may be untrusted, and a file in them may be a link to any file on this machine: loading
would read it, a run would copy it, and an export would publish it. So every file that transformers might open in such a
folder is checked before loading, and only known files are copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeco_train.errors import DataError
from zeco_train.system.files import read_errors
from zeco_train.system.paths import is_within
from zeco_train.system.small_files import LARGEST_BYTES, read_json, read_small

# Subfolder of token stores and runs with the tokenizer's files.
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
# All vocabulary file names of transformers' tokenizers, slow and fast (their `vocab_files_names`), and of the formats
# it converts (tekken.json, tiktoken.model, tokenizer.tiktoken).
VOCABULARIES = frozenset(
    (
        *(TOKENIZER_FILE, "tokenizer.model", "tokenizer.tiktoken", "tiktoken.model", "tekken.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "byte_maps.json", "prophetnet.tokenizer"),
        *("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model", "spm_char.model"),
        *("source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json"),
        *("dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json"),
        *("word_shape.json", "word_pronunciation.json"),
    )
)
_SETTINGS = frozenset((TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"))
# A model's config; AutoTokenizer reads the tokenizer class from it if tokenizer_config.json does not name one.
_MODEL_CONFIG = "config.json"
_TEMPLATES = "additional_chat_templates"
# Other names that transformers finds by pattern or by argument name.
_FOUND_BY_PATTERN = re.compile(r".*tokenizer\..*json.*|.*(tokenizer|tiktoken)\.model.*|.*tekken\.json.*|\w+_file")
_LARGEST_BYTES = 4 * LARGEST_BYTES
_REMEDY = "put the file itself there"


def tokenizer_files(*folders: Path) -> Path | None:
    """The tokenizer's files in the first of `folders`, stores or runs, that has them.

    Raises:
        DataError: the subfolder is a link out of its folder.
    """
    for folder in folders:
        path = folder / TOKENIZER_FOLDER
        if path.is_symlink() and not _real(path).is_relative_to(_real(folder)):
            raise DataError(path, "is a link to another place; it is not followed", "put the folder itself there")
        if path.is_dir():
            return path
    return None


def check_tokenizer(path: Path) -> None:
    """Check every file that transformers may open in a folder, so that loading reads nothing outside of it.

    Links into the hub's cache are allowed if `path` is a snapshot of that cache, where all files are such links.

    Args:
        path: the folder; or a single file, of which only type and size are checked.

    Raises:
        DataError: names a file that is not a regular file of this folder, is too large, or refers to other files.
    """
    if not path.is_dir():
        _check_file(path, _real(path).parent)
        return
    for name in _entries(path):
        if _is_known(name) or name == _MODEL_CONFIG or _FOUND_BY_PATTERN.fullmatch(name):
            _check_file(path / name, _real(path))
    _check_settings(path / TOKENIZER_CONFIG)


def copy_tokenizer(folder: Path, to: Path, model_config: bool = False) -> None:
    """Copy only a tokenizer's files; links become files.

    Args:
        folder: of the tokenizer; checked first.
        to: an existing folder.
        model_config: also copy config.json; see `_MODEL_CONFIG`.

    Raises:
        DataError: see `check_tokenizer`; or a file cannot be read.
        OSError: one cannot be written.
    """
    check_tokenizer(folder)
    for name in _entries(folder):
        if _is_known(name) or (model_config and name == _MODEL_CONFIG):
            with read_errors(folder / name):
                contents = read_small(folder / name, _LARGEST_BYTES)
            (to / name).parent.mkdir(exist_ok=True)
            (to / name).write_bytes(contents)


def _is_known(name: str) -> bool:
    parent, _, file = name.rpartition("/")
    return file.endswith(".jinja") if parent == _TEMPLATES else name in _SETTINGS | VOCABULARIES


def _entries(folder: Path) -> Iterator[str]:
    """The names in a folder, and the relative paths in its folder of chat templates."""
    for part in ("", _TEMPLATES):
        names = []
        with read_errors(folder / part), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(os.listdir(folder / part))  # noqa: PTH208 - names are wanted, not paths
        yield from (f"{part}/{name}" if part else name for name in names)


def _check_file(path: Path, root: Path) -> None:
    """Check that a file is a regular file in `root` (a resolved path), or in the hub cache of `root`."""
    real = _real(path)
    if not is_within(real, root):
        raise DataError(path, "is a link out of its folder; it is not followed", _REMEDY)
    with read_errors(path):
        if not real.exists():
            raise DataError(path, "is a link to a file that is not there", _REMEDY)
        status = real.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(path, "is not a regular file", _REMEDY)
    if status.st_size > _LARGEST_BYTES:
        problem = f"has {status.st_size:,} bytes; files of a tokenizer have at most {_LARGEST_BYTES:,}"
        raise DataError(path, problem, "give another tokenizer")


def _check_settings(path: Path) -> None:
    """Reject settings that make transformers open files by other names, inside or outside the folder."""
    try:
        with read_errors(path):
            if not path.exists():
                return
            settings: Any = read_json(path)
    except ValueError as error:
        raise DataError(path, f"cannot be read ({error})") from error
    if not isinstance(settings, dict):
        raise DataError(path, "cannot be read (not a JSON object)")
    names = settings.get("fast_tokenizer_files") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and "/" not in name for name in names):
        raise DataError(path, "fast_tokenizer_files may only name files beside it", "remove the entry")
    for key in ("init_inputs", "gguf_file"):
        if settings.get(key):
            raise DataError(path, f"{key} names files to read, which is not allowed here", "remove the entry")


def _real(path: Path) -> Path:
    """The resolved path; the file need not exist."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise DataError(path, "is a link that leads back to itself", _REMEDY) from error
