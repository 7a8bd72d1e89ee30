"""Gradients into the buffer of a reduce-scatter, in its dtype: one read and one write of each element."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack_kernel(
    sources,  # tensors, contiguous, each [rows, …]
    sizes,  # elements of each
    chunks,  # elements of each that go to one rank, of rows padded to a multiple of the ranks
    places,  # where each begins in a rank's row of `out`
    firsts,  # the first program of each
    out,  # [ranks, the sum of chunks], contiguous
    row,  # elements of a row of `out`
    N: tl.constexpr,  # tensors
    BLOCK: tl.constexpr,
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
            tl.store(out + rank * row + places[index] + offsets, values.to(out.dtype.element_ty), mask=wanted)
