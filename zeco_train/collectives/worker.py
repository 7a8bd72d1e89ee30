"""Background execution of scans between `launch` and `wait`: a thread on CPUs, a stream on CUDA.

With gloo, a block must be folded and forwarded when it arrives. If `wait` did that, a rank busy with its own compute
would delay all ranks after it. So the steps of a scan are one *job*. On CPUs a worker runs its jobs one after another
on a single background thread (torch operations and gloo's waits release the GIL); on CUDA the caller enqueues the job
onto the worker's own stream. Jobs run in launch order, which is the same on every rank.

An algorithm is a `ScanJob`, and a `ScanSpec` that describes it; each is in a file of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.one_kernel import Kernel
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.wire import Wire, has_streams, is_capturing
from zeco_train.errors import CommunicationError
from zeco_train.ops.seam import LaunchedScan, ScanRequest, fold
from zeco_train.system import background


class TensorFuture(Future[Tensor]):
    """The tensor of a job, or the error that prevented it."""

    _ready: torch.cuda.Event | None = None

    def set_result(self, value: Tensor, is_ready: bool = False) -> None:
        """Set the value; unless `is_ready`, it may still be computed by work queued on the current stream."""
        if has_streams(value.device) and not is_ready:
            self._ready = torch.cuda.Event()
            self._ready.record()
        super().set_result(value)

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for the tensor; on CUDA returns at once and makes the current stream wait."""
        value = super().result(timeout)
        if self._ready is not None:
            stream = torch.cuda.current_stream(value.device)
            stream.wait_event(self._ready)
            # Allocated on the worker's stream: the allocator must not reuse it while the caller's stream reads it.
            value.record_stream(stream)
        return value


class PendingScan:
    """A scan in flight (`zeco_train.ops.seam.LaunchedScan`), whose job sets `incoming` and `carry`."""

    def __init__(self, want_carry: bool) -> None:
        self.incoming = TensorFuture()
        self.carry = TensorFuture() if want_carry else None
        self.ended: torch.cuda.Event | None = None  # of a scan captured into a CUDA graph, the end of all its work

    def wait(self) -> Tensor:
        """The incoming state, [B, H, K, V]; it may be `carry_in` itself, so do not write to it.

        Raises CommunicationError if a peer did not answer in time or is gone, in this scan or an earlier one of the
        worker.
        """
        return self.incoming.result()

    def finish(self) -> None:
        """Join a captured scan to the current stream; else nothing is left to do, since the worker forwards."""
        if self.ended is not None:
            torch.cuda.current_stream().wait_event(self.ended)

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, the same on every rank. Raises as `wait`."""
        if self.carry is None:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        return self.carry.result()

    @property
    def futures(self) -> list[TensorFuture]:
        return [self.incoming] if self.carry is None else [self.incoming, self.carry]


class _ScanAlone(NamedTuple):
    incoming: Tensor
    carry: Tensor | None

    def wait(self) -> Tensor:
        return self.incoming

    def finish(self) -> None:
        pass

    def carry_out(self) -> Tensor:
        if self.carry is None:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        return self.carry


def scan_alone(request: ScanRequest) -> LaunchedScan:
    """The scan over one rank, for which both directions are the same: on the caller's stream, without events."""
    incoming = request.first_incoming()
    carry = fold(request.state, request.transition, incoming) if request.want_carry else None
    return _ScanAlone(incoming, carry)


class ScanJob(ABC):
    """The work of one scan on this rank; each object serves one scan."""

    operation: str  # name of the collective, for errors
    wire: Wire  # set before `post`
    scan: PendingScan

    def __init__(self, request: ScanRequest) -> None:
        self.request = request

    def post(self) -> None:  # noqa: B027
        """Work to do inside `launch`, such as posting receives; does not block on peers."""

    def own_state(self) -> Tensor:
        """This rank's state; the first rank in scan order also sets its incoming state, and folds `carry_in`."""
        request = self.request
        if not self.wire.is_first:
            return request.state
        self.scan.incoming.set_result(request.first_incoming())
        return request.state if request.carry_in is None else fold(request.state, request.transition, request.carry_in)

    def broadcast_carry(self) -> None:
        """Deliver the carry, if it is wanted, from the last rank, whose incoming state has been set."""
        scan, wire, request = self.scan, self.wire, self.request
        if scan.carry is None:
            return
        if wire.is_last:
            carry = fold(request.state, request.transition, scan.incoming.result()).contiguous()
        else:
            carry = torch.empty_like(request.state, memory_format=torch.contiguous_format)
        wire.broadcast(carry, wire.size - 1, "carry_out").wait()
        scan.carry.set_result(carry)

    @abstractmethod
    def run(self) -> None:
        """The remaining work, on the worker's thread or stream."""


# The function to run, and the futures that it sets.
_Job = tuple[Callable[[], None], list[TensorFuture]]


@dataclass
class _Queue:
    # Shared by a worker and its thread, separate so that the thread does not keep the worker alive.
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    failure: BaseException | None = None


