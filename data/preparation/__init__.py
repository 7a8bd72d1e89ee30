"""Prepares a token store from text; resumable after any number of interruptions.

The output is a function of the arguments and the text. The state, saved every few seconds, records how many documents
of which unit the store holds, so a resumed run writes the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from data.preparation.pipeline import CONTROL_IDS, Part, Preparation, PrepareOptions, cached_tokenizer, tokenize_units
from data.preparation.work_folder import MOVING, READ, READING, SPLIT, WorkFolder, meta_sha256, work_folder
from data.sources import DocumentSource, FileSource, Unit
from data.sources.hugging_face import DatasetSpec, is_saved_dataset, open_dataset
from data.sources.readers import LeftOut
from data.store import VALIDATION_FOLDER, StoreMeta, check_replaceable, read_meta
from data.store.writer import StoreWriter, ids_of
from data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from zeco_train.errors import ConfigError, DataError, ZecoError, names_field
from zeco_train.system.files import read_errors
from zeco_train.system.numbers import compact
from zeco_train.system.paths import check_path

_SMALL_CORPUS_BYTES = 1 << 23
_BLOCK_BYTES = 1 << 22
_LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Prepared:
    """Result of a preparation: metadata of the store and its validation part, skipped input, and throughput.

    The defaults apply to a run that only moved a finished store of an interrupted one into place.
    """

    meta: StoreMeta
    validation: StoreMeta | None
    left_out: dict[str, int]  # numbers of documents, by the names of `LeftOut`
    control_ids: int  # inside documents
    num_files: int | None = None  # files read; None for a data set
    skipped_files: Counter[str] = field(default_factory=Counter)
    earlier_tokens: int = 0  # written by interrupted runs
    tokens: int = 0  # written by this run
    seconds: float = 0.0
    workers: int = 1


def prepare_store(options: PrepareOptions) -> Prepared:
    """Tokenise the sources into the store `options.out`, which is created atomically.

    Resumes an interrupted run with the same arguments.

    Raises:
        ConfigError: an option is out of range.
        DataError: unusable sources, tokenizer or folder; sources that changed since the interruption.
    """
    _check_options(options)
    out = options.out.resolve()
    with names_field("--tokenizer", options.tokenizer):
        tokenizer = cached_tokenizer(options.tokenizer, options.eos, download=True)
    arguments = _arguments(options)
    recorded = arguments | {"tokenizer": tokenizer.info}
    # A resume needs these, too: the saved state counts units and shards of these sizes.
    recorded |= {"unit_bytes": options.unit_bytes, "shard_tokens": options.shard_tokens}
    with (
        names_field("--out", options.out),
        names_field("--out", out),
        work_folder(out, recorded, options.overwrite) as work,
    ):
        if work.state.phase == MOVING:
            return _place(options, work, out)
        _check_out(options.out, options.overwrite)
        preparation = _Preparation(options, work, tokenizer, arguments)
        preparation.check_unchanged()
        try:
            preparation.run()
            return _place(options, work, out, **preparation.facts())
        except (ZecoError, OSError) as error:
            if not work.state.is_new:
                error.add_note(f"{work.state.writer.num_tokens:,} tokens are kept, the same command goes on from there")
            raise


class _Preparation:
    def __init__(
        self, options: PrepareOptions, work: WorkFolder, tokenizer: Tokenizer, arguments: dict[str, Any]
    ) -> None:
        self._options, self._work, self._tokenizer, self._arguments = options, work, tokenizer, arguments
        self.source = self._open_source()
        self._stamps: dict[int, str] = {-1: ""}
        self.workers, self.earlier_tokens, self.tokens, self.seconds = 1, 0, 0, 0.0

    def check_unchanged(self) -> None:
        """Check that an interrupted run has read the same units. Raises DataError otherwise."""
        state, work = self._work.state, self._work
        count = state.unit + (state.first > 0)
        units = list(itertools.islice(self.source.units(), count))
        stamps = functools.reduce(_next_stamp, units, "")
        if len(units) == count and stamps == state.stamps:
            return
        if not self._options.overwrite:
            problem = "has changed since the interrupted preparation read it"
            raise DataError(self.source.name, problem, "give --overwrite to start anew, or choose another --out")
        work.start_anew()

    def run(self) -> None:
        work = self._work
        self.earlier_tokens = work.state.writer.num_tokens
        shard_tokens, state = self._options.shard_tokens, work.state.writer
        with StoreWriter(work.store, **ids_of(self._tokenizer), shard_tokens=shard_tokens, state=state) as writer:
            if work.state.phase == READING:
                self._read_all(writer)
            if work.state.phase == READ:
                self._split(writer)
            self._finish(writer)

    def facts(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("earlier_tokens", "tokens", "seconds", "workers")}
        if isinstance(self.source, FileSource):
            found |= {"num_files": self.source.num_files, "skipped_files": self.source.skipped}
        return found

    def _open_source(self) -> DocumentSource:
        options, spec = self._options, self._options.dataset
        saved = [path for path in options.sources if is_saved_dataset(path)]
        if saved and len(options.sources) > 1:
            raise DataError(saved[0], "is a data set of save_to_disk, which stands alone", "give it as the only SOURCE")
        if saved:
            spec = DatasetSpec(str(saved[0]), split=options.split)
        if spec is None:
            return FileSource(options.sources, options.text_field, options.unit_bytes, options.max_document_bytes)
        if self._work.state.commit:  # the hub may have moved on since the interruption
            spec = replace(spec, revision=self._work.state.commit)
        with names_field("SOURCE" if saved else "--dataset", spec.name):
            return open_dataset(spec, options.text_field, options.unit_bytes)

    def _read_all(self, writer: StoreWriter) -> None:
        options, source, state = self._options, self.source, self._work.state
        small = source.amount == "bytes" and source.total <= _SMALL_CORPUS_BYTES
        self.workers = options.workers or (1 if small else len(os.sched_getaffinity(0)))
        self._made, self._state = {part.name: part for part in state.waiting}, state
        job = Preparation(source, self._work.parts, options)
        start = saved = time.monotonic()
        parts = tokenize_units(job, self._units_left(), self.workers, state.first, self._made)
        with closing(parts), closing(_display(source, state.amount)) as display:
            for part in parts:
                is_full = self._take(writer, part)
                rate = (writer.num_tokens - self.earlier_tokens) / max(time.monotonic() - start, 1e-9)
                # `update` draws it at tqdm's own rate; a refresh here would draw for every part.
                display.set_postfix_str(f"{writer.num_tokens:,} tokens, {compact(rate)} tokens/s", refresh=False)
                display.update(part.amount)
                if is_full:  # do not save this state: a resumed run would read on
                    break
                if time.monotonic() - saved >= options.save_seconds:
                    self._save(writer)
                    saved = time.monotonic()
        if writer.num_documents == 0:
            where = f"no text in {source.num_files} files" if isinstance(source, FileSource) else "no text"
            raise DataError(source.name, where, describe_left_out(self._state.counts, options))
        self.tokens, self.seconds = writer.num_tokens - self.earlier_tokens, time.monotonic() - start
        if options.validation_fraction > 0:
            writer.tail_state(options.validation_fraction)  # may raise; must precede saving the READ phase
        # With `max_tokens`, parts beyond the end may be left.
        self._made = {}
        self._save(writer, READ)

    def _units_left(self) -> Iterator[tuple[int, Unit]]:
        for index, unit in enumerate(self.source.units()):
            self._stamps[index] = _next_stamp(self._stamps[index - 1], unit)
            if index >= self._work.state.unit:
                yield index, unit

    def _take(self, writer: StoreWriter, part: Part) -> bool:
        tokens_path, lengths_path = part.paths(self._work.parts)
        lengths = np.load(lengths_path)
        most = self._options.max_tokens
        if most is not None:
            lengths = lengths[: int(np.searchsorted(writer.num_tokens + np.cumsum(lengths), most)) + 1]
        writer.append_blocks(_blocks(tokens_path, int(lengths.sum()) * writer.dtype.itemsize), lengths)
        unit, first = (part.unit + 1, 0) if part.ended else (part.unit, part.first + part.documents)
        counts, amount = Counter(self._state.counts) + Counter(part.counts), self._state.amount + part.amount
        self._state = replace(self._state, unit=unit, first=first, counts=dict(counts), amount=amount)
        del self._made[part.name]
        if part not in self._work.state.waiting:  # the saved state still refers to those
            tokens_path.unlink()
            lengths_path.unlink()
        return most is not None and writer.num_tokens >= most

    def _save(self, writer: StoreWriter, phase: str = READING) -> None:
        state, before = self._state, self._work.state.waiting
        stamps = self._stamps[state.unit if state.first else state.unit - 1]
        waiting, commit = tuple(self._made.values()), getattr(self.source, "revision", None)
        state = replace(state, phase=phase, writer=writer.checkpoint(), stamps=stamps, waiting=waiting, commit=commit)
        self._work.save(state)
        self._stamps = {index: stamp for index, stamp in self._stamps.items() if index >= state.unit - 1}
        # Only now: the state just replaced still referred to these files.
        for part in before:
            if part.name not in self._made:
                for path in part.paths(self._work.parts):
                    path.unlink(missing_ok=True)

    def _split(self, writer: StoreWriter) -> None:
        work = self._work
        if self._options.validation_fraction > 0:
            kept = writer.tail_state(self._options.validation_fraction)
            folder = work.store / VALIDATION_FOLDER
            # A partial copy, of a run killed in this phase.
            shutil.rmtree(folder, ignore_errors=True)
            with writer.copy_tail(kept, folder) as tail:
                tail.finish(self.source.manifest_sha256, self._arguments)
            # Record the copy before the store is cut: a kill in between must not lose the tail.
            work.save(replace(work.state, phase=SPLIT, writer=kept))
            writer.resume(kept)

    def _finish(self, writer: StoreWriter) -> None:
        work = self._work
        folder = work.store / TOKENIZER_FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        self._tokenizer.save(folder)
        writer.finish(self.source.manifest_sha256, self._arguments)
        work.save(replace(work.state, phase=MOVING, meta_sha256=meta_sha256(work.store)))


def _place(options: PrepareOptions, work: WorkFolder, out: Path, **facts: Any) -> Prepared:
    work.move_to(out, options.overwrite)
    held_out = out / VALIDATION_FOLDER
    validation = read_meta(held_out) if held_out.exists() else None
    return Prepared(read_meta(out), validation, work.state.counts, work.state.counts.get(CONTROL_IDS, 0), **facts)


def describe_left_out(counts: Mapping[str, int], options: PrepareOptions) -> str:
    """Describe the documents that were left out, for messages; "" if there are none."""
    kinds = {
        LeftOut.null: "that are null",
        LeftOut.large: f"of more than {options.max_document_bytes:,} bytes",
        LeftOut.short: "without text" if options.min_tokens == 1 else f"of fewer than {options.min_tokens} tokens",
    }
    found = [f"{counts[kind.name]} documents {text}" for kind, text in kinds.items() if counts.get(kind.name)]
    return f"left out {', '.join(found)}" if found else ""


def _check_options(options: PrepareOptions) -> None:
    if not 0 <= options.validation_fraction < 1:
        raise ConfigError("--validation-fraction", options.validation_fraction, "allowed: from 0 to less than 1")
    for name in ("workers", "min_tokens", "max_document_bytes", "max_tokens", "shard_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "allowed: 1 or more")
    if options.control_strings not in ("text", "ids"):
        raise ConfigError("--control-strings", options.control_strings, "allowed: text, ids")
    named: list[tuple[str, str | Path]] = [("--out", options.out), ("--tokenizer", options.tokenizer)]
    named += [("SOURCE", source) for source in options.sources]
    named += [] if options.dataset is None else [("--dataset", options.dataset.name)]
    for name, path in named:
        check_path(name, path)
    if not options.out.resolve().name:
        raise ConfigError("--out", options.out, "must be a folder that holds nothing else")
    if bool(options.sources) == (options.dataset is not None):
        allowed = "give either SOURCE (files and folders) or --dataset (or a --recipe, which names one)"
        raise ConfigError("SOURCE", " ".join(map(str, options.sources)), allowed)


def _arguments(options: PrepareOptions) -> dict[str, Any]:
    # Those that determine the tokens, besides the tokenizer, as recorded in meta.json.
    source: dict[str, Any] = {"sources": [str(path) for path in options.sources]}
    if any(is_saved_dataset(path) for path in options.sources):
        source["split"] = options.split
    if options.dataset is not None:
        source = {key: value for key, value in asdict(options.dataset).items() if value is not None}
    source |= {} if options.eos is None else {"eos": options.eos}
    names = ("text_field", "control_strings", "min_tokens", "max_document_bytes", "max_tokens", "validation_fraction")
    return {**dict(options.about), **source, **{name: getattr(options, name) for name in names}}


def _next_stamp(before: str, unit: Unit) -> str:
    return hashlib.sha256((before + unit.stamp).encode()).hexdigest()


def _check_out(out: Path, overwrite: bool) -> None:
    with read_errors(out, "choose another --out"):
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
    check_replaceable(out)
    if not overwrite:
        raise DataError(out, "exists already", "give --overwrite to replace it; nothing was changed")


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(_BLOCK_BYTES, size))):
            size -= len(block)
            yield block


class _Lines(tqdm):
    # Where stderr is no terminal.
    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """Print each state as a line."""
        return lambda text: print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print no empty line."""


def _display(source: DocumentSource, done: float) -> tqdm:
    # A bar, or a line every 10 s.
    options: dict[str, Any] = {"total": source.total, "initial": done, "unit_scale": True, "desc": "prepare"}
    options["unit"] = unit = "B" if source.amount == "bytes" else f" {source.amount}"
    if sys.stderr.isatty():
        return tqdm(**options)
    line = f"{{desc}}: {{n_fmt}} of {{total_fmt}}{unit} ({{percentage:.1f}}%), {{remaining}} left{{postfix}}"
    return _Lines(**options, bar_format=line, mininterval=_LINE_SECONDS, delay=_LINE_SECONDS)
