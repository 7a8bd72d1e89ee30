"""Tokenises units of text into part files, in this process or in workers, always in document order."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.sources import DOCUMENT_BYTES, UNIT_BYTES, DocumentSource, Unit
from data.sources.hugging_face import DatasetSpec
from data.sources.readers import Document, LeftOut
from data.store import token_dtype
from data.store.writer import SHARD_TOKENS
from data.tokenizer import BYTES, Tokenizer, load_tokenizer
from zeco_train.errors import DataError

# In `Part.counts`: control ids inside documents.
CONTROL_IDS = "control_ids"
PART_CHARACTERS = 1 << 23
_ENCODE_CHARACTERS = 1 << 18
_ENCODE_DOCUMENTS = 256

_tokenizers: dict[tuple[str, str | None], Tokenizer] = {}


def cached_tokenizer(name: str, eos: str | None, download: bool = False) -> Tokenizer:
    """`load_tokenizer`, cached per process."""
    if (name, eos) not in _tokenizers:
        _tokenizers[name, eos] = load_tokenizer(name, download, eos)
    return _tokenizers[name, eos]


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a preparation; `python -m data.prepare --help` explains those that it has."""

    sources: tuple[Path, ...]  # files and folders, or one folder written by save_to_disk of `datasets`
    out: Path  # the store's folder
    dataset: DatasetSpec | None = None  # instead of `sources`, a hub or local data set, loaded by `datasets`
    split: str = "train"  # of a folder of save_to_disk
    tokenizer: str = BYTES  # or the local path of a Hugging Face tokenizer, or its name on the hub
    eos: str | None = None  # end-of-document token; None: the tokenizer's own
    control_strings: str = "text"  # what control strings in a document become, such as "</s>"; or "ids", control ids
    text_field: str = "text"  # of .jsonl lines, column of .parquet and .arrow files and of data sets
    validation_fraction: float = 0.0
    workers: int | None = None  # one per CPU, one for a small corpus
    min_tokens: int = 1  # shorter documents, end of sequence not counted, are dropped
    # Documents with more bytes of UTF-8 are left out; in .jsonl files, lines with more bytes.
    max_document_bytes: int = DOCUMENT_BYTES
    max_tokens: int | None = None  # stop with the document that reaches this count
    shard_tokens: int = SHARD_TOKENS
    overwrite: bool = False  # replace an existing store, or an interrupted preparation with other arguments
    about: tuple[tuple[str, str], ...] = ()  # extra entries for the store's meta.json: a recipe's name and licence
    unit_bytes: int = UNIT_BYTES  # of a worker's input
    # A part ends with the document that reaches this size; a unit may have several parts.
    part_characters: int = PART_CHARACTERS
    save_seconds: float = 10.0  # between saves of the state; an interruption loses at most this much work


@dataclass(frozen=True, eq=False)
class Preparation:
    """What is the same for all units: `parts` is the output folder, whose files the caller deletes after use."""

    source: DocumentSource
    parts: Path
    options: PrepareOptions


@dataclass(frozen=True)
class Part:
    """Some tokenised documents of a unit."""

    unit: int
    stamp: str  # of the unit
    first: int  # number of the first document in the unit
    documents: int  # how many were read
    ended: bool  # this is the unit's last part
    name: str  # stem of two files: the ids in the store's dtype, and the documents' lengths
    num_tokens: int
    counts: dict[str, int]  # documents that were left out, by the names of `LeftOut`; and CONTROL_IDS
    amount: float  # progress in the source's `amount` unit: the unit's size for its last part, else 0

    def paths(self, folder: Path) -> tuple[Path, Path]:
        """The files of the ids and of the kept documents' lengths ([documents] int64)."""
        return folder / f"{self.name}.bin", folder / f"{self.name}.npy"