class ScanWorker:
    """Runs the scans of one process group in launch order; the group carries scans of one direction and nothing else.

    After a failure the group's state is unknown (messages may be half set): all scans under way and later ones
    raise the first error. `timeout` bounds each wait for a peer; without `topology` all ranks are on this machine.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta, topology: Topology | None = None) -> None:
        self.group, self.timeout = group, timeout
        self._topology = topology
        # Of scans that a device runs by itself: raise CommunicationError if one has failed, without waiting for others.
        self.checks: list[Callable[[], None]] = []
        self._wires: dict[tuple[str, bool], Wire] = {}
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._tags = 0
        # None ends the thread; it refers to the queue_ only, so that an unused worker can be collected.
        weakref.finalize(self, self._queue.jobs.put, None)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def topology(self) -> Topology:
        return self._topology or Topology.one_node(self.size)

    def wire(self, operation: str, reverse: bool) -> Wire:
        wire = self._wires.get((operation, reverse))
        if wire is None:
            wire = self._wires[operation, reverse] = Wire(self.group, operation, reverse, self.timeout)
        return wire

    def launch(self, job: ScanJob) -> LaunchedScan:
        """Start a scan; it progresses without this rank's `wait`. A group of one rank needs no communication.

        Raises CommunicationError if an earlier scan of this worker failed, or a peer is gone.
        """
        request = job.request
        job.wire = self.wire(job.operation, request.reverse)
        if job.wire.size == 1:
            return scan_alone(request)
        job.scan = scan = PendingScan(request.want_carry)
        self.check()
        device = request.state.device
        with torch.no_grad(), self._side_stream(request) if has_streams(device) else contextlib.nullcontext():
            try:
                job.post()
                self.submit(job.run, scan.futures, device)
            except CommunicationError as error:
                self._queue.failure = error
                raise
            if is_capturing(device):
                # A capture must end with all its streams joined, even if this rank's sends are never waited for.
                scan.ended = torch.cuda.Event()
                scan.ended.record()
        return scan

    def check(self) -> None:
        """Raise CommunicationError if a scan has failed, without waiting for those in flight."""
        if self._queue.failure is None:
            try:
                for check in self.checks:
                    check()
            except CommunicationError as error:
                self._queue.failure = error
        if self._queue.failure is not None:
            raise self._queue.failure

    @contextlib.contextmanager
    def _side_stream(self, request: ScanRequest) -> Iterator[None]:
        inputs = [x for x in (request.state, request.transition, request.carry_in) if x is not None]
        if self._stream is None:
            # High priority: the scan is small and on the critical path of other ranks, so it goes before the overlapped
            # compute.
            self._stream = torch.cuda.Stream(inputs[0].device, priority=-1)
        # The caller's stream may still be computing the inputs, and may free them before this one has read them.
        self._stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def take_tags(self, count: int) -> range:
        """Message tags that no other scan of this worker uses; the same on every rank, since launch order is."""
        start = self._tags
        # A tag is a C int; the early tags are long free when the counter wraps around.
        self._tags = (start + count) % (1 << 30)
        return range(start, start + count)

    def submit(self, run: Callable[[], None], futures: list[TensorFuture], device: torch.device) -> None:
        """Schedule `run`, which sets the futures, after all earlier jobs."""
        job = run, futures
        if has_streams(device):
            _run(job, self._queue)
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = background.start(
                _serve, self._queue, name="zeco-scans", stop=partial(self._queue.jobs.put, None)
            )
        self._queue.jobs.put(job)

    def drain(self) -> None:
        """Wait until everything launched is received *and* sent; call before destroying a group. Raises as `check`."""
        if self._thread is not None:
            # Jobs run in launch order: when this one runs, all others are over.
            drained = TensorFuture()
            self.submit(lambda: drained.set_result(torch.empty(0)), [drained], torch.device("cpu"))
            drained.result()
        if self._stream is not None:
            self._stream.synchronize()
        self.check()


def _serve(queue_: _Queue) -> None:
    while (job := queue_.jobs.get()) is not None:
        _run(job, queue_)
        # Drop the reference, which would keep the last scan's tensors alive until the next job.
        del job


def _run(job: _Job, queue_: _Queue) -> None:
    run, futures = job
    if queue_.failure is None:
        try:
            with torch.no_grad():  # grad mode is per thread
                run()
        except BaseException as error:  # keep the thread alive to fail later jobs; the caller raises
            queue_.failure = error
    if queue_.failure is not None:
        for future in futures:
            if not future.done():
                future.set_exception(queue_.failure)


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """A scan algorithm, for settings, plans, tables and figures."""

    name: str  # as in settings
    description: str  # one line for `--help`
    # (request, worker), with `blocks=` if states are sent in blocks → the scan, which progresses without this rank's
    # `wait`, unless it is serial
    launch: Callable[..., LaunchedScan]
    bytes_sent: Callable[[Load, bool], float]  # (load, want_carry) → bytes that the busiest rank sends
    # (costs, load, blocks) → time from launch to wait, without overlapped work
    seconds: Callable[[Costs, Load, int | None], float]
    # the fastest number of blocks; None: states are not cut into blocks
    best_blocks: Callable[[Costs, Load], int] | None = None
    kernel: Kernel | None = None  # one-kernel implementation over symmetric memory
    # ranks → states held by a rank during the scan, besides its own
    held_states: Callable[[int], int] = lambda ranks: 0
    in_series: bool = False  # each rank computes between receiving and sending, so no compute hides the scan
    # a state goes from rank to rank, and nothing back: a rank that waits does not hold up those before it
    one_way: bool = False
    problem: Callable[[Topology], str | None] = lambda topology: None  # why it cannot run over these nodes
    # its times were measured, not only modelled: `auto` chooses among these on one node; between nodes none were
    # measured, and all compete by the model
    measured: bool = True
    line: str | tuple[int, tuple[int, ...]] = "-"  # matplotlib line style

    def over(self, worker: ScanWorker, blocks: int | None = None) -> Callable[[ScanRequest], LaunchedScan]:
        """`launch` over a worker; `blocks` applies if states are sent in blocks, or if the scan takes it at all."""
        options = {} if self.best_blocks is None and blocks is None else {"blocks": blocks or 1}
        return partial(self.launch, worker=worker, **options)

    def runs_on(self, link: Link, load: Load) -> bool:
        return link is not Link.symmetric or (self.kernel is not None and self.kernel.serves(load))
