"""Partitioning of a one-kernel scan, and its kernel (`zeco_train/kernels/all_scan/`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from zeco_train.collectives.arena import Arena, Capacity, ChainCapacity, TwoShotCapacity
from zeco_train.collectives.cost_model import Load
from zeco_train.ops.seam import ScanRequest, is_matrix

# Tests run the kernels on a CPU under Triton's interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# ZeCO, section 4: elements per block of the pipelined All-Scan.
PAPER_BLOCK = 16_384


@dataclass(frozen=True)
class KernelTuning:
    """Launch parameters of a kernel."""

    ctas: int  # maximum; all of them spin concurrently with the compute that the scan overlaps
    num_warps: int  # per CTA
    elements: int  # per tile, which a CTA holds in registers


# Measured on 2 and 4 H200s, 1 and 4 MB, over 16 to 64 CTAs, 4 to 16 warps, 2,048 to 16,384 elements: 64 CTAs would gain
# up to 8 % at 4 MB, but take twice as many SMs from the overlapped compute.
_MEASURED = KernelTuning(ctas=32, num_warps=8, elements=4096)
# Rows of a block, and of what is received that a product of its fold takes.
_MATRIX_ROWS, SLICE = 64, 64


@dataclass(frozen=True)
class Partition:
    """Partitioning of one call: kernel arguments between the arena's addresses and its flags."""

    needed: Capacity  # capacity of an arena
    ctas: int  # the same on all ranks, since CTA c waits for the CTAs c of other ranks
    num_warps: int  # per CTA
    sizes: tuple[int, ...]  # numbers of rows, tiles, …, in the kernel's order
    places: tuple[str, ...]  # the layout's offsets and strides, in the kernel's order
    constants: tuple[int, ...]  # dimensions, in the kernel's order

    def arguments(
        self, arena: Arena, position: int, ranks: int, seconds: float, *, has_carry: bool, want_carry: bool
    ) -> tuple[Any, ...]:
        """The kernel's arguments behind the five tensors, the same for all calls of a shape, direction and carries.

        `position`: this rank's in scan order; `seconds` bounds each wait; `has_carry`: `carry_in` is read here.
        """
        return (
            *(arena.peers, arena.control, arena.failure, arena.status_address, int(seconds * 1e9)),
            *self.sizes,
            *(arena.layout.offsets[name] for name in self.places),
            *(position, ranks, *self.constants, has_carry, want_carry),
            # `wait_for` needs one lane for each thread; Triton's interpreter cannot run its PTX.
            *(32 * self.num_warps, not INTERPRETED),
        )


@dataclass(frozen=True)
class Kernel:
    """A scan in one kernel, which is defined in a module that needs Triton."""

    module: str
    name: str
    # (request, ranks, tuning, blocks) → partitioning of a call
    cut: Callable[[ScanRequest, int, KernelTuning, int | None], Partition]
    most_keys: int  # K of matrices
    of_matrices: KernelTuning
    measured: bool  # with matrices; if not, `auto` never takes it for them

    def serves(self, load: Load) -> bool:
        return not load.matrices or load.shape[2] <= self.most_keys

    def tuning(self, request: ScanRequest) -> KernelTuning:
        return self.of_matrices if is_matrix(request.transition) else _MEASURED

    def load(self) -> Any:
        return getattr(import_module(self.module), self.name)


