"""All-Scan as a chain in one launch: blocks flow from rank to rank (ZeCO, Algorithm 2)."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.all_scan import (
    add_product,
    advance,
    all_started,
    data_at,
    flag_at,
    give_up,
    load_matrix,
    signal,
    split,
    start,
    take,
    wait_for,
)


@triton.jit
def load_rows(x, row, end, column, V: tl.constexpr, VB: tl.constexpr, SUB: tl.constexpr):
    """[SUB, VB] of [rows, V] from `row` and `column` on, below `end`; zeros outside."""
    r, v = row + tl.arange(0, SUB), column + tl.arange(0, VB)
    return tl.load(x + r[:, None] * V + v[None, :], mask=(r < end)[:, None] & (v < V)[None, :], other=0.0)


@triton.jit
def store_rows(x, row, end, column, value, V: tl.constexpr, VB: tl.constexpr, SUB: tl.constexpr):
    """The inverse of `load_rows`."""
    r, v = row + tl.arange(0, SUB), column + tl.arange(0, VB)
    tl.store(x + r[:, None] * V + v[None, :], value, mask=(r < end)[:, None] & (v < V)[None, :])


@triton.jit
def copy_rows(source, target, row, end, column, failed, V: tl.constexpr, VB: tl.constexpr, SUB: tl.constexpr):
    """Store what `load_rows` loads, or NaN if this scan `failed`, and return it."""
    value = tl.where(failed != 0, float("nan"), load_rows(source, row, end, column, V, VB, SUB))
    store_rows(target, row, end, column, value, V, VB, SUB)
    return value


@triton.jit
def load_decays(x, row, end, SUB: tl.constexpr):
    """[SUB, 1] of [rows] from `row` on, below `end`; zeros outside."""
    r = row + tl.arange(0, SUB)[:, None]
    return tl.load(x + r, mask=r < end, other=0.0)


@triton.jit
def rows_of(unit, rows, block_rows, SUB: tl.constexpr, MATRIX: tl.constexpr):
    """The first row of a unit, and that after its last: of a run of `block_rows`, or of a tile of a head's rows."""
    if MATRIX:
        TILES: tl.constexpr = (MATRIX + SUB - 1) // SUB
        head = unit // TILES * MATRIX
        first = head + unit % TILES * SUB
        end = tl.minimum(first + SUB, head + MATRIX)
    else:
        first = unit * block_rows
        end = tl.minimum(first + block_rows, rows)
    return first, end


