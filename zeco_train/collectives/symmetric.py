"""All-Scan in one kernel launch, over memory that all ranks of an NVLink domain map.

The kernels and the protocol are in `zeco_train/kernels/all_scan/`; here are their arguments, their launch on the
worker's stream, and failure reporting to the host. Nothing here synchronises with the device, so a scan can be
captured into a CUDA graph once one of its size has run outside.

On the wire, per rank, of S bytes a state: `chain` receives S and sends S; `two_shot` sends (P − 1)/P S and the
transitions to owners, a matrix with each tile of its head, and receives as much in results. `carry_out` adds S to the
bytes received.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.collectives.arena import (
    Allocate,
    Arena,
    Capacity,
    allocate_symmetric,
    enlarged,
    holds,
    keep,
    on_all_ranks,
)
from zeco_train.collectives.one_kernel import INTERPRETED, Kernel, KernelTuning, is_transposed, power_of_2
from zeco_train.collectives.wire import Wire, has_streams, is_capturing
from zeco_train.collectives.worker import ScanJob, ScanSpec, ScanWorker, scan_alone
from zeco_train.errors import CommunicationError
from zeco_train.ops.seam import LaunchedScan, ScanRequest, is_matrix

# Kinds of waits in a kernel's failure word; the codes are defined in `kernels/all_scan/`.
WAITED_FOR = {1: "a peer's slice", 2: "an owner's result", 3: "the state", 4: "a credit", 5: "carry_out"}

# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent.
_MOST_SHARED = 9, 100

logger = logging.getLogger(__name__)


def request_problem(request: ScanRequest) -> str | None:
    """Why the kernels, whose tiles span all of K, or of V, support no scan of this size; None if they do."""
    batch, heads, key_dim, value_dim = request.state.shape
    if is_matrix(request.transition):
        value_dim = max(key_dim, value_dim)
    elif key_dim > 2048 or value_dim > 4096:
        return f"K={key_dim}, V={value_dim}"
    # The kernels' offsets are 32-bit (`kernels/all_scan/__init__.py`).
    elements = batch * heads * power_of_2(key_dim) * power_of_2(value_dim)
    return f"{elements} elements" if elements >= 1 << 30 else None


def transport_problem(worker: ScanWorker, device: torch.device) -> str | None:
    """Why the worker's ranks cannot use symmetric memory, on all of them alike; None if they can. Collective."""
    if device.type != "cuda":
        return f"the states are on {device.type}"
    if len(hosts := worker.topology.hosts) > 1:
        return f"the ranks are on {len(hosts)} machines"
    try:
        on_all_ranks(lambda: import_module("triton"), worker.group)
        # Try it: the reasons why peer access fails differ from machine to machine.
        keep(allocate_symmetric(1 << 10, worker.group, device))
    except RuntimeError as error:
        return str(error)
    return None


class _Launch:
    # A kernel with all its arguments but the five tensors of a call. Triton's launcher inspects every argument; once
    # the kernel is compiled for them, it is launched with raw addresses.
    def __init__(self, kernel: Any, ctas: int, num_warps: int, fixed: tuple[Any, ...]) -> None:
        self._kernel, self._grid, self._num_warps, self._fixed = kernel, (ctas, 1, 1), num_warps, fixed
        self._addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in fixed)
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Compiled for addresses that are multiples of 16; for others Triton has to choose another specialisation.
        aligned = not any(address & 15 for address in addresses)
        if aligned and self._compiled is not None:
            self._compiled(*addresses, *self._addresses)
            return
        compiled = self._kernel[self._grid](*tensors, *self._fixed, num_warps=self._num_warps)
        if aligned and not INTERPRETED:
            # A multiprocessor divides its memory into L1 and shared memory in one way at a time: a kernel that takes no
            # shared memory, and prefers L1, keeps those that take much from starting beside it.
            ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(compiled.function), *_MOST_SHARED)
            self._compiled = compiled[self._grid]