class UnitTokenizer:
    """Makes the parts of units. Unfinished units stay open for their next part."""

    def __init__(self, job: Preparation) -> None:
        self._job, self._with_control = job, job.options.control_strings == "ids"
        self._tokenizer = cached_tokenizer(job.options.tokenizer, job.options.eos)
        self._is_control = np.zeros(self._tokenizer.vocab_size, dtype=bool)
        self._is_control[list(self._tokenizer.control_ids)] = True
        self._open: dict[int, tuple[int, Iterator[Document]]] = {}

    def part(self, index: int, unit: Unit, first: int) -> Part:
        """Write the part of unit `index` that begins with its document `first`. Raises DataError.

        Holds one document in memory, or about 262,144 characters of short ones.
        """
        job, options = self._job, self._job.options
        position, texts = self._open.pop(index, (-1, iter(())))
        # The unit is not open here: it is new, or its last part was made by an earlier run.
        if position != first:
            texts = job.source.read(unit, first)
        name = f"part-{index:010d}-{first:010d}"
        lengths: list[int] = []
        documents, characters, ended, counts = 0, 0, False, Counter[str]()
        with (job.parts / f"{name}.bin").open("wb") as file:
            while not ended and characters < options.part_characters:
                most = min(_ENCODE_CHARACTERS, options.part_characters - characters)
                pending, size = _take(texts, most, options.max_document_bytes)
                # Only an empty read shows the end, so a unit whose last document fills a part gets an empty part more.
                ended = size == 0 and not pending
                documents += len(pending)
                characters += size
                counts += self._write(file, pending, lengths)
        np.save(job.parts / f"{name}.npy", np.asarray(lengths, dtype=np.int64))
        if not ended:
            self._open[index] = first + documents, texts
        amount = unit.size if ended else 0
        return Part(index, unit.stamp, first, documents, ended, name, sum(lengths), dict(counts), amount)

    def _write(self, file: BinaryIO, found: list[Document], lengths: list[int]) -> Counter[str]:
        tokenizer = self._tokenizer
        counts = Counter(document.name for document in found if isinstance(document, LeftOut))
        texts = [document for document in found if isinstance(document, str)]
        for ids in tokenizer.encode(texts, control=self._with_control) if texts else []:
            if len(ids) < self._job.options.min_tokens:
                counts[LeftOut.short.name] += 1
                continue
            if int(ids.max(initial=0)) >= tokenizer.vocab_size:
                problem = f"gives id {ids.max()}, beyond its vocabulary of {tokenizer.vocab_size}"
                raise self._problem(problem, "repair the tokenizer's files")
            control = ids[self._is_control[ids]] if tokenizer.control_ids else ids[:0]
            if len(control) and not self._with_control:
                # The string is a piece of the tokenizer's model, too, not only an added token.
                problem = f"gives control id {control[0]} for the text {tokenizer.control_ids[int(control[0])]!r}"
                raise self._problem(f"{problem} of a document", "--control-strings ids allows and counts such ids")
            counts[CONTROL_IDS] += len(control)
            document: NDArray[np.unsignedinteger] = np.empty(len(ids) + 1, dtype=token_dtype(tokenizer.vocab_size))
            document[:-1] = ids
            document[-1] = tokenizer.eos_id
            file.write(document.data)
            lengths.append(len(document))
        return counts

    def _problem(self, problem: str, remedy: str) -> DataError:
        return DataError(self._tokenizer.info.get("path", "tokenizer"), problem, remedy)


@dataclass
class _Lane:
    # A unit whose parts are prefetched one after the other.
    index: int
    unit: Unit
    first: int  # document of the next part
    parts: deque[Part] = field(default_factory=deque)  # finished, but not yet yielded
    ended: bool = False
    pending: Future[Part] | None = None  # the next part if it is in progress, in process `worker`
    worker: int = -1

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.first, self.ended = part.first + part.documents, part.ended


def tokenize_units(
    job: Preparation, units: Iterator[tuple[int, Unit]], workers: int, first: int, made: dict[str, Part]
) -> Generator[Part, None, None]:
    """Yield the parts of numbered `units` in order; with more than one worker, prefetched by worker processes.

    Two units per worker are in progress at a time, which bounds the parts waiting on disk. The workers end with this
    generator and with this process, even if it is killed.

    Args:
        workers: number of processes; 1: this process does the work.
        first: documents to skip in the first unit.
        made: parts in the job's folder, by name; matching parts of an earlier run are reused, and new ones are added.
            The caller removes the parts it has consumed.

    Raises:
        DataError: unusable text, of the first such unit in their order; a worker process died.
    """
    lanes = _lanes(units, first, list(made.values()))
    if workers == 1:
        tokenizer = UnitTokenizer(job)
        for lane in lanes:
            yield from lane.parts
            while not lane.ended:
                lane.add(tokenizer.part(lane.index, lane.unit, lane.first))
                made[lane.parts[-1].name] = lane.parts[-1]
                yield lane.parts.pop()
        return
    with _Pool(job, workers) as pool:
        ahead: deque[_Lane] = deque()
        while True:
            while len(ahead) < 2 * workers and (next_lane := next(lanes, None)):
                pool.submit(next_lane)
                ahead.append(next_lane)
            if not ahead:
                return
            lane = ahead[0]
            if lane.parts:
                yield lane.parts.popleft()
            elif lane.ended:
                ahead.popleft()
            else:
                made.update((part.name, part) for part in pool.harvest(ahead))


