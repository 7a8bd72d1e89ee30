"""Chains of many ranks on two GPUs, for part `hops` of case `delays`: rank p of the chain is on GPU p mod 2.

All kernels of a chain are launched together, each on a stream of its own, and wait in their place until the state
comes, as on as many GPUs. So T = α₀ + (P − 1)α + βS, and two lengths have α between them, with the few tenths of a
microsecond that a GPU takes for another stream. Every hop crosses the link between the GPUs.

The kernel is that of All-Scan `chain` with its protocol. A kernel waits for ranks before it only, so the kernels of a
GPU would end even if they ran one after the other; they are small enough to run at once. Those of `two_shot` wait for
one another, and must. Every kernel is loaded first, since loading one may wait for those that run. Kernels that share
multiprocessors slow each other down: with matrices, 64 CTAs each, a hop of two ranks a GPU is one, of four it is not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.session import Session
from zeco_train.collectives.arena import Allocate, Arena, ArenaLayout, allocate_symmetric
from zeco_train.collectives.one_kernel import CHAIN_KERNEL, Kernel, KernelTuning
from zeco_train.errors import CommunicationError
from zeco_train.ops.seam import ScanRequest


class TwoGpuChain:
    """A chain of `ranks` ranks, those of even number on the session's rank 0. Collective.

    Args:
        ranks: P, an even number.
        state: [B, H, K, V] fp32, of each of this GPU's ranks.
        transition: [B, H, K] or [B, H, K, K], likewise.
        session: two ranks.
        allocate: allocator of symmetric memory.
        kernel: of All-Scan; all CTAs of `two_shot` must run at once, since every rank waits for every other.
        tuning: launch parameters; None: as a scan's.
        cuts: the transition is 0, as a halo's, and every rank sends at once.

    Raises:
        RuntimeError: no peer access, or out of memory. On all ranks.
    """

    def __init__(
        self,
        ranks: int,
        state: Tensor,
        transition: Tensor,
        session: Session,
        allocate: Allocate = allocate_symmetric,
        kernel: Kernel = CHAIN_KERNEL,
        tuning: KernelTuning | None = None,
        *,
        cuts: bool = False,
    ) -> None:
        mesh, device = session.mesh, state.device
        group, self._timeout, self._ranks = mesh.scan_groups[0], mesh.timeout, ranks
        self._state, self._transition = state, transition
        own, request = dist.get_rank(group), ScanRequest(state, transition, cuts=cuts)
        cut = kernel.cut(request, ranks, tuning or kernel.tuning(request), None)
        size = ArenaLayout.of(cut.needed, ranks).size
        memory, parts = allocate(size * (ranks // 2), group, device)
        addresses = [parts[position % 2] + position // 2 * size for position in range(ranks)]
        self._kernel, self._grid, self._num_warps = kernel.load(), (cut.ctas, 1, 1), cut.num_warps
        # The chain's first rank receives nothing.
        self._outputs = [torch.zeros_like(state) for _ in addresses[own::2]]
        self._streams = [torch.cuda.Stream(device) for _ in self._outputs] if device.type == "cuda" else []
        self._arenas, self._arguments = [], []
        for position in range(own, ranks, 2):
            arena = Arena(group, False, device, cut.needed, lambda *_: (memory, addresses))
            self._arenas.append(arena)
            seconds = mesh.timeout.total_seconds()
            self._arguments.append(cut.arguments(arena, position, ranks, seconds, has_carry=False, want_carry=False))
        self._load()
        dist.barrier(group)

    def _load(self) -> None:
        # Every rank's kernel, by a launch in an arena that failed: it waits for nothing and writes to no other rank.
        for index, arena in enumerate(self._arenas):
            arena.failure.fill_(1)
            self._launch(index)
            arena.failure.zero_()
            arena.control.zero_()
        if self._streams:
            torch.cuda.synchronize(self._state.device)

    def run(self) -> Tensor:
        """What this GPU's last rank receives, [B, H, K, V]; valid until the next call."""
        current = torch.cuda.current_stream(self._state.device) if self._streams else None
        for index in range(len(self._outputs)):
            if current is None:
                self._launch(index)
                continue
            self._streams[index].wait_stream(current)
            with torch.cuda.stream(self._streams[index]):
                self._launch(index)
        for stream in self._streams:
            assert current is not None
            current.wait_stream(stream)
        return self._outputs[-1]

    def _launch(self, index: int) -> None:
        state, output = self._state, self._outputs[index]
        # No carries: placeholders.
        self._kernel[self._grid](
            *(state, self._transition, state, output, state), *self._arguments[index], num_warps=self._num_warps
        )

    def check(self) -> None:
        """Raise `CommunicationError` if a wait of a finished run has timed out."""
        for arena in self._arenas:
            if (found := arena.failed()) is not None:
                problem = f"no answer within {self._timeout.total_seconds():g} s"
                operation = f"chain of {self._ranks}, scan {found[0]}"
                raise CommunicationError(dist.get_rank(), operation, problem, found[2] % 2)