class _OneKernel(ScanJob):
    def __init__(
        self, request: ScanRequest, operation: str, launch: _Launch, zeros: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(request)
        self.operation, self._launch, self._zeros = operation, launch, zeros

    def run(self) -> None:
        request, wire, scan = self.request, self.wire, self.scan
        state = request.state.contiguous()
        # Arguments that the kernel neither reads nor writes get placeholders.
        carry_in, output, carry_out = state, state, state
        if wire.is_first and request.carry_in is not None:
            carry_in = request.carry_in.contiguous()
            # Before the launch: its readers need not wait for the kernel.
            scan.incoming.set_result(request.carry_in)
        elif wire.is_first:
            scan.incoming.set_result(self._zeros(state), is_ready=True)
        else:
            output = torch.empty_like(state)
        if scan.carry is not None:
            carry_out = torch.empty_like(state)
        transition = request.transition
        if not is_transposed(transition):
            transition = transition.contiguous()
        self._launch(state, transition, carry_in, output, carry_out)
        if not wire.is_first:
            scan.incoming.set_result(output)
        if scan.carry is not None:
            scan.carry.set_result(carry_out)


class SymmetricScans:
    """The scans of one worker, whose ranks share an NVLink domain, over symmetric memory; `tuning` is by algorithm."""

    def __init__(
        self, worker: ScanWorker, allocate: Allocate = allocate_symmetric, tuning: dict[str, KernelTuning] | None = None
    ) -> None:
        self._worker, self._allocate = worker, allocate
        self._tuning = tuning or {}
        self._arenas: list[tuple[Wire, Arena]] = []
        self._launches: dict[tuple[Any, ...], _Launch] = {}
        self._zeros: dict[tuple[Any, ...], Tensor] = {}
        worker.checks.append(self.check)

    def launch(self, request: ScanRequest, algorithm: ScanSpec, blocks: int | None = None) -> LaunchedScan:
        """Start the scan; it completes without this rank's `wait`.

        `algorithm` has a `kernel`. `blocks` is for `chain`; None means blocks of 16,384 elements. Raises
        CommunicationError if an earlier scan of the worker failed; RuntimeError if a CUDA graph is being captured and
        no scan like this one has run, or out of memory.
        """
        operation, kernel = f"symmetric_{algorithm.name}", algorithm.kernel
        wire = self._worker.wire(operation, request.reverse)
        if wire.size == 1:
            return scan_alone(request)
        # Prepare before involving the worker: a refused call then fails no other scan and keeps its stream out of a
        # capture.
        assert kernel is not None
        tuning = self._tuning.get(algorithm.name) or kernel.tuning(request)
        prepared = self._prepared(request, kernel, tuning, blocks, wire)
        return self._worker.launch(_OneKernel(request, operation, prepared, self._cached_zeros))

    def check(self) -> None:
        """Raise CommunicationError if a scan has failed, without waiting for those in flight."""
        for wire, arena in self._arenas:
            found = arena.failed()
            if found is not None:
                epoch, what, position = found
                raise CommunicationError(
                    dist.get_rank(),
                    f"{wire.operation}: wait for {WAITED_FOR[what]} in scan {epoch}",
                    f"no answer within {self._worker.timeout.total_seconds():g} s",
                    dist.get_global_rank(self._worker.group, wire.group_rank(position)),
                )

    def _cached_zeros(self, state: Tensor) -> Tensor:
        # R_0 without a carry; cached by shape, since a fill would delay the kernel.
        key = (state.shape, state.dtype, state.device)
        zeros = self._zeros.get(key)
        if zeros is None:
            # A tensor made in inference mode could not be saved for a backward pass later.
            with torch.inference_mode(False):
                zeros = torch.zeros(state.shape, dtype=state.dtype, device=state.device)
            if has_streams(state.device):
                # Delivered without an event from now on, to any stream.
                torch.cuda.current_stream().synchronize()
            self._zeros[key] = zeros
        return zeros

    def _prepared(
        self, request: ScanRequest, kernel: Kernel, tuning: KernelTuning, blocks: int | None, wire: Wire
    ) -> _Launch:
        # For scans like this one, cached. Collective if memory must be allocated.
        has_carry = wire.is_first and request.carry_in is not None
        state, want_carry = request.state, request.want_carry
        kind = request.transition.ndim, is_transposed(request.transition), request.cuts
        key = (kernel.name, wire.reverse, state.shape, state.dtype, kind, blocks, has_carry, want_carry)
        launch = self._launches.get(key)
        if launch is None:
            if is_capturing(state.device):
                raise RuntimeError(
                    "a scan has to run once before it is captured into a CUDA graph, and none like this one has: "
                    f"{wire.operation}, {list(state.shape)}, {state.dtype}, {kind=}, {blocks=}, {has_carry=}, "
                    f"{want_carry=}"
                )
            self._worker.check()  # peers may be gone
            with torch.cuda.device_of(state):
                cut = kernel.cut(request, wire.size, tuning, blocks)
                arena, seconds = self._arena(cut.needed, request, wire), self._worker.timeout.total_seconds()
                fixed = cut.arguments(
                    arena, wire.position, wire.size, seconds, has_carry=has_carry, want_carry=want_carry
                )
                launch = self._launches[key] = _Launch(kernel.load(), cut.ctas, cut.num_warps, fixed)
        return launch

    def _arena(self, needed: Capacity, request: ScanRequest, wire: Wire) -> Arena:
        # The first arena of this algorithm and direction that holds the call, or a new one. Always the first, so that
        # ranks agree: they plan a call at different times (only one has a `carry_in`), some perhaps after a larger
        # arena was added.
        before = None
        for other, arena in self._arenas:
            if other is wire:
                if holds(arena.capacity, needed):
                    return arena
                before = arena.capacity
        capacity = enlarged(before, needed)
        with torch.inference_mode(False):
            arena = Arena(self._worker.group, request.reverse, request.state.device, capacity, self._allocate)
        self._arenas.append((wire, arena))
        logger.info("%s: %.3g MB of symmetric memory", wire.operation, arena.layout.size / 1e6)
        return arena
