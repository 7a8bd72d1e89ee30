"""The test suite's only way to run a function on several ranks."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import pickle
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

from tests.support import server


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout: float = 600.0,
    backend: str = "gloo",
    may_die: Collection[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on new processes of one default process group; returns the ranks' results.

    The ranks are forked from a process that has only imported torch and the trainer, since importing them takes each
    rank seconds. First-use costs remain, so let `fn` loop over all cases of a world size and name the case in its
    assertion messages. Ranks inherit this process's current environment, use one thread each, and with `backend="nccl"`
    the CUDA device of their number.

    Args:
        fn: a top-level function of a module that spawned processes can import; `args` must pickle.
        timeout: seconds, after which all ranks are killed. Also the timeout of the process group.
        may_die: ranks that may end without a result, which is None then.
        fresh: start processes without preloaded imports, for settings that must precede an import. With
            TRITON_INTERPRET=1 they are forked from one that has imported the kernels in that mode.

    Raises:
        RankError: a rank raised (the first in time is reported), died, or timed out.
    """
    # A process that has queried CUDA devices must not be forked.
    is_interpreted = backend == "gloo" and os.environ.get("TRITON_INTERPRET") == "1"
    fresh = not is_interpreted and (fresh or "nccl" in backend)
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    with tempfile.TemporaryDirectory(prefix="zeco-test-") as folder:
        store = str(Path(folder) / "store")
        ranks: dict[Connection, tuple[int, BaseProcess]] = {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_run_rank,
                args=(theirs, fn, rank, world_size, store, backend, timeout, dict(os.environ), args),
                daemon=True,
            )
            with contextlib.ExitStack() as stack:
                if not fresh:
                    connect = server.server_of(is_interpreted).connect_to_new_process
                    stack.enter_context(mock.patch.object(forkserver, "connect_to_new_process", connect))
                process.start()
            theirs.close()
            ranks[ours] = (rank, process)
        try:
            return _collect(ranks, time.monotonic() + timeout, timeout, may_die, are_children=fresh)
        finally:
            for connection, (_, process) in ranks.items():
                process.kill()
                process.join()
                connection.close()


def on_ranks(
    world_size: int | None = None, *, may_die: Collection[int] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test `(rank, world_size, ...)`, which runs on so many ranks by `run_distributed`.

    Its other parameters are fixtures or parametrized, and must pickle; `world_size` is parametrized if not given here.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            size = given.pop("world_size") if world_size is None else world_size
            run_distributed(_run_body, size, test, given, may_die=may_die)

        # Not functools.wraps: pytest would look for the fixtures of `body`.
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(body, name))
        own = [*inspect.signature(body).parameters.values()][1 if world_size is None else 2 :]
        test.__signature__, test.body = inspect.Signature(own), body  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(rank: int, world_size: int, test: Any, given: dict[str, Any]) -> None:
    test.body(rank, world_size, **given)


def _collect(
    ranks: dict[Connection, tuple[int, BaseProcess]],
    deadline: float,
    timeout: float,
    may_die: Collection[int],
    *,
    are_children: bool,
) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    failures: list[tuple[float, int, str]] = []
    open_ends = set(ranks)
    while open_ends:
        ready = wait(list(open_ends), max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            waiting = sorted(ranks[end][0] for end in open_ends)
            raise RankError(f"ranks {waiting} of {len(ranks)} did not end within {timeout:g} s")
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            open_ends.remove(end)
            rank, process = ranks[end]
            try:
                moment, result, trace, seconds = pickle.loads(end.recv_bytes())
                # Children are counted when they are joined.
                server.cpu_seconds += 0.0 if are_children else seconds
            except EOFError:
                process.join(5.0)
                moment, result = time.monotonic(), None
                trace = None if rank in may_die else f"vanished with exit code {process.exitcode}"
            results[rank] = result
            if trace is not None:
                failures.append((moment, rank, trace))
                # One rank's failure makes its peers fail a moment later: wait for an earlier cause to be reported.
                deadline = min(deadline, time.monotonic() + 2.0)
    if failures:
        _, rank, trace = min(failures)
        raise RankError(f"rank {rank} of {len(ranks)}: {trace}")
    return results


def _run_rank(
    connection: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    backend: str,
    timeout: float,
    environment: dict[str, str],
    args: tuple[object, ...],
) -> None:
    # Replace the environment of the process it was forked from.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.set_threshold(*server.GARBAGE)
    result, trace = None, None
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        # `new_group` finds the class by this name.
        distributed_c10d.ProcessGroupGloo = _OneLoop  # type: ignore[misc]
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        if backend == "gloo":
            # A rank that is connected could otherwise leave, and close connections that a slower peer still makes.
            dist.barrier()
        result = fn(rank, world_size, *args)
        if backend == "gloo" and dist.is_initialized():
            # It may not leave before its peers have received all that it sent, or while they join groups.
            with contextlib.suppress(RuntimeError):
                dist.barrier()
    except BaseException:  # report every cause, SystemExit included
        trace = traceback.format_exc()
    # By value: tensors in shared memory would be freed when this process ends.
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    connection.send_bytes(pickle.dumps((time.monotonic(), result, trace, seconds)))
    connection.close()
    # Skip interpreter finalisation: destroying a group with pending operations would block.
    os._exit(0 if trace is None else 1)


class _OneLoop(ProcessGroupGloo):
    """A gloo group that shares this process's event loop; its own would wake 100 times a second."""

    _device: ProcessGroupGloo.Device | None = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if _OneLoop._device is None:
            _OneLoop._device = ProcessGroupGloo.create_default_device()
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_OneLoop._device], 2, timeout
        super().__init__(store, rank, size, options)
