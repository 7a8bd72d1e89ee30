"""Memory that all ranks of a group map, for the scans of one algorithm in one direction.

An *arena* is the same region of memory on every rank, into which peers write: flags first, then data. Its layout is
fixed at allocation, by a capacity, and does not depend on a call's shape: peers may be a scan ahead or behind, and
would otherwise overwrite data that is still being read. A call that needs more gets a new arena, on all ranks alike,
since all ranks see the same shapes; the old one stays allocated, since late peers may still write to it.

Next to the shared memory are tensors private to this rank's kernels: the epoch of the last scan, and the first failure,
which is also copied to pinned memory for the host to read without synchronising.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Alignment of all parts of an arena, bytes: at least any vector access, and a multiple of a cache line.
_ALIGNMENT = 512

_kept: list[object] = []


def keep(memory: object) -> None:
    """Keep memory until the process ends: a peer may still write to it, so it must be neither unmapped nor reused."""
    _kept.append(memory)


class TwoShotCapacity(NamedTuple):
    """Size of one `two_shot` call, or capacity of an arena for it, by default that of the smallest."""

    width: int = 1 << 10  # tiles per owner
    tiles: int = 1 << 12  # in total
    slot: int = 1 << 20  # bytes of one rank's part of an owner's tiles
    factors: int = 1 << 16  # bytes of their transitions
    results: int = 1 << 22  # bytes of all results


class ChainCapacity(NamedTuple):
    """Size of one `chain` call, or capacity of an arena for it, by default that of the smallest."""

    blocks: int = 1 << 10  # number
    state: int = 1 << 22  # bytes


Capacity = TwoShotCapacity | ChainCapacity


def holds(capacity: Capacity, needed: Capacity) -> bool:
    """Whether a call fits."""
    return all(have >= need for have, need in zip(capacity, needed, strict=True))


def enlarged(capacity: Capacity | None, needed: Capacity) -> Capacity:
    """Capacity of a new arena: powers of two, at least those of the previous arena, so that reallocations are rare."""
    before = capacity or type(needed)()
    sizes = (max(have, 1 << (need - 1).bit_length()) for have, need in zip(before, needed, strict=True))
    return type(needed)(*sizes)


@dataclass
class ArenaLayout:
    """Offsets and strides of an arena in bytes, by name, as the kernels of `kernels/all_scan/` expect them."""

    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, capacity: Capacity, ranks: int) -> ArenaLayout:
        """4-byte flags, then data; each data part is double-buffered by the parity of the epoch."""
        layout = cls()
        if isinstance(capacity, TwoShotCapacity):
            layout.place("input_flags", ranks * capacity.width * 4)
            layout.place("results_flags", capacity.tiles * 4)
            layout.place("inbox", 2 * ranks * _aligned(capacity.slot))
            layout.place("factors_box", 2 * ranks * _aligned(capacity.factors))
            # For each parity the incoming states, then the carries.
            layout.place("results", 2 * 2 * _aligned(capacity.results))
            layout.offsets["flag_stride"] = capacity.width
            layout.offsets["inbox_stride"] = _aligned(capacity.slot)
            layout.offsets["factors_stride"] = _aligned(capacity.factors)
            layout.offsets["results_stride"] = _aligned(capacity.results)
        else:
            layout.place("flags", capacity.blocks * 4)
            layout.place("carry_flags", capacity.blocks * 4)
            layout.place("credit", 4)
            layout.place("inbox", 2 * _aligned(capacity.state))
            layout.place("carry_box", 2 * _aligned(capacity.state))
            layout.offsets["inbox_stride"] = _aligned(capacity.state)
        return layout

    def place(self, name: str, size: int) -> None:
        self.offsets[name] = self.size
        self.size += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


T = TypeVar("T")


def on_all_ranks(action: Callable[[], T], group: ProcessGroup) -> T:
    """Result of `action`, once it has succeeded on all ranks, so that no rank goes on to wait for one that failed.

    Collective. Raises RuntimeError on all ranks if it failed on some; the message has the first such rank and its
    error.
    """
    result: list[T] = []
    problem, cause = None, None
    try:
        result.append(action())
    except (ImportError, RuntimeError, AttributeError) as error:
        problem, cause = (str(error).strip().splitlines() or [type(error).__name__])[0], error
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for rank, text in enumerate(problems):
        if text is not None:
            raise RuntimeError(f"rank {rank}: {text}") from cause
    return result[0]


# (bytes) → this rank's memory, zeroed on all ranks, and the addresses of all ranks' memory by group rank.
Allocate = Callable[[int, ProcessGroup, torch.device], tuple[object, list[int]]]


def allocate_symmetric(size: int, group: ProcessGroup, device: torch.device) -> tuple[object, list[int]]:
    """Allocate memory on all GPUs of the group and map it into each process. Collective.

    Raises RuntimeError on all ranks if a GPU is out of memory, or has no peer access.
    """
    # In two steps: the rendezvous would wait for a rank that could not allocate.
    memory = on_all_ranks(lambda: _allocate(size, device), group)
    return on_all_ranks(lambda: _map(memory, group), group)


def _allocate(size: int, device: torch.device) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    # The kernels use plain stores only; multicast objects are known to break shared hosts.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    # A peer may write as soon as the rendezvous returns.
    torch.cuda.synchronize(device)
    return memory


def _map(memory: Tensor, group: ProcessGroup) -> tuple[object, list[int]]:
    import torch.distributed._symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(memory, group)
    addresses = list(handle.buffer_ptrs)
    # Some versions return the start of the allocation that contains the tensor.
    offset = memory.data_ptr() - addresses[dist.get_rank(group)]
    return (memory, handle), [address + offset for address in addresses]


class Arena:
    """One arena on this rank, with its kernels' private tensors."""

    def __init__(
        self, group: ProcessGroup, reverse: bool, device: torch.device, capacity: Capacity, allocate: Allocate
    ) -> None:
        self.capacity = capacity
        self.layout = ArenaLayout.of(capacity, dist.get_world_size(group))
        memory, addresses = allocate(self.layout.size, group, device)
        # In scan order; the last scan's epoch, and counters of its CTAs; see `kernels/all_scan/`.
        self.peers = torch.tensor(addresses[::-1] if reverse else addresses, dtype=torch.int64, device=device)
        self.control = torch.zeros(3, dtype=torch.int32, device=device)
        self.failure = torch.zeros(1, dtype=torch.int64, device=device)
        self._status = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.status_address = self._status.data_ptr()
        self._word = ctypes.c_int64.from_address(self.status_address)
        if device.type == "cuda":
            # Kernels run on other streams than the one that initialised these tensors.
            torch.cuda.synchronize(device)
        # With its own tensors: a kernel in flight has only the address of `_status`.
        keep((memory, self))

    def failed(self) -> tuple[int, int, int] | None:
        """Epoch, kind of wait and peer's position in scan order of the first failure; None if there is none."""
        word = self._word.value
        return None if word == 0 else (word >> 24, (word >> 16) & 0xFF, (word & 0xFFFF) - 1)
