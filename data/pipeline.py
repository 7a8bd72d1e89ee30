"""Units of text to parts of token files, in this process or in several, always in the order of the units."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.sources import SourceProblem, Unit, read_unit
from data.store import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer
from zeco_train.errors import DataError

_ENCODE_CHARACTERS = 1 << 18
_ENCODE_DOCUMENTS = 256

cached_tokenizer = functools.cache(load_tokenizer)


@dataclass(frozen=True)
class Job:
    """What every unit is done with.

    Attributes:
        tokenizer: as in `load_tokenizer`.
        text_field: field of .jsonl lines and column of .parquet files.
        min_tokens: shorter documents, end of sequence not counted, are left out.
        folder: where the parts go; the caller deletes each after use.
    """

    tokenizer: str
    text_field: str
    min_tokens: int
    folder: Path


@dataclass(frozen=True)
class Part:
    """The documents of one unit: their ids in the file `path` (in the store's dtype) and their lengths.

    Attributes:
        short_documents: how many were left out.
        source_bytes: size of the unit.
    """

    path: Path
    lengths: NDArray[np.int64]
    short_documents: int
    source_bytes: int


def tokenize_unit(job: Job, index: int, unit: Unit) -> Part:
    """Write unit `index` as a part. Memory is that of one document, or of some 262,144 characters of short ones.

    Raises:
        SourceProblem: the text cannot be used.
    """
    tokenizer = cached_tokenizer(job.tokenizer)
    path = job.folder / f"part-{index:010d}.bin"
    lengths: list[int] = []
    short, characters, pending = 0, 0, list[str]()
    with path.open("wb") as file:
        for text in read_unit(unit, job.text_field):
            pending.append(text)
            characters += len(text)
            if characters >= _ENCODE_CHARACTERS or len(pending) >= _ENCODE_DOCUMENTS:
                short += _write_documents(file, tokenizer, pending, job.min_tokens, lengths)
                pending, characters = [], 0
        if pending:
            short += _write_documents(file, tokenizer, pending, job.min_tokens, lengths)
    return Part(path, np.asarray(lengths, dtype=np.int64), short, unit.size)


def tokenize_units(job: Job, units: Iterator[Unit], workers: int) -> Generator[Part, None, None]:
    """Yield the parts of `units` in order; with more than one worker, from as many processes.

    The processes end with this generator and with this process, also if it is killed.

    Raises:
        SourceProblem: the first unit, in order, whose text cannot be used.
        DataError: a worker process ended by itself.
    """
    if workers == 1:
        yield from (tokenize_unit(job, index, unit) for index, unit in enumerate(units))
        return
    # Fork is not safe beside the threads of tokenizers and pyarrow, so workers start afresh.
    context = multiprocessing.get_context("spawn")
    stop_reader, stop_writer = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(stop_reader,))
    try:
        pending: deque[Future[Part]] = deque()
        for index, unit in enumerate(units):
            pending.append(_submit(executor, job, index, unit))
            if len(pending) == 2 * workers:  # bounds the parts that wait on disk
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        executor.shutdown()
    except BrokenProcessPool as error:
        problem = "a worker process ended by itself (out of memory?)"
        raise DataError("data.prepare", problem, "use fewer --workers") from error
    finally:
        # After an error or an interrupt this ends the workers at once; otherwise they are gone by now.
        stop_writer.close()
        executor.shutdown(cancel_futures=True)
        stop_reader.close()


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
        document = np.empty(len(ids) + 1, dtype=token_dtype(tokenizer.vocab_size))
        document[:-1] = ids
        document[-1] = tokenizer.eos_id
        file.write(document.data)
        lengths.append(len(document))
    return short


def _submit(executor: ProcessPoolExecutor, job: Job, index: int, unit: Unit) -> Future[Part]:
    """Submit with SIGINT blocked: a process started here inherits that, so Ctrl-C is the parent's to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(tokenize_unit, job, index, unit)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(stop_reader: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, args=(stop_reader,), daemon=True).start()


def _exit_with_parent(stop_reader: Connection) -> None:
    # Nothing is ever sent: the pipe becomes readable when its only writer, the parent, closes it or dies.
    stop_reader.poll(None)
    os._exit(1)
