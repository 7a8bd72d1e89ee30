"""Tokenise text into a token store: `python -m data.prepare SOURCE... --out STORE`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tqdm import tqdm

from data.atomic import atomic_folder
from data.pipeline import Job, Part, cached_tokenizer, tokenize_units
from data.sources import (
    SUFFIXES,
    UNIT_BYTES,
    SourceFile,
    SourceProblem,
    find_sources,
    manifest_sha256,
    split_into_units,
)
from data.store import VALIDATION_FOLDER, StoreMeta, is_store
from data.store_writer import StoreWriter
from data.tokenizer import BYTES
from zeco_train.errors import ConfigError, DataError, ZecoError

_LINE_SECONDS = 10.0
_SMALL_CORPUS_BYTES = 1 << 23
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and how.

    Attributes:
        sources: files and folders.
        out: the store's folder.
        tokenizer: "bytes" or the local path of a Hugging Face tokenizer.
        text_field: field of .jsonl lines and column of .parquet files.
        validation_fraction: the last documents, up to this part of all tokens, go to `out`/validation; 0 for none.
        workers: processes; None for one a CPU (one for a small corpus). The result does not depend on it.
        min_tokens: shorter documents are left out.
        overwrite: replace an existing store.
        unit_bytes: how much text a worker takes at a time.
    """

    sources: tuple[Path, ...]
    out: Path
    tokenizer: str = BYTES
    text_field: str = "text"
    validation_fraction: float = 0.0
    workers: int | None = None
    min_tokens: int = 1
    overwrite: bool = False
    unit_bytes: int = UNIT_BYTES


@dataclass(frozen=True)
class Prepared:
    """What was written: meta of the store and of its validation part, and what was passed over."""

    meta: StoreMeta
    validation: StoreMeta | None
    num_files: int
    skipped_files: Counter[str]
    short_documents: int


def prepare_store(options: PrepareOptions) -> Prepared:
    """Tokenise the sources into the store `options.out`, which appears whole or not at all.

    Raises:
        ConfigError: an option out of its range.
        DataError: sources, tokenizer or folder that cannot be used.
    """
    _check_options(options)
    out = options.out.resolve()
    _check_out(out, options.overwrite)
    tokenizer = cached_tokenizer(options.tokenizer)
    files, skipped = find_sources(options.sources)
    if not files:
        remedy = f"read are files of {' '.join(SUFFIXES)}" + (
            f"; skipped: {_listed(skipped)}" if skipped.total() else ""
        )
        raise DataError(_names(options.sources), "no text found", remedy)
    sources_sha256 = manifest_sha256(files)
    with (
        atomic_folder(out, replace=options.overwrite) as folder,
        StoreWriter.for_tokenizer(folder, tokenizer) as writer,
    ):
        short = _write_all(writer, files, options)
        if writer.num_documents == 0:
            remedy = f"left out {short} documents {_too_short(options)}" if short else ""
            raise DataError(_names(options.sources), f"no text in {len(files)} files", remedy)
        validation = None
        if options.validation_fraction > 0:
            state = writer.tail_state(options.validation_fraction)
            with writer.copy_tail(state, folder / VALIDATION_FOLDER) as tail:
                validation = tail.finish(sources_sha256)
            writer.resume(state)
        meta = writer.finish(sources_sha256)
    return Prepared(meta, validation, len(files), skipped, short)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status; problems are one line on stderr."""
    try:
        options = _parse(arguments)
        with _sigterm_interrupts():
            prepared = prepare_store(options)
    except ZecoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT)
    meta, validation = prepared.meta, prepared.validation
    if prepared.skipped_files.total():
        print(f"skipped {prepared.skipped_files.total()} files of other kinds: {_listed(prepared.skipped_files)}")
    if prepared.short_documents:
        print(f"left out {prepared.short_documents} documents {_too_short(options)}")
    if validation:
        print(f"{options.out / VALIDATION_FOLDER}: {_counts(validation)}")
    print(
        f"{options.out}: {_counts(meta)} of {meta.dtype} from {prepared.num_files} files, vocabulary {meta.vocab_size}"
    )
    return 0


def _check_options(options: PrepareOptions) -> None:
    if not 0 <= options.validation_fraction < 1:
        raise ConfigError("--validation-fraction", options.validation_fraction, "allowed: from 0 to less than 1")
    if options.workers is not None and options.workers < 1:
        raise ConfigError("--workers", options.workers, "allowed: 1 or more")
    if options.min_tokens < 1:
        raise ConfigError("--min-tokens", options.min_tokens, "allowed: 1 or more")


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuse to touch anything that exists, unless it is a store (or an empty folder) and may be overwritten."""
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
    except OSError as error:
        raise DataError(out, f"cannot be read ({error.strerror})", "choose another --out") from error
    if not is_store(out):
        raise DataError(out, "exists and is not a token store", "choose another --out; nothing was changed")
    if not overwrite:
        raise DataError(out, "exists already", "give --overwrite to replace it; nothing was changed")