@triton.jit(do_not_specialize=["rows", "block_rows", "runs", "limit"])
def chain_kernel(
    state,  # [rows, V], rows = B·H·K
    transition,  # log-decays [rows], or matrices, of each head [K, K] or its transpose
    carry_in,  # like the state; read if HAS_CARRY
    output,  # like the state; written unless POSITION is 0
    carry_out,  # like the state; written if WANT_CARRY
    peers,  # [P] int64, addresses of the ranks' arenas in scan order
    control,  # int32: epoch, CTAs that have read it, copies taken
    failure,  # int64: 0, or the arena's first failure
    status,  # address of the host's copy of it
    limit: tl.int64,  # ns, of each wait
    rows,
    block_rows,
    runs,  # of blocks, one after another by one CTA
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
    MATRIX: tl.constexpr,  # 0: log-decays; else K, and blocks are tiles of SUB rows of a head and VB columns
    SLICE: tl.constexpr,  # rows of a product, a part of K
    TRANSPOSED: tl.constexpr,
    PIECES: tl.constexpr,  # blocks along V; 1 for log-decays
    GROUPS: tl.constexpr,  # runs that share them
    CUTS: tl.constexpr,  # the transition is 0, and no carry is wanted
    HAS_CARRY: tl.constexpr,
    WANT_CARRY: tl.constexpr,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Blocks of rows flow from rank to rank, each folded as it passes (ZeCO, Algorithm 2).

    Rank p writes scan e into one of two buffers of rank p + 1, which must have read scan e − 2 from it by then: when
    rank p + 1 starts scan e − 1, it gives rank p credit for e − 2. `carry_out` needs no credit: the last rank has it
    only after every rank's part of this scan, and so after the end of every rank's previous scan. With CUTS, in which
    ranks may differ, a rank sends its state before it waits for the rank before.

    A fold by a matrix reads all rows of a head, and so waits for the blocks of all its tiles, of the same columns. A
    run's matrix rows are loaded once, before its first wait; `output` is written once the fold is sent.
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
    if POSITION > 0 or WANT_CARRY:
        advance(control, epoch)

    TILES: tl.constexpr = (MATRIX + SUB - 1) // SUB if MATRIX else 1
    LATE: tl.constexpr = CUTS and POSITION > 0 and POSITION < P - 1  # it receives once it has sent
    FOLDS: tl.constexpr = (POSITION > 0 or HAS_CARRY) and (POSITION < P - 1 or WANT_CARRY) and not CUTS
    received = data_at(own + inbox + parity * inbox_stride, state)
    if POSITION < P - 1:
        following = tl.load(peers + POSITION + 1)
        sent = data_at(following + inbox + parity * inbox_stride, state)
    for run in range(cta, runs, tl.num_programs(0)):
        unit = run // GROUPS
        first, end = rows_of(unit, rows, block_rows, SUB, MATRIX)
        if FOLDS and MATRIX:
            head = unit // TILES * MATRIX  # its first row
            factors = ()
            for k in tl.static_range(0, MATRIX, SLICE):
                factors += (split(load_matrix(transition, head, first, end, k, MATRIX, SLICE, SUB, TRANSPOSED)),)  # type: ignore[assignment]
        # Loads of one piece must not be moved before the wait of an earlier one, as a pipelined loop would.
        for piece in tl.range(run % GROUPS, PIECES, GROUPS, num_stages=1):
            block, column = unit * PIECES + piece, piece * VB
            # Loaded before the wait, which hides their latency.
            value = load_rows(state, first, end, column, V, VB, SUB)
            if not MATRIX:
                decays = load_decays(transition, first, end, SUB)
            if failed == 0:
                # The first lanes: this scan's blocks from the rank before. The next one: credit from the rank after for
                # scan e − 2, the last one in this buffer.
                is_credit = (lanes == TILES).to(tl.int32)
                place = tl.where(lanes == TILES, credit, (block + (lanes - unit % TILES) * PIECES) * 4)
                active = ((lanes < TILES) & (POSITION > 0 and not LATE)) | ((lanes == TILES) & (POSITION < P - 1))
                missing = wait_for(flag_at(own + place), active, epoch - 2 * is_credit, limit, ASM)
                if missing > 0:
                    late_credit = (missing > TILES).to(tl.int32)
                    give_up(failure, status, epoch, POSITION - 1 + 2 * late_credit, 3 + late_credit)
                    failed = 1
            for row in tl.range(first, end, SUB, num_stages=1):
                folded = value
                if POSITION > 0 and not LATE and not (FOLDS and MATRIX):
                    incoming = copy_rows(received, output, row, end, column, failed, V, VB, SUB)
                elif HAS_CARRY and not MATRIX:
                    incoming = load_rows(carry_in, row, end, column, V, VB, SUB)
                if FOLDS and MATRIX:
                    source = received if POSITION > 0 else carry_in
                    slices, small = (), tl.zeros_like(folded)
                    for k in tl.static_range(0, MATRIX, SLICE):
                        slices += (load_rows(source, head + k, head + MATRIX, column, V, VB, SLICE),)  # type: ignore[assignment]
                    for k in tl.static_range(0, MATRIX, SLICE):
                        folded, small = add_product(factors[k // SLICE], split(slices[k // SLICE]), folded, small)
                    folded += small
                elif FOLDS:
                    folded += tl.exp(decays) * incoming
                if POSITION < P - 1:
                    if failed == 0:
                        store_rows(sent, row, end, column, folded, V, VB, SUB)
                elif WANT_CARRY:
                    folded = tl.where(failed != 0, float("nan"), folded)
                    store_rows(carry_out, row, end, column, folded, V, VB, SUB)
                    if failed == 0:
                        for p in tl.static_range(P - 1):
                            there = data_at(tl.load(peers + p) + carry_box + parity * inbox_stride, state)
                            store_rows(there, row, end, column, folded, V, VB, SUB)
                if not MATRIX and row + SUB < end:
                    value = load_rows(state, row + SUB, end, column, V, VB, SUB)
                    decays = load_decays(transition, row + SUB, end, SUB)
            if failed == 0:
                if POSITION < P - 1:
                    signal(flag_at(following + block * 4 + tl.zeros_like(lanes)), lanes < 1, epoch, ASM)
                elif WANT_CARRY:
                    others = tl.load(peers + lanes, mask=lanes < P - 1, other=0)
                    signal(flag_at(others + carry_flags + block * 4), lanes < P - 1, epoch, ASM)
            if POSITION > 0 and FOLDS and MATRIX:
                copy_rows(received, output, first, end, column, failed, V, VB, SUB)
    if POSITION == 0 and not WANT_CARRY:
        advance(control, epoch)

    if LATE or (WANT_CARRY and POSITION < P - 1):
        # A waiting CTA could keep another one of this rank, whose blocks others wait for, from starting. So CTAs wait
        # here once all have started, and share the copies by a counter: the last to start finds any that are left.
        run = runs
        if all_started(control, epoch):
            run = take(control)
        while run < runs:
            first, end = rows_of(run // GROUPS, rows, block_rows, SUB, MATRIX)
            for piece in range(run % GROUPS, PIECES, GROUPS):
                block, column = run // GROUPS * PIECES + piece, piece * VB
                if failed == 0:
                    flags = flag_at(own + (0 if LATE else carry_flags) + block * 4 + tl.zeros_like(lanes))
                    if wait_for(flags, lanes < 1, tl.zeros_like(lanes) + epoch, limit, ASM) > 0:
                        give_up(failure, status, epoch, (POSITION if LATE else P) - 1, 3 if LATE else 5)
                        failed = 1
                for row in range(first, end, SUB):
                    arrived = data_at(own + (inbox if LATE else carry_box) + parity * inbox_stride, state)
                    copy_rows(arrived, output if LATE else carry_out, row, end, column, failed, V, VB, SUB)
            run = take(control)
