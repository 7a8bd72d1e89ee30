"""Question: which kernels store heads into peers' memory? Those of `lab.ulysses_stores`, which has the answer.
Command: python -m lab.ulysses_stores
Date: 2026-11-27
Answer: these two, of one stream; in a module of their own, since Triton reads the variable that interprets them once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.all_scan import advance, flag_at, give_up, signal, start, wait_for


@triton.jit
def even(number):
    """A number of a table, of words of 8 bytes; even, so that accesses have 16."""
    return tl.multiple_of(tl.load(number), 2)


@triton.jit
def copy_rows(
    source,
    stride,
    target,
    target_stride,
    part,
    cta,
    failed,
    CTAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Every CTAS-th group of ROWS rows of a part, by the distances of rows; NaN if failed."""
    rows, width = tl.load(part), even(part + 1)
    words = tl.arange(0, WIDTH)[None, :]
    for first in range(cta * ROWS, rows, CTAS * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        wanted = (row < rows) & (words < width)
        values = tl.load(source + row * stride + words, mask=wanted & (failed == 0), other=-1)
        tl.store(target + row * target_stride + words, values, mask=wanted)


@triton.jit
def words_at(address):
    """A pointer to words of 8 bytes at a byte address, a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@triton.jit(do_not_specialize=["limit"])
def send_kernel(
    source, into, parts, peers, control, failure, status, limit: tl.int64, flags, part_stride,
    POSITION: tl.constexpr, P: tl.constexpr, CTAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """This rank's part of each peer's rows into the peer's slot, its own into `into`; raises a flag a peer and CTA."""
    cta = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    epoch, failed = start(control, failure, LANES)
    buffer = (epoch & 1).to(tl.int64) * P + POSITION
    for n in tl.static_range(P):
        peer = (POSITION + 1 + n) % P
        part = parts + peer * 6
        place, stride = source + even(part + 2), even(part + 3)
        if n == P - 1:  # itself
            to, to_stride = into + even(part + 4), even(part + 5)
            copy_rows(place, stride, to, to_stride, part, cta, 0, CTAS, ROWS, WIDTH)
        elif failed == 0:
            there = tl.load(peers + peer)
            slot = words_at(there + flags + buffer * part_stride)
            copy_rows(place, stride, slot, even(part + 1), part, cta, 0, CTAS, ROWS, WIDTH)
            signal(flag_at(there + (POSITION * CTAS + cta) * 4 + tl.zeros_like(lanes)), lanes < 1, epoch, ASM)
    advance(control, epoch)


@triton.jit(do_not_specialize=["limit"])
def receive_kernel(
    source, into, parts, peers, control, failure, status, limit: tl.int64, flags, part_stride,
    POSITION: tl.constexpr, P: tl.constexpr, CTAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What the peers have sent, out of the slot into `into`; NaN if one has not."""
    cta = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    after, failed = start(control, failure, LANES)
    epoch = after - 1  # `send_kernel` has advanced it
    own = tl.load(peers + POSITION)
    for n in tl.static_range(P):
        peer = (POSITION + 1 + n) % P
        if n < P - 1:
            part = parts + peer * 6
            if failed == 0:
                flag = flag_at(own + (peer * CTAS + cta) * 4 + tl.zeros_like(lanes))
                if wait_for(flag, lanes < 1, tl.zeros_like(lanes) + epoch, limit, ASM) > 0:
                    give_up(failure, status, epoch, peer, 2)
                    failed = 1
            place = words_at(own + flags + ((epoch & 1).to(tl.int64) * P + peer) * part_stride)
            to, to_stride = into + even(part + 4), even(part + 5)
            copy_rows(place, even(part + 1), to, to_stride, part, cta, failed, CTAS, ROWS, WIDTH)
