"""Copies of many tensors, with a cast or a sum on the way: each element is read once and written once.

For gradients and weights around FSDP2's communication (`zeco_train.distributed`). Triton only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pack_kernel(
    sources,  # tensors, contiguous, each [rows, …]
    targets,  # where each goes, contiguous, in one of any dtype; may all be the same tensor
    sizes,  # elements of each
    chunks,  # elements of each that go to one rank, of rows padded to a multiple of the ranks
    places,  # where each begins in a rank's row of its target
    firsts,  # the first program of each
    row,  # elements from one rank's row of a target to the next one's
    N: tl.constexpr,  # tensors
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,  # to what the targets hold
):
    """A program copies BLOCK elements of one tensor to the row of one rank; padding is 0."""
    program, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    for index in tl.static_range(N):
        first = firsts[index]
        here = (program - first).to(tl.int64) * BLOCK
        if (program >= first) & (here < chunks[index]):
            offsets = here + tl.arange(0, BLOCK)
            wanted = offsets < chunks[index]
            begin = rank * chunks[index]
            values = tl.load(
                sources[index] + begin + offsets, mask=wanted & (begin + offsets < sizes[index]), other=0.0
            )
            values = values.to(targets[index].dtype.element_ty)
            there = targets[index] + rank * row + places[index] + offsets
            if ADD:
                values += tl.load(there, mask=wanted)
            tl.store(there, values, mask=wanted)


_BLOCK, _WARPS = 4096, 4
# Tensors of a launch: its code grows with them.
_MOST = 16


def pack(tensors: Sequence[Tensor], ranks: int, out: Tensor, *, add: bool = False) -> None:
    """Write row r of `out` from the r-th of `ranks` equal parts of each tensor's rows, one tensor after the other.

    Args:
        tensors: contiguous, in bf16 or fp32; rows are padded with zeros to a multiple of `ranks`.
        ranks: P.
        out: [P, …], contiguous, in bf16 or fp32.
        add: to what `out` holds, which is fp32 then; each sum is rounded once, as in torch's `add_`.
    """
    # fsdp's own rule: parts of ⌈rows / P⌉ rows.
    chunks = [-(-tensor.shape[0] // ranks) * math.prod(tensor.shape[1:]) for tensor in tensors]
    places = [0, *itertools.accumulate(chunks)]
    row = places.pop()
    assert out.is_contiguous()
    assert out.numel() == ranks * row, f"{list(out.shape)} for {ranks} rows of {row}"
    assert not add or out.dtype is torch.float32, out.dtype
    _launch(tensors, [out] * len(tensors), chunks, places, ranks, row, add)


def cast(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source, in bf16 or fp32, to its target, in the target's dtype; all are contiguous."""
    sizes = [tensor.numel() for tensor in sources]
    assert sizes == [tensor.numel() for tensor in targets]
    assert all(tensor.is_contiguous() for tensor in targets)
    _launch(sources, targets, sizes, [0] * len(sizes), 1, 0, False)


def _launch(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    chunks: Sequence[int],
    places: Sequence[int],
    ranks: int,
    row: int,
    add: bool,
) -> None:
    for start in range(0, len(sources), _MOST):
        part = slice(start, start + _MOST)
        own = tuple(sources[part])
        firsts = [0, *itertools.accumulate(triton.cdiv(chunk, _BLOCK) for chunk in chunks[part])]
        programs = firsts.pop()
        if programs:
            pack_kernel[(programs, ranks)](
                own, tuple(targets[part]), tuple(tensor.numel() for tensor in own), tuple(chunks[part]),
                tuple(places[part]), tuple(firsts), row, N=len(own), BLOCK=_BLOCK, ADD=add, num_warps=_WARPS,
            )  # fmt: skip
