"""Units of text to parts of token files, in this process or in several, always in the order of the documents."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.readers import SourceProblem
from data.sources import Source, Unit
from data.store import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer
from zeco_train.errors import DataError

PART_CHARACTERS = 1 << 23
_ENCODE_CHARACTERS = 1 << 18
_ENCODE_DOCUMENTS = 256

_tokenizers: dict[str, Tokenizer] = {}


def cached_tokenizer(name: str, download: bool = False) -> Tokenizer:
    """As `load_tokenizer`, once a process."""
    if name not in _tokenizers:
        _tokenizers[name] = load_tokenizer(name, download)
    return _tokenizers[name]


@dataclass(frozen=True, eq=False)
class Job:
    """What every unit is done with.

    Attributes:
        source: where the text is from.
        tokenizer: as in `load_tokenizer`.
        min_tokens: shorter documents, end of sequence not counted, are left out.
        folder: where the parts go; the caller deletes each after use.
        part_characters: where a part ends, at the next document; a unit may have several.
    """

    source: Source
    tokenizer: str
    min_tokens: int
    folder: Path
    part_characters: int = PART_CHARACTERS


@dataclass(frozen=True)
class Part:
    """Some documents of a unit, tokenised.

    Attributes:
        unit: the unit's number, and `stamp` its stamp.
        first, documents: the number in the unit of the first document, and how many were read.
        ended: whether the unit has no more.
        name: of the file of ids, in the store's dtype, in the job's folder; their lengths are beside it.
        num_tokens: in the file.
        short_documents: how many of the documents were left out.
        amount: how much of the source is done with it, in its `amount`s: the unit's size with its last part.
    """

    unit: int
    stamp: str
    first: int
    documents: int
    ended: bool
    name: str
    num_tokens: int
    short_documents: int
    amount: float

    def paths(self, folder: Path) -> tuple[Path, Path]:
        """The files of the ids and of the documents' lengths ([documents kept] int64)."""
        return folder / f"{self.name}.bin", folder / f"{self.name}.npy"


