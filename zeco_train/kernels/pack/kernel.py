"""Copies of many tensors, with a cast or a sum on the way: each element is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl


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
