"""All-Scan as a chain in one launch: blocks flow from rank to rank (ZeCO, Algorithm 2)."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.all_scan import advance, data_at, flag_at, give_up, signal, start, wait_for


@triton.jit
def load_rows(x, row, end, V: tl.constexpr, VB: tl.constexpr, SUB: tl.constexpr):
    """[SUB, VB] of [rows, V] from `row` on, below `end`; zeros outside."""
    r, v = row + tl.arange(0, SUB), tl.arange(0, VB)
    return tl.load(x + r[:, None] * V + v[None, :], mask=(r < end)[:, None] & (v < V)[None, :], other=0.0)


@triton.jit
def store_rows(x, row, end, value, V: tl.constexpr, VB: tl.constexpr, SUB: tl.constexpr):
    """The inverse of `load_rows`."""
    r, v = row + tl.arange(0, SUB), tl.arange(0, VB)
    tl.store(x + r[:, None] * V + v[None, :], value, mask=(r < end)[:, None] & (v < V)[None, :])


@triton.jit
def load_decays(x, row, end, SUB: tl.constexpr):
    """[SUB, 1] of [rows] from `row` on, below `end`; zeros outside."""
    r = row + tl.arange(0, SUB)[:, None]
    return tl.load(x + r, mask=r < end, other=0.0)


@triton.jit(do_not_specialize=["rows", "block_rows", "blocks", "limit"])
def chain_kernel(
    state,  # [rows, V], rows = B·H·K
    log_decay,  # [rows]
    carry_in,  # like the state; read if HAS_CARRY
    output,  # like the state; written unless POSITION is 0
    carry_out,  # like the state; written if WANT_CARRY
    peers,  # [P] int64, addresses of the ranks' arenas in scan order
    control,  # int32: epoch, CTAs that have read it
    failure,  # int64: 0, or the arena's first failure
    status,  # address of the host's copy of it
    limit: tl.int64,  # ns, of each wait
    rows,
    block_rows,
    blocks,
    credit,  # offsets in an arena, bytes; the blocks' flags are at 0
    carry_flags,
    inbox,
    inbox_stride,  # of one of the two buffers
    carry_box,
    POSITION: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    VB: tl.constexpr,
    SUB: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    WANT_CARRY: tl.constexpr,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Blocks of rows flow from rank to rank, each folded as it passes (ZeCO, Algorithm 2).

    Rank p writes scan e into one of two buffers of rank p + 1, which must have read scan e − 2 from it by then: when
    rank p + 1 starts scan e − 1, it gives rank p credit for e − 2. `carry_out` needs no credit: the last rank has it
    only after every rank's part of this scan, and so after the end of every rank's previous scan.
    """
    cta = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    own = tl.load(peers + POSITION)
    epoch, failed = start(control, failure, LANES)
    parity = (epoch & 1).to(tl.int64)
    if POSITION > 0:
        # This rank has finished reading earlier scans: kernels of a stream follow each other.
        before = tl.load(peers + POSITION - 1)
        if (cta == 0) & (failed == 0):
            signal(flag_at(before + credit + tl.zeros_like(lanes)), lanes < 1, epoch - 1, ASM)
        advance(control, epoch)

    received = data_at(own + inbox + parity * inbox_stride, state)
    if POSITION < P - 1:
        following = tl.load(peers + POSITION + 1)
        sent = data_at(following + inbox + parity * inbox_stride, state)
    for block in range(cta, blocks, tl.num_programs(0)):
        first = block * block_rows
        end = tl.minimum(first + block_rows, rows)
        # Loaded before the wait, which hides their latency.
        value = load_rows(state, first, end, V, VB, SUB)
        decays = load_decays(log_decay, first, end, SUB)
        if failed == 0:
            # Lane 0: this scan's block from the rank before. Lane 1: credit from the rank after for scan e − 2, the
            # last one in this buffer.
            place = tl.where(lanes == 0, block * 4, credit)
            active = ((lanes == 0) & (POSITION > 0)) | ((lanes == 1) & (POSITION < P - 1))
            missing = wait_for(flag_at(own + place), active, epoch - 2 * lanes, limit, ASM)
            if missing > 0:
                give_up(failure, status, epoch, POSITION - 3 + 2 * missing, 2 + missing)
                failed = 1
        for row in range(first, end, SUB):
            if POSITION > 0:
                incoming = load_rows(received, row, end, V, VB, SUB)
                if failed != 0:
                    incoming = tl.full([SUB, VB], float("nan"), incoming.dtype)
                store_rows(output, row, end, incoming, V, VB, SUB)
                folded = value + tl.exp(decays) * incoming
            elif HAS_CARRY:
                folded = value + tl.exp(decays) * load_rows(carry_in, row, end, V, VB, SUB)
            else:
                folded = value
            if POSITION < P - 1:
                if failed == 0:
                    store_rows(sent, row, end, folded, V, VB, SUB)
            elif WANT_CARRY:
                store_rows(carry_out, row, end, folded, V, VB, SUB)
                if failed == 0:
                    for p in tl.static_range(P - 1):
                        there = data_at(tl.load(peers + p) + carry_box + parity * inbox_stride, state)
                        store_rows(there, row, end, folded, V, VB, SUB)
            if row + SUB < end:
                value = load_rows(state, row + SUB, end, V, VB, SUB)
                decays = load_decays(log_decay, row + SUB, end, SUB)
        if failed == 0:
            if POSITION < P - 1:
                signal(flag_at(following + block * 4 + tl.zeros_like(lanes)), lanes < 1, epoch, ASM)
            elif WANT_CARRY:
                others = tl.load(peers + lanes, mask=lanes < P - 1, other=0)
                signal(flag_at(others + carry_flags + block * 4), lanes < P - 1, epoch, ASM)
    if POSITION == 0:
        advance(control, epoch)

    if WANT_CARRY and POSITION < P - 1:
        for block in range(cta, blocks, tl.num_programs(0)):
            if failed == 0:
                flags = flag_at(own + carry_flags + block * 4 + tl.zeros_like(lanes))
                if wait_for(flags, lanes < 1, tl.zeros_like(lanes) + epoch, limit, ASM) > 0:
                    give_up(failure, status, epoch, P - 1, 5)
                    failed = 1
            first = block * block_rows
            end = tl.minimum(first + block_rows, rows)
            for row in range(first, end, SUB):
                value = load_rows(data_at(own + carry_box + parity * inbox_stride, state), row, end, V, VB, SUB)
                if failed != 0:
                    value = tl.full([SUB, VB], float("nan"), value.dtype)
                store_rows(carry_out, row, end, value, V, VB, SUB)