class UnitTokenizer:
    """Makes the parts of units. Units that are not at their end stay open, for their next part."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer = cached_tokenizer(job.tokenizer)
        self._open: dict[int, tuple[int, Iterator[str]]] = {}

    def part(self, index: int, unit: Unit, first: int) -> Part:
        """Write the part of unit `index` that begins with its document `first`.

        Memory is that of one document, or of some 262,144 characters of short ones.

        Raises:
            SourceProblem: the text cannot be used.
        """
        job = self._job
        position, texts = self._open.pop(index, (-1, iter(())))
        if position != first:
            texts = job.source.read(unit, first)
        name = f"part-{index:010d}-{first:010d}"
        lengths: list[int] = []
        documents, short, characters, ended = 0, 0, 0, False
        with (job.folder / f"{name}.bin").open("wb") as file:
            while not ended and characters < job.part_characters:
                pending, size = _take(texts, min(_ENCODE_CHARACTERS, job.part_characters - characters))
                ended = size == 0 and not pending
                documents += len(pending)
                characters += size
                if pending:
                    short += _write_documents(file, self._tokenizer, pending, job.min_tokens, lengths)
        np.save(job.folder / f"{name}.npy", np.asarray(lengths, dtype=np.int64))
        if not ended:
            self._open[index] = first + documents, texts
        amount = unit.size if ended else 0
        return Part(index, unit.stamp, first, documents, ended, name, sum(lengths), short, amount)


@dataclass
class _Lane:
    """A unit whose parts are made one after the other, ahead of those who need them.

    Attributes:
        parts: made, and not yet given out.
        first: the document that the next part begins with.
        pending: the next part, where it is being made; `worker` says by whom.
    """

    index: int
    unit: Unit
    first: int
    parts: deque[Part] = field(default_factory=deque)
    ended: bool = False
    pending: Future[Part] | None = None
    worker: int = -1

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.first, self.ended = part.first + part.documents, part.ended


def tokenize_units(
    job: Job,
    units: Iterator[tuple[int, Unit]],
    workers: int,
    first: int = 0,
    made: dict[str, Part] | None = None,
) -> Generator[Part, None, None]:
    """Yield the parts of numbered `units` in order; with more than one worker, made ahead by as many processes.

    Two units a worker are under way at a time, which bounds the parts that wait on disk. The processes end with this
    generator and with this process, also if it is killed.

    Args:
        first: documents of the first unit that are not wanted.
        made: parts that are in the job's folder, by name; those of an earlier run are used where they fit, and new ones
            are added. The caller takes out what it has had.

    Raises:
        SourceProblem: the first unit, in order, whose text cannot be used.
        DataError: a worker process ended by itself.
    """
    made = {} if made is None else made
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


class _Pool:
    """Worker processes, each with a queue of its own, so that a unit that is open stays where it is open."""

    def __init__(self, job: Job, workers: int) -> None:
        # Fork is not safe beside the threads of tokenizers and pyarrow, so workers start afresh.
        context = multiprocessing.get_context("spawn")
        self._stop_reader, self._stop_writer = context.Pipe(duplex=False)
        self._executors = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_start_worker, initargs=(self._stop_reader, job))
            for _ in range(workers)
        ]
        self._load = [0] * workers

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for executor in self._executors:
                executor.shutdown()
        # After an error or an interrupt this ends the workers at once; otherwise they are gone by now.
        self._stop_writer.close()
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)
        self._stop_reader.close()

    def submit(self, lane: _Lane) -> None:
        """Have the lane's next part made, if it has one; a new lane goes to the worker with the least to do."""
        if lane.ended:
            return
        if lane.worker < 0:
            lane.worker = self._load.index(min(self._load))
            self._load[lane.worker] += 1
        # SIGINT is blocked meanwhile: a process started here inherits that, so Ctrl-C is the parent's to answer.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            executor = self._executors[lane.worker]
            lane.pending = executor.submit(_part_in_worker, lane.index, lane.unit, lane.first)
        except BrokenProcessPool as error:
            raise _worker_died() from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def harvest(self, lanes: deque[_Lane]) -> list[Part]:
        """Wait for a part of any lane; take all that are there, and have the next ones made. Returns them.

        An error of the first lane is raised; those of others keep until they are first, as in a single process.
        """
        head = lanes[0]
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
    problem = "a worker process ended by itself (out of memory?)"
    return DataError("data.prepare", problem, "use fewer --workers")


def _take(texts: Iterator[str], most: int) -> tuple[list[str], int]:
    """The next documents, up to the one that reaches `most` characters, and their characters; none at the end."""
    taken: list[str] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= most or len(taken) >= _ENCODE_DOCUMENTS:
            break
    return taken, size


def _write_documents(
    file: BinaryIO, tokenizer: Tokenizer, texts: list[str], min_tokens: int, lengths: list[int]
) -> int:
    """Append the documents and their lengths; returns how many were too short."""
    short = 0
    for ids in tokenizer.encode(texts):
        if len(ids) < min_tokens:
            short += 1
            continue
        if int(ids.max(initial=0)) >= tokenizer.vocab_size:
            problem = f"gives id {ids.max()}, beyond its vocabulary of {tokenizer.vocab_size}"
            raise SourceProblem(tokenizer.info.get("path", "tokenizer"), problem, "repair the tokenizer's files")
        document: NDArray[np.unsignedinteger] = np.empty(len(ids) + 1, dtype=token_dtype(tokenizer.vocab_size))
        document[:-1] = ids
        document[-1] = tokenizer.eos_id
        file.write(document.data)
        lengths.append(len(document))
    return short


_job: Job | None = None
_unit_tokenizer = functools.cache(UnitTokenizer)


def _start_worker(stop_reader: Connection, job: Job) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, args=(stop_reader,), daemon=True).start()
    _job = job


def _part_in_worker(index: int, unit: Unit, first: int) -> Part:
    # Made here, on first use, and not in the initializer, whose errors reach nobody.
    assert _job is not None
    return _unit_tokenizer(_job).part(index, unit, first)


def _exit_with_parent(stop_reader: Connection) -> None:
    # Nothing is ever sent: the pipe becomes readable when its only writer, the parent, closes it or dies.
    stop_reader.poll(None)
    os._exit(1)