# At least four columns, one vector access in fp32; sixteen for products.
def _tile_columns(key_dim: int, value_dim: int, matrices: bool, tuning: KernelTuning) -> int:
    least, rows = (16, max(16, power_of_2(key_dim))) if matrices else (4, power_of_2(key_dim))
    return max(least, min(power_of_2(value_dim), tuning.elements // rows))


def matrix_copies(load: Load) -> int:
    """How often `two_shot`'s kernel sends a head's matrix: with each tile."""
    key_dim, value_dim = load.shape[2:]
    return -(-value_dim // _tile_columns(key_dim, value_dim, True, TWO_SHOT_KERNEL.of_matrices))


def _two_shot_cut(request: ScanRequest, ranks: int, tuning: KernelTuning, blocks: int | None) -> Partition:
    # Tiles span all of K and part of V: never cut along K, since a transition may mix a column's elements.
    batch, heads, key_dim, value_dim = request.state.shape
    matrices = is_matrix(request.transition)
    rows = max(16 if matrices else 1, power_of_2(key_dim))
    columns = _tile_columns(key_dim, value_dim, matrices, tuning)
    tiles = batch * heads * -(-value_dim // columns)
    width = -(-tiles // ranks)
    size = request.state.element_size()
    tile = key_dim * columns * size
    transitions = width * rows * (rows if matrices else 1)
    return Partition(
        needed=TwoShotCapacity(width, tiles, width * tile, transitions * size, tiles * tile),
        ctas=min(width, tuning.ctas),
        num_warps=tuning.num_warps,
        sizes=(tiles, width),
        places=(
            *("flag_stride", "results_flags", "inbox", "inbox_stride"),
            *("factors_box", "factors_stride", "results", "results_stride"),
        ),
        constants=(key_dim, value_dim, rows, columns, matrices, is_transposed(request.transition)),
    )


def _chain_cut(request: ScanRequest, ranks: int, tuning: KernelTuning, blocks: int | None) -> Partition:
    batch, heads, key_dim, value_dim = request.state.shape
    rows = batch * heads * key_dim
    matrices = is_matrix(request.transition)
    keys, columns = power_of_2(key_dim), power_of_2(value_dim)
    pieces = groups = 1
    if matrices:
        # Blocks are tiles of a head's rows and of columns; products take tiles of at least 16 × 16, of 64 rows for four
        # warps. 64 rows of a matrix, split in three of bf16, are up to 96 KB. As few CTAs as take no more blocks each.
        keys = max(16, keys)
        block_rows = held = min(keys, _MATRIX_ROWS)
        units = batch * heads * -(-key_dim // held)
        asked = columns if blocks is None else columns * units // blocks
        columns = max(16, min(columns, tuning.elements // held, power_of_2(asked)))
        pieces = -(-value_dim // columns)
        groups = -(-pieces // -(-pieces // max(1, tuning.ctas // units)))
    else:
        # Blocks are runs of rows of [B·H·K, V].
        block_rows = max(1, PAPER_BLOCK // value_dim) if blocks is None else -(-rows // min(blocks, rows))
        units = -(-rows // block_rows)
        held = max(1, min(power_of_2(block_rows), tuning.elements // columns))
    return Partition(
        needed=ChainCapacity(units * pieces, request.state.numel() * request.state.element_size()),
        ctas=min(units * groups, tuning.ctas),
        num_warps=tuning.num_warps,
        sizes=(rows, block_rows, units * groups),
        places=("credit", "carry_flags", "inbox", "inbox_stride", "carry_box"),
        constants=(
            *(value_dim, columns, held, matrices * key_dim, min(keys, SLICE)),
            # All ranks have a carry_out, or none: its last rank waits for all others.
            *(is_transposed(request.transition), pieces, groups, request.cuts and not request.want_carry),
        ),
    )


def is_transposed(transition: Tensor) -> bool:
    """Whether a transition is of matrices that lie transposed in memory, as those of a reverse scan do."""
    return is_matrix(transition) and not transition.is_contiguous() and transition.mT.is_contiguous()


def power_of_2(number: int) -> int:
    """The next power of 2, at least 1."""
    return 1 << (number - 1).bit_length()


_CHAIN, _TWO_SHOT = "zeco_train.kernels.all_scan.chain", "zeco_train.kernels.all_scan.two_shot"
CHAIN_KERNEL = Kernel(_CHAIN, "chain_kernel", _chain_cut, 256, KernelTuning(96, 4, 2048), True)
TWO_SHOT_KERNEL = Kernel(_TWO_SHOT, "two_shot_kernel", _two_shot_cut, 128, KernelTuning(32, 8, 4096), False)
