"""Tokenises units of text into part files, in this process or in workers, always in document order."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
from zeco_train.errors import DataError, ZecoError

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
    """Makes the parts of units."""

    def __init__(self, job: Preparation) -> None:
        self._job, self._with_control = job, job.options.control_strings == "ids"
        self._tokenizer = cached_tokenizer(job.options.tokenizer, job.options.eos)
        self._is_control = np.zeros(self._tokenizer.vocab_size, dtype=bool)
        self._is_control[list(self._tokenizer.control_ids)] = True

    def parts(self, index: int, unit: Unit, first: int) -> Iterator[Part]:
        """Write the parts of unit `index` from its document `first` on, each as it is taken. Raises DataError.

        Holds one document in memory, or about 262,144 characters of short ones.
        """
        job, options, ended = self._job, self._job.options, False
        texts = job.source.read(unit, first)
        while not ended:
            name = f"part-{index:010d}-{first:010d}"
            lengths: list[int] = []
            documents, characters, counts = 0, 0, Counter[str]()
            with (job.parts / f"{name}.bin").open("wb") as file:
                while not ended and characters < options.part_characters:
                    most = min(_ENCODE_CHARACTERS, options.part_characters - characters)
                    pending, size = _take(texts, most, options.max_document_bytes)
                    # Only an empty read shows the end: a unit whose last document fills a part has an empty part more.
                    ended = size == 0 and not pending
                    documents += len(pending)
                    characters += size
                    counts += self._write(file, pending, lengths)
            np.save(job.parts / f"{name}.npy", np.asarray(lengths, dtype=np.int64))
            amount = unit.size if ended else 0
            yield Part(index, unit.stamp, first, documents, ended, name, sum(lengths), dict(counts), amount)
            first += documents

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


def tokenize_units(
    job: Preparation, units: Iterator[tuple[int, Unit]], workers: int, first: int, made: dict[str, Part]
) -> Generator[Part, None, None]:
    """Yield the parts of numbered `units` in order; with more than one worker, made ahead by worker processes.

    Two units per worker are in progress at a time, which bounds the parts waiting on disk. The workers end with this
    generator, and when this process is gone.

    Args:
        workers: number of processes; 1: this process does the work.
        first: documents to skip in the first unit.
        made: parts in the job's folder, by name; matching parts of an earlier run are reused, and new ones are added.
            The caller removes the parts it has consumed.

    Raises:
        DataError: unusable text, of the first such unit in their order; a worker process died.
    """
    tasks = _tasks(units, first, list(made.values()))
    if workers == 1:
        tokenizer = UnitTokenizer(job)
        for index, unit, first, found in tasks:
            yield from found
            for part in tokenizer.parts(index, unit, first) if not _is_done(found) else ():
                made[part.name] = part
                yield part
        return
    with _started(job, workers) as idle:
        # The parts of each unit in order that are not yielded yet, or behind them what its worker raised.
        ahead: deque[deque[Part | Exception]] = deque()
        busy: dict[Connection, deque[Part | Exception]] = {}
        while True:
            while idle and len(ahead) < 2 * workers and (task := next(tasks, None)) is not None:
                *of_worker, found = task
                ahead.append(deque(found))
                if not _is_done(found):
                    pipe = idle.pop()
                    busy[pipe] = ahead[-1]
                    with _death_is_explained():
                        pipe.send(of_worker)
            if not ahead:
                return
            if ahead[0]:
                answer = ahead[0].popleft()
                if isinstance(answer, Exception):
                    raise answer
                if answer.ended:
                    ahead.popleft()
                yield answer
                continue
            for ready in wait([*busy]):
                assert isinstance(ready, Connection)
                with _death_is_explained():
                    answer = ready.recv()
                busy[ready].append(answer)
                if isinstance(answer, Part):
                    made[answer.name] = answer
                if isinstance(answer, Exception) or answer.ended:
                    del busy[ready]
                    idle.append(ready)


def _tasks(
    units: Iterator[tuple[int, Unit]], first: int, made: list[Part]
) -> Iterator[tuple[int, Unit, int, list[Part]]]:
    # Number, unit, its document to begin with, and the parts before that one.
    made.sort(key=lambda part: part.first)
    for index, unit in units:
        found: list[Part] = []
        for part in made:
            if part.unit == index and part.stamp == unit.stamp and part.first == first:
                found.append(part)
                first += part.documents
        yield index, unit, first, found
        first = 0


def _is_done(found: list[Part]) -> bool:
    return bool(found) and found[-1].ended


@contextmanager
def _death_is_explained() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        problem = "a worker process ended by itself (out of memory?)"
        raise DataError("data.prepare", problem, "use fewer --workers") from error


@contextmanager
def _started(job: Preparation, workers: int) -> Iterator[list[Connection]]:
    # Processes that make the parts of a unit each time they are sent its number, the unit and the first document.
    # Spawn: fork is unsafe with the threads of tokenizers and pyarrow.
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    # Signals that a terminal sends to all processes; children inherit the setting.
    of_terminals = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, of_terminals)
    try:
        try:
            # A process, too, whose start unblocks SIGINT.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, of_terminals)
            for _ in range(workers):
                ours, theirs = context.Pipe()
                processes.append(context.Process(target=_work, args=(theirs, job), daemon=True))
                processes[-1].start()
                # With this end, too, the worker's end would go unnoticed.
                theirs.close()
                pipes.append(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield list(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _work(pipe: Connection, job: Preparation) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # Once the parent has ended, killed or not.
    with suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                for part in UnitTokenizer(job).parts(*task):
                    pipe.send(part)
            except Exception as error:
                if not isinstance(error, ZecoError):
                    error.add_note(traceback.format_exc())
                try:
                    pickle.loads(pickle.dumps(error))
                except Exception:
                    # A library's own, which the parent could not make again.
                    error = DataError("a worker process", f"{type(error).__name__} ({error})")
                pipe.send(error)


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