def _lanes(units: Iterator[tuple[int, Unit]], first: int, made: list[Part]) -> Generator[_Lane, None, None]:
    by_unit: dict[int, list[Part]] = {}
    for part in sorted(made, key=lambda part: part.first):
        by_unit.setdefault(part.unit, []).append(part)
    for index, unit in units:
        lane = _Lane(index, unit, first)
        for part in by_unit.get(index, ()):
            if part.stamp == unit.stamp and part.first == lane.first:
                lane.add(part)
        yield lane
        first = 0


@contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    # Those that a terminal sends to all processes; processes started here inherit that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pool:
    """Worker processes, each with its own queue, so that an open unit stays with its worker."""

    def __init__(self, job: Preparation, workers: int) -> None:
        # Spawn: fork is unsafe with the threads of tokenizers and pyarrow.
        context = multiprocessing.get_context("spawn")
        self._stop_reader, self._stop_writer = context.Pipe(duplex=False)
        create = functools.partial(
            ProcessPoolExecutor, 1, mp_context=context, initializer=_start_worker, initargs=(self._stop_reader, job)
        )
        # The first one starts Python's resource tracker.
        with _terminal_signals_blocked():
            self._executors = [create() for _ in range(workers)]
        self._load = [0] * workers

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for executor in self._executors:
                executor.shutdown()
        # After an error or an interrupt this ends the workers at once; otherwise they have already exited.
        self._stop_writer.close()
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)
        self._stop_reader.close()

    def submit(self, lane: _Lane) -> None:
        # The lane's next part, if any; a new lane goes to the least loaded worker.
        if lane.ended:
            return
        if lane.worker < 0:
            lane.worker = self._load.index(min(self._load))
            self._load[lane.worker] += 1
        try:
            with _terminal_signals_blocked():
                executor = self._executors[lane.worker]
                lane.pending = executor.submit(_part_in_worker, lane.index, lane.unit, lane.first)
        except BrokenProcessPool as error:
            raise _worker_died() from error

    def harvest(self, lanes: deque[_Lane]) -> list[Part]:
        """Wait for a part of any lane; collect and return all finished parts, and submit the next ones.

        Raises an error of the first lane; errors of others wait until their lane is first, as in a single process.
        """
        head = lanes[0]
        # Without failed lanes behind the first: they are done, so `wait` would return at once, again and again.
        busy = {lane.pending for lane in lanes if lane.pending and (lane is head or not _failed(lane.pending))}
        wait(busy, return_when=FIRST_COMPLETED)
        new: list[Part] = []
        for lane in lanes:
            if lane.pending is None or not lane.pending.done() or (lane is not head and _failed(lane.pending)):
                continue
            try:
                new.append(lane.pending.result())
                lane.add(new[-1])
            except BrokenProcessPool as error:
                raise _worker_died() from error
            lane.pending = None
            self.submit(lane)
            if lane.ended:
                self._load[lane.worker] -= 1
        return new


def _failed(future: Future[Part]) -> bool:
    return future.done() and future.exception() is not None


def _worker_died() -> DataError:
    return DataError("data.prepare", "a worker process ended by itself (out of memory?)", "use fewer --workers")


def _take(texts: Iterator[Document], most: int, most_bytes: int) -> tuple[list[Document], int]:
    taken: list[Document] = []
    size = 0
    for text in texts:
        # A character has 4 bytes at most.
        is_large = isinstance(text, str) and len(text) * 4 > most_bytes and len(text.encode()) > most_bytes
        taken.append(LeftOut.large if is_large else text)
        size += len(text) if isinstance(text, str) else 0
        if size >= most or len(taken) >= _ENCODE_DOCUMENTS:
            break
    return taken, size


_job: Preparation | None = None
_unit_tokenizer = functools.cache(UnitTokenizer)


def _start_worker(stop_reader: Connection, job: Preparation) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, args=(stop_reader,), daemon=True).start()
    _job = job


def _part_in_worker(index: int, unit: Unit, first: int) -> Part:
    # Created on first use rather than in the initializer, whose errors are not propagated.
    assert _job is not None
    return _unit_tokenizer(_job).part(index, unit, first)


def _exit_with_parent(stop_reader: Connection) -> None:
    # Nothing is ever sent: the pipe becomes readable when the parent, its only writer, closes it or dies.
    stop_reader.poll(None)
    # Not sys.exit, which would end this thread only.
    os._exit(1)
