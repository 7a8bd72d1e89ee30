"""What carries a scan on between `launch` and `wait`: a thread on CPUs, a stream on CUDA.

With gloo somebody has to fold a block and send it on when it arrives. Were that left to `wait`, a rank busy with its
own compute would hold up all ranks after it. So the steps of a scan are one *job*. On CPUs a courier runs its jobs one
after another on a single background thread (torch operations and gloo's waits release the interpreter lock); on CUDA
the job is enqueued from the caller onto the courier's own stream, which needs no thread.

One courier belongs to one process group and to one direction. Its jobs run in the order of their launches, which is the
same on every rank: no two scans of a group can meet in different orders.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives.scan import PendingScan, Promise, scan_alone
from zeco_train.collectives.wire import Wire
from zeco_train.errors import CommunicationError
from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.transition import fold
from zeco_train.system import background


class ScanJob(ABC):
    """What a collective does for one scan on this rank. Each object serves one scan.

    Args:
        request: this rank's part; also an attribute.

    Attributes:
        operation: name of the collective, for errors.
        wire, scan: the way to the peers, and the scan whose promises the job delivers; there from `post` on.
    """

    operation: str
    wire: Wire
    scan: PendingScan

    def __init__(self, request: ScanRequest) -> None:
        self.request = request

    def post(self) -> None:  # noqa: B027
        """What is to be done in `launch` itself, such as posting receives; waits for nobody."""

    def own_state(self) -> Tensor:
        """This rank's state. The first rank in scan order has its incoming one at once, delivers it, and folds a
        `carry_in` into what the others get."""
        request = self.request
        if not self.wire.is_first:
            return request.state
        self.scan.incoming.deliver(request.first_incoming())
        return request.state if request.carry_in is None else fold(request.state, request.transition, request.carry_in)

    @abstractmethod
    def run(self) -> None:
        """The rest, in the courier's thread or stream."""


# What is to be done, and the promises that it delivers.
_Job = tuple[Callable[[], None], list[Promise]]


@dataclass
class _Lane:
    """What a courier shares with its thread, which must not keep the courier itself alive."""

    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    failure: BaseException | None = None


class Courier:
    """Runs the scans of one process group in launch order.

    After a failure the group's state is unknown (messages may be half delivered): all scans under way and later ones
    raise the first error.

    Args:
        group: the ranks to scan over; it carries scans of one direction and nothing else.
        timeout: bound of each wait for a peer.

    Attributes:
        checks: called before each launch and by `drain`; each raises `CommunicationError` for a scan that failed where
            no call of this process could notice.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.checks: list[Callable[[], None]] = []
        self._wires: dict[tuple[str, bool], Wire] = {}
        self._lane = _Lane()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._tags = 0
        weakref.finalize(self, self._lane.jobs.put, None)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def wire(self, operation: str, reverse: bool) -> Wire:
        """The view that a collective of this name has of the group. Errors as of `Wire`."""
        wire = self._wires.get((operation, reverse))
        if wire is None:
            wire = self._wires[operation, reverse] = Wire(self.group, operation, reverse, self.timeout)
        return wire

    def launch(self, job: ScanJob) -> PendingScan:
        """Start a scan; it goes on without this rank's `wait`. Over a group of one rank nothing is to be done.

        Raises:
            ValueError: the group is without this process.
            CommunicationError: an earlier scan of this courier failed, or a peer is gone.
        """
        request = job.request
        job.wire = self.wire(job.operation, request.reverse)
        if job.wire.size == 1:
            return scan_alone(request)
        job.scan = scan = PendingScan(request.want_carry)
        with self._launching(request):
            job.post()
            self.submit(job.run, scan.promises, request.state.device)
            if request.state.is_cuda and torch.cuda.is_current_stream_capturing():
                # A capture has to end with all its streams joined, also where nobody waits for what this rank sends.
                scan.ended = torch.cuda.Event()
                scan.ended.record()
        return scan

    @contextlib.contextmanager
    def _launching(self, request: ScanRequest) -> Iterator[None]:
        """Surrounds all that a launch does with its inputs: on CUDA it runs on the courier's stream."""
        self.check()
        tensors = [x for x in (request.state, request.transition, request.carry_in) if x is not None]
        with torch.no_grad(), self._side_stream(tensors) if tensors[0].is_cuda else contextlib.nullcontext():
            try:
                yield
            except CommunicationError as error:
                self._lane.failure = error
                raise

    def check(self) -> None:
        """Look for a failure, without waiting for scans under way.

        Raises:
            CommunicationError: a scan failed.
        """
        if self._lane.failure is None:
            try:
                for check in self.checks:
                    check()
            except CommunicationError as error:
                self._lane.failure = error
        if self._lane.failure is not None:
            raise self._lane.failure

    @contextlib.contextmanager
    def _side_stream(self, inputs: list[Tensor]) -> Iterator[None]:
        if self._stream is None:
            # What it carries is small and others wait for it: it goes before the compute that it overlaps.
            self._stream = torch.cuda.Stream(inputs[0].device, priority=-1)
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

    def submit(self, run: Callable[[], None], promises: list[Promise], device: torch.device) -> None:
        """Have `run`, which delivers the promises, done after all jobs before it."""
        job = run, promises
        if device.type == "cuda":
            _run(job, self._lane)
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = background.start(
                _serve, self._lane, name="zeco-courier", stop=partial(self._lane.jobs.put, None)
            )
        self._lane.jobs.put(job)

    def drain(self) -> None:
        """Return when everything launched is received *and* sent; to be called before a group is destroyed.

        Raises:
            CommunicationError: a scan failed.
        """
        if self._thread is not None:
            drained = Promise()
            self.submit(lambda: drained.deliver(torch.empty(0)), [drained], torch.device("cpu"))
            drained.get()
        if self._stream is not None:
            self._stream.synchronize()
        self.check()


def _serve(lane: _Lane) -> None:
    while (job := lane.jobs.get()) is not None:
        _run(job, lane)
        # The name would keep the last scan's tensors alive until the next one comes.
        del job


def _run(job: _Job, lane: _Lane) -> None:
    run, promises = job
    if lane.failure is None:
        try:
            with torch.no_grad():  # modes are per thread
                run()
        except BaseException as error:  # the thread must live on to fail what follows; the caller raises it
            lane.failure = error
    if lane.failure is not None:
        for promise in promises:
            promise.fail(lane.failure)
