"""The embedded corpus: the sources of the running Python's standard library."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("data.sources.corpora")

import hashlib
import logging
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import default_cache_dir
from data.store import VALIDATION_FOLDER, VERSION, TokenStore, check_replaceable
from data.store.writer import StoreWriter, ids_of
from data.tokenizer import ByteTokenizer
from zeco_train.errors import DataError
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import atomic_folder, read_errors

logger = logging.getLogger(__name__)

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__"})
_SPLIT_SEED = 0
_CACHE_REMEDY = "choose another folder with data.cache_dir=FOLDER or ZECO_CACHE=FOLDER"
DEFAULT_VALIDATION_FRACTION = 0.05


@dataclass(frozen=True)
class Corpus:
    """Documents in memory."""

    documents: list[tuple[str, str]]  # (name, text) in order of names
    not_utf8: int  # files that were left out because they are not UTF-8
    manifest_sha256: str  # of all names and texts


def standard_library_documents(folder: Path | None = None) -> Corpus:
    """Read the *.py files of the standard library, without installed packages, sorted by their path in it.

    `folder` defaults to the library of the running Python: 11 MB, or 31 MB if its build includes the tests.

    Raises:
        DataError: there are no sources (an interpreter with a zipped or compiled library), or one cannot be read.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found: list[tuple[str, Path]] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths = (Path(parent, name) for name in names if name.endswith(".py"))
        found.extend((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())
    documents, not_utf8 = [], 0
    digest = hashlib.sha256()
    # os.walk lists a folder in the file system's order, which the digest must not depend on.
    for name, path in sorted(found):
        try:
            with read_errors(path):
                contents = path.read_bytes()
            text = contents.decode("utf-8")
        except UnicodeDecodeError:  # some tests of Python itself are in other encodings on purpose
            not_utf8 += 1
            continue
        digest.update(os.fsencode(name) + b"\0" + hashlib.sha256(contents).digest())
        if text:
            documents.append((name, text))
    if not documents:
        remedy = "prepare a store of your own text and use data=tokens data.path=STORE"
        raise DataError(root, "this Python has no standard library sources for data=embedded", remedy)
    return Corpus(documents, not_utf8, digest.hexdigest())


def prepare_embedded(
    cache_dir: Path | None = None,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    corpus: Corpus | None = None,
) -> Path:
    """Return the folder of the byte-token store of the standard library; prepared on first use, with validation.

    The folder's name has a digest of the texts and of the split, so another Python gets another store. Processes may
    call this concurrently: one store wins, all return it. The held-out documents are chosen by a hash of their names.

    Raises:
        DataError: no corpus, the cache cannot be written (choose another with $ZECO_CACHE), or a link or a folder of
            another kind is in the way.
    """
    corpus = corpus or standard_library_documents()
    key = f"{corpus.manifest_sha256} {validation_fraction!r} {_SPLIT_SEED} {VERSION}"
    name = f"embedded-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    out = (cache_dir or default_cache_dir()).resolve() / name
    damaged = False
    if out.exists():
        try:
            _check(out, validation_fraction)
            return out
        except DataError as error:
            check_replaceable(out)
            damaged = True
            logger.warning("%s; preparing the embedded corpus again", error)
    try:
        with atomic_folder(out, replace=check_replaceable if damaged else None, remedy=_CACHE_REMEDY) as folder:
            _write(folder, corpus, validation_fraction)
    except DataError:
        # Another process may have finished first; its store is identical.
        if not out.is_dir():
            raise
    _check(out, validation_fraction)
    return out


def _check(out: Path, validation_fraction: float) -> None:
    TokenStore.open(out).close()
    if validation_fraction > 0:
        TokenStore.open(out / VALIDATION_FOLDER).close()


def _write(folder: Path, corpus: Corpus, validation_fraction: float) -> None:
    tokenizer = ByteTokenizer()
    held_out = [name for name, _ in corpus.documents if _is_held_out(name, validation_fraction)]
    if validation_fraction > 0 and not 0 < len(held_out) < len(corpus.documents):
        problem = f"data.validation_fraction={validation_fraction} of {len(corpus.documents)} files leaves a part empty"
        raise DataError("the embedded corpus", problem, "use a larger fraction, or 0 for none")
    parts = [(folder, False)] + ([(folder / VALIDATION_FOLDER, True)] if held_out else [])
    # The main part is written last: its meta.json makes the folder a store.
    for part, validation in reversed(parts):
        part.mkdir(exist_ok=True)
        with StoreWriter(part, **ids_of(tokenizer)) as writer:
            for name, text in corpus.documents:
                if _is_held_out(name, validation_fraction) == validation:
                    ids = np.append(tokenizer.encode([text])[0], tokenizer.eos_id)
                    writer.append(ids, [len(ids)])
            writer.finish(corpus.manifest_sha256)


def _is_held_out(name: str, fraction: float) -> bool:
    digest = hashlib.sha256(f"{_SPLIT_SEED}/".encode() + os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Prepare the embedded corpus and print its path; takes no arguments. Returns the exit status."""
    Parser(prog="python -m data.sources.corpora", description=docstring(main)).parse_args(arguments)
    corpus = standard_library_documents()
    path = prepare_embedded(corpus=corpus)
    size = TokenStore.open(path).num_tokens
    print(f"{path}: {size:,} tokens of the standard library ({corpus.not_utf8} files are not UTF-8 and left out)")
    return 0
