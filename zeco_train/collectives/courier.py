"""What carries a scan on between `launch` and `wait`: a thread on CPUs, a stream on CUDA.

With gloo somebody has to fold a block and send it on when it arrives. Were that left to `wait`, a rank busy with its
own compute would hold up all ranks after it. So the steps of a scan are one *job*. On CPUs a courier runs its jobs one
after another on a single background thread (torch operations and gloo's waits release the interpreter lock); on CUDA
the job is enqueued from the caller onto the courier's own stream, which needs no thread.

One courier belongs to one process group. Its jobs run in the order of their launches, which is the same on every rank:
no two scans of a group can meet in different orders.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeco_train.collectives.transition import fold
from zeco_train.errors import CommunicationError


class Promise:
    """A tensor that a job will deliver, or the error that kept it from doing so."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._value: Tensor | None = None
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    def deliver(self, value: Tensor) -> None:
        """Keep the promise; `value` may still be in the making on the current stream."""
        if value.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()
        self._value = value
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """Break the promise, unless it was kept."""
        if not self._settled.is_set():
            self._error = error
            self._settled.set()

    def get(self) -> Tensor:
        """The tensor, once it is there; on CUDA at once, with the current stream made to wait for it.

        Ends in bounded time, because every wait of a job is bounded.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._value.device)
            stream.wait_event(self._ready)
            self._value.record_stream(stream)
        return self._value


class PendingScan:
    """A scan under way (`zeco_train.sp.base.PendingScan`). `incoming` and `carry` are for the job that runs it."""

    def __init__(self, want_carry: bool) -> None:
        self.incoming = Promise()
        self.carry = Promise() if want_carry else None

    def wait(self) -> Tensor:
        """The incoming state, [B, H, K, V]; it may be `carry_in` itself, so it is not to be written to.

        Raises:
            CommunicationError: a peer did not answer in time or is gone, in this scan or an earlier one of the courier.
        """
        return self.incoming.get()

    def finish(self) -> None:
        """Nothing: the courier has long sent this rank's part on."""

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, [B, H, K, V], the same on every rank.

        Raises:
            RuntimeError: the scan was launched without `want_carry=True`.
            CommunicationError: as in `wait`.
        """
        if self.carry is None:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        return self.carry.get()


def scan_alone(state: Tensor, log_decay: Tensor, carry_in: Tensor | None, want_carry: bool) -> PendingScan:
    """The scan over a group of one rank."""
    scan = PendingScan(want_carry)
    incoming = torch.zeros_like(state) if carry_in is None else carry_in
    scan.incoming.deliver(incoming)
    if scan.carry is not None:
        scan.carry.deliver(fold(state, log_decay, incoming))
    return scan


@dataclass
class _Job:
    run: Callable[[], None]
    promises: list[Promise]


@dataclass
class _Lane:
    """What a courier shares with its thread, which must not keep the courier itself alive."""

    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    failure: BaseException | None = None


class Courier:
    """Runs the scans of one process group in launch order.

    After a failure the group's state is unknown (messages may be half delivered): all scans under way and later ones
    raise the first error.
    """

    def __init__(self) -> None:
        self._lane = _Lane()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._tags = 0
        # Also runs at exit; the thread is a daemon besides, so that one stuck in a wait does not delay the exit.
        weakref.finalize(self, self._lane.jobs.put, None)

    @contextlib.contextmanager
    def launching(self, *inputs: Tensor | None) -> Iterator[None]:
        """Surrounds all that a launch does with its inputs: on CUDA it runs on the courier's stream.

        Raises:
            CommunicationError: an earlier scan of this courier failed.
        """
        if self._lane.failure is not None:
            raise self._lane.failure
        tensors = [tensor for tensor in inputs if tensor is not None]
        with torch.no_grad(), self._side_stream(tensors) if tensors[0].is_cuda else contextlib.nullcontext():
            try:
                yield
            except CommunicationError as error:
                self._lane.failure = error
                raise

    @contextlib.contextmanager
    def _side_stream(self, inputs: list[Tensor]) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(inputs[0].device)
        self._stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def take_tags(self, count: int) -> range:
        """Message tags that no other scan of this courier uses; the same on every rank, as launches are."""
        start = self._tags
        # A tag is a C int; by the time that the numbers come round again the early ones are long free.
        self._tags = (start + count) % (1 << 30)
        return range(start, start + count)

    def submit(self, run: Callable[[], None], scan: PendingScan, device: torch.device) -> PendingScan:
        """Have `run`, which delivers the promises of `scan`, done after all jobs before it. Returns `scan`."""
        promises = [scan.incoming] if scan.carry is None else [scan.incoming, scan.carry]
        self._submit(run, promises, device)
        return scan

    def drain(self) -> None:
        """Return when everything launched is received *and* sent; to be called before a group is destroyed.

        Raises:
            CommunicationError: a scan failed.
        """
        if self._thread is not None:
            drained = Promise()
            self._submit(lambda: drained.deliver(torch.empty(0)), [drained], torch.device("cpu"))
            drained.get()
        if self._stream is not None:
            self._stream.synchronize()

    def _submit(self, run: Callable[[], None], promises: list[Promise], device: torch.device) -> None:
        job = _Job(run, promises)
        if device.type == "cuda":
            _run(job, self._lane)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._lane,), name="zeco-courier", daemon=True)
            self._thread.start()
        self._lane.jobs.put(job)


def _serve(lane: _Lane) -> None:
    while (job := lane.jobs.get()) is not None:
        _run(job, lane)
        # The name would keep the last scan's tensors alive until the next one comes.
        del job


def _run(job: _Job, lane: _Lane) -> None:
    if lane.failure is None:
        try:
            with torch.no_grad():  # modes are per thread
                job.run()
        except BaseException as error:  # the thread must live on to fail what follows; the caller raises it
            lane.failure = error
    if lane.failure is not None:
        for promise in job.promises:
            promise.fail(lane.failure)
