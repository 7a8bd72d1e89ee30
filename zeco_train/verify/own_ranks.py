"""Ranks that a command starts itself, processes on this machine's CPU: `verify`, of more ranks than were launched."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeco_train.system.signals import die_with_launcher

T = TypeVar("T")
# Hands in the row of a case: anything that pickles but text.
HandIn = Callable[[Any], None]
# (rank, size, longest wait for a peer, hand in)
Work = Callable[[int, int, timedelta, HandIn], None]


class OwnRanksError(Exception):
    """A rank failed, or no row came in time."""


def rows_of_own_ranks(
    work: Work,
    size: int,
    count: int,
    timeout: timedelta,
    imports: Sequence[str] = ("zeco_train.verify.step_cases",),
) -> Iterator[Any]:
    """Run `work` on `size` new processes over gloo; the `count` rows of its cases as they come.

    Args:
        work: of each rank; one rank hands in the row of each case. Must be importable.
        size: number of ranks.
        count: number of rows.
        timeout: longest wait for a peer, and for the next row.
        imports: modules that are imported once for all ranks, if there are such.

    Raises:
        OwnRanksError: a rank failed, or no row came in time.
    """
    context = multiprocessing.get_context("forkserver")
    # Imports would take each process seconds; a first call of a custom op imports torch._dynamo.
    context.set_forkserver_preload([__name__, "torch._dynamo", *imports])
    with tempfile.TemporaryDirectory(prefix="zeco-verify-") as folder:
        pipes: dict[Connection, BaseProcess] = {}
        try:
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = theirs, work, rank, size, str(Path(folder) / "store"), timeout
                process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes[ours] = process
            yield from itertools.islice(_answers([*pipes], timeout), count)
        finally:
            for pipe, process in pipes.items():
                process.kill()
                process.join()
                pipe.close()


def _answers(pipes: list[Connection], timeout: timedelta) -> Iterator[Any]:
    while pipes:
        # Beyond the ranks' own timeout, whose error says which rank waited for which.
        ready = wait(pipes, timeout.total_seconds() + 15.0)
        if not ready:
            raise OwnRanksError(f"no row within {timeout.total_seconds():g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answer = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            if isinstance(answer, str):
                raise OwnRanksError(answer)
            yield answer
    raise OwnRanksError("its ranks ended before they had all rows")


def _serve(pipe: Connection, work: Work, rank: int, size: int, store: str, timeout: timedelta) -> None:
    die_with_launcher()
    # A terminal sends it to every process of the job; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher's variables are of its own ranks.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)

    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
        work(rank, size, timeout, pipe.send)
        # Until every peer has received everything.
        dist.barrier()
    except BaseException as error:  # a fault that is to be found may raise anything
        *_, frame = traceback.extract_tb(error.__traceback__)
        text = (str(error) or frame.line or "").partition("\n")[0]
        with contextlib.suppress(OSError):  # whoever reads has ended
            pipe.send(
                f"rank {rank} of {size}: {type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
            )
    # Skip interpreter finalisation: destroying a group with pending operations would block.
    os._exit(0)


@dataclass(frozen=True)
class Team:
    """Some of the ranks, which share a sequence.

    Attributes:
        size: number of members.
        rank: of this process among them; < 0: it is none of them.
        scans, halos: groups of forward and of reverse scans.
        attention: group of softmax attention.
        control: group for the exchange of references and results.
    """

    size: int
    rank: int
    scans: tuple[ProcessGroup, ProcessGroup]
    halos: tuple[ProcessGroup, ProcessGroup]
    attention: ProcessGroup
    control: ProcessGroup

    @classmethod
    def make(cls, members: Sequence[int], rank: int, timeout: timedelta) -> Team:
        """Collective over the world."""
        groups = [dist.new_group(list(members), timeout=timeout) for _ in range(6)]
        own = members.index(rank) if rank in members else -1
        return cls(len(members), own, (groups[0], groups[1]), (groups[2], groups[3]), groups[4], groups[5])

    def share(self, makers: Sequence[Callable[[], T]]) -> list[T]:
        """The results of functions, each of which one member calls. Collective."""
        own = {number: make() for number, make in enumerate(makers) if number % self.size == self.rank}
        found: dict[int, T] = {}
        for part in self.gather(own):
            found |= part
        return [found[number] for number in range(len(makers))]

    def gather(self, value: T) -> list[T]:
        """The values of all members. Collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values