def _write_all(writer: StoreWriter, files: list[SourceFile], options: PrepareOptions) -> int:
    """Tokenise all files into `writer`. Returns how many documents were too short."""
    total = sum(file.size for file in files)
    workers = options.workers or (1 if total <= _SMALL_CORPUS_BYTES else _available_cpus())
    job = Job(options.tokenizer, options.text_field, options.min_tokens, writer.folder)
    short = 0
    units = split_into_units(files, options.unit_bytes)
    try:
        with closing(tokenize_units(job, units, workers)) as parts, _progress(total) as advance:
            for part in parts:
                writer.append_blocks(_take(part), part.lengths)
                short += part.short_documents
                advance(part.source_bytes, writer.num_tokens)
    except SourceProblem as problem:
        raise DataError(*problem.args) from problem
    return short


def _available_cpus() -> int:
    """CPUs that this process may use, where the system tells (Linux), else all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _take(part: Part) -> Iterator[bytes]:
    with part.path.open("rb") as file:
        yield from iter(lambda: file.read(_BLOCK_BYTES), b"")
    part.path.unlink()


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Give a function of (bytes done, tokens so far): a bar on a terminal, else a plain line now and then."""
    if sys.stderr.isatty():
        with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="prepare") as bar:

            def advance(count: int, tokens: int) -> None:
                bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
                bar.update(count)

            yield advance
        return
    start = last = time.monotonic()
    done = 0

    def report(count: int, tokens: int) -> None:
        nonlocal last, done
        done += count
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            rate = done / (now - start) / 1e6
            line = f"prepare: {done / 1e6:.1f} of {total_bytes / 1e6:.1f} MB, {tokens:,} tokens, {rate:.1f} MB/s"
            print(line, file=sys.stderr, flush=True)

    yield report


class _Terminated(KeyboardInterrupt):
    """SIGTERM, answered like Ctrl-C."""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("data.prepare", " ".join(sys.argv[1:]), f"{message} (see --help)")


def _parse(arguments: Sequence[str] | None) -> PrepareOptions:
    parser = _Parser(prog="python -m data.prepare", description="Tokenise text into a token store.")
    kinds = " ".join(SUFFIXES)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help=f"files of {kinds}, or folders of them")
    parser.add_argument("--out", required=True, type=Path, metavar="STORE", help="folder of the store")
    parser.add_argument("--tokenizer", default=BYTES, help="'bytes' (default) or the path of a Hugging Face tokenizer")
    parser.add_argument("--text-field", default="text", help="field of .jsonl, column of .parquet (default: text)")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="hold out the last documents, up to this part of all tokens, in STORE/validation (default: 0)",
    )
    parser.add_argument("--workers", type=int, help="processes (default: one a CPU; no effect on the result)")
    parser.add_argument("--min-tokens", type=int, default=1, help="leave out documents shorter than this (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing store")
    parsed = parser.parse_args(arguments)
    return PrepareOptions(**{**vars(parsed), "sources": tuple(parsed.sources)})


def _too_short(options: PrepareOptions) -> str:
    return "without text" if options.min_tokens == 1 else f"of fewer than {options.min_tokens} tokens"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(8) if count)


def _names(sources: Sequence[Path]) -> str:
    return ", ".join(str(source) for source in sources[:3]) + (" …" if len(sources) > 3 else "")


def _counts(meta: StoreMeta) -> str:
    return f"{meta.num_documents:,} documents, {meta.num_tokens:,} tokens"


if __name__ == "__main__":
    sys.exit(main())
