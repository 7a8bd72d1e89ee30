"""All-Scan by two all-to-alls in one launch: tiles are sent to their owners, scanned there, and sent back."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.all_scan import (
    advance,
    all_started,
    data_at,
    flag_at,
    give_up,
    load_matrix,
    product,
    signal,
    split,
    start,
    take,
    wait_for,
)


@triton.jit
def load_state_tile(x, tile, valid, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr):
    """[KB, BV] of [B·H, K, V]: all of K, BV columns of one head; zeros outside, all zeros where not `valid`."""
    NV: tl.constexpr = (V + BV - 1) // BV
    k, v = tl.arange(0, KB), tl.arange(0, BV)
    first = (tile % NV) * BV
    inside = (k < K)[:, None] & (first + v < V)[None, :] & valid
    base = x + (tile // NV) * (K * V) + first
    return tl.load(base + (k * V)[:, None] + v[None, :], mask=inside, other=0.0)


@triton.jit
def store_state_tile(x, tile, valid, value, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr):
    """The inverse of `load_state_tile`; stores nothing where not `valid`."""
    NV: tl.constexpr = (V + BV - 1) // BV
    k, v = tl.arange(0, KB), tl.arange(0, BV)
    first = (tile % NV) * BV
    inside = (k < K)[:, None] & (first + v < V)[None, :] & valid
    base = x + (tile // NV) * (K * V) + first
    tl.store(base + (k * V)[:, None] + v[None, :], value, mask=inside)


@triton.jit
def tile_offsets(K: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr):
    """Offsets of a tile's elements in an arena: contiguous rows of BV."""
    return (tl.arange(0, KB) * BV)[:, None] + tl.arange(0, BV)[None, :]


@triton.jit
def load_input(
    state,
    transition,
    carry_in,
    tile,
    valid,
    HAS_CARRY: tl.constexpr,
    MATRIX: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KB: tl.constexpr,
    BV: tl.constexpr,
):
    """This rank's input to a tile: its state, with `carry_in` folded in if it has one, and the log-decays, if any."""
    NV: tl.constexpr = (V + BV - 1) // BV
    k = tl.arange(0, KB)[:, None]
    head = tile // NV * K  # its first row
    decays = tl.load(transition + head + k, mask=(k < K) & valid & (not MATRIX), other=0.0)
    value = load_state_tile(state, tile, valid, K, V, KB, BV)
    if HAS_CARRY and MATRIX:
        factors = split(load_matrix(transition, head, head, head + tl.where(valid, K, 0), K, KB, KB, TRANSPOSED))
        value += product(factors, split(load_state_tile(carry_in, tile, valid, K, V, KB, BV)))
    elif HAS_CARRY:
        value += tl.exp(decays) * load_state_tile(carry_in, tile, valid, K, V, KB, BV)
    return value, decays


@triton.jit
def tiles_of_head(tile, tiles, width, NV: tl.constexpr):
    """The tiles from the first to before the last that are of this tile's head, and of its owner."""
    own = tile // width * width
    head = tile // NV * NV
    return tl.maximum(own, head), tl.minimum(tl.minimum(own + width, head + NV), tiles)


@triton.jit
def send_share(
    transition,
    place,  # of the owner's matrices from this rank
    tile,
    tiles,
    width,
    K: tl.constexpr,
    KB: tl.constexpr,
    NV: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """A tile's share of its head's matrix [K, KB] to the owner: rows, which its tiles of the head divide equally."""
    first, last = tiles_of_head(tile, tiles, width, NV)
    share = tl.cdiv(K, last - first)
    start_row = (tile - first) * share
    end = tl.minimum(start_row + share, K)
    head = tile // NV
    place += (head - tile // width * width // NV) * (K * KB)
    r, k = tl.arange(0, ROWS)[:, None], tl.arange(0, KB)[None, :]
    for row in range(start_row, end, ROWS):
        value = load_matrix(transition, head * K, head * K + row, head * K + end, K, KB, ROWS, TRANSPOSED)
        tl.store(place + (row + r) * KB + k, value, mask=(row + r < end) & (k < K))


@triton.jit
def first_turn(control, epoch, width, MATRIX: tl.constexpr):
    """The first tile of a CTA's turns. A tile with a matrix waits for shares from other CTAs, on all ranks.

    A waiting CTA could keep another one of its rank from starting. So it leaves unless all have started, which share
    the tiles by a counter, first those of step 2, then of step 3: the last to start finds any that are left.
    """
    if MATRIX:
        turn = 2 * width
        if all_started(control, epoch):
            turn = take(control)
    else:
        turn = tl.program_id(0)
    return turn


@triton.jit
def next_turn(turn, control, before, MATRIX: tl.constexpr):
    """The next tile of a step, which has `before` turns before it."""
    if MATRIX:
        turn = take(control) - before
    else:
        turn += tl.num_programs(0)
    return turn


@triton.jit(do_not_specialize=["tiles", "width", "limit"])
def two_shot_kernel(
    state,  # [B·H, K, V]
    transition,  # log-decays [B·H, K], or matrices [B·H, K, K], each or its transpose
    carry_in,  # like the state; read if HAS_CARRY
    output,  # like the state; written unless POSITION is 0
    carry_out,  # like the state; written if WANT_CARRY
    peers,  # [P] int64, addresses of the ranks' arenas in scan order
    control,  # int32: epoch, CTAs that have read it, turns taken
    failure,  # int64: 0, or the arena's first failure
    status,  # address of the host's copy of it
    limit: tl.int64,  # ns, of each wait
    tiles,  # of the state
    width,  # tiles of an owner
    flag_stride,  # flags of a rank's inputs
    results_flags,  # offsets in an arena, bytes; the flags of inputs are at 0
    inbox,
    inbox_stride,  # of one rank's tiles
    decays_box,
    decays_stride,
    results,
    results_stride,  # of all tiles
    POSITION: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KB: tl.constexpr,
    BV: tl.constexpr,
    MATRIX: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    WANT_CARRY: tl.constexpr,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
):
    """All-to-all of tiles to owners, the scan of each tile over the ranks, all-to-all of the results.

    Owner j has tiles [j·width, (j+1)·width). It waits for all ranks' inputs of a tile before it writes any result, so
    each of them has ended its previous scan and copied its results; it raises the results' flags after its last load of
    the inputs, and every rank waits for all results, so the next scan's inputs overwrite nothing that is still read.
    Inputs and results are also double-buffered by the epoch's parity.

    An owner has each head's matrix once: a rank's tiles of that head carry shares of it.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    TILE: tl.constexpr = K * BV
    cta = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    is_rank = lanes < P
    arenas = tl.load(peers + lanes, mask=is_rank, other=0)
    own = tl.load(peers + POSITION)
    size: tl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    epoch, failed = start(control, failure, LANES)
    parity = (epoch & 1).to(tl.int64)
    k = tl.arange(0, KB)[:, None]
    offsets = tile_offsets(K, KB, BV)
    inside = (k < K) & (tl.arange(0, BV) < BV)[None, :]
    if MATRIX:
        advance(control, epoch)

    # 1. This rank's part of every owner's tiles, beginning with the next rank's, so that not all write to one rank.
    slot = inbox + (parity * P + POSITION) * inbox_stride
    decays_slot = decays_box + (parity * P + POSITION) * decays_stride
    if failed == 0:
        for i in range(cta, width, tl.num_programs(0)):
            if POSITION < P - 1 or WANT_CARRY:
                owner: tl.constexpr = (POSITION + 1) % P
                tile = owner * width + i
                value, decays = load_input(
                    state, transition, carry_in, tile, tile < tiles, HAS_CARRY, MATRIX, TRANSPOSED, K, V, KB, BV
                )
                for n in tl.static_range(P):
                    # The load of the next tile overlaps the store of this one.
                    if n + 1 < P:
                        after = ((POSITION + 2 + n) % P) * width + i
                        exists = after < tiles
                        value_after, decays_after = load_input(
                            state, transition, carry_in, after, exists, HAS_CARRY, MATRIX, TRANSPOSED, K, V, KB, BV
                        )
                    valid = ((POSITION + 1 + n) % P) * width + i < tiles
                    arena = tl.load(peers + (POSITION + 1 + n) % P)
                    place = data_at(arena + slot, state) + i * TILE
                    tl.store(place + offsets, value, mask=inside & valid)
                    place = data_at(arena + decays_slot, state)
                    if not MATRIX:
                        tl.store(place + i * KB + k, decays, mask=(k < K) & valid)
                    elif POSITION > 0 and valid:
                        tile = (POSITION + 1 + n) % P * width + i
                        send_share(transition, place, tile, tiles, width, K, KB, NV, 16, TRANSPOSED)
                    if n + 1 < P:
                        value, decays = value_after, decays_after
            flags = flag_at(arenas + (POSITION * flag_stride + i) * 4)
            signal(flags, is_rank & (lanes * width + i < tiles), epoch, ASM)
    if not MATRIX:
        advance(control, epoch)

    # 2. This rank's own tiles: the scan over all ranks.
    i = first_turn(control, epoch, width, MATRIX)
    while i < width:
        tile = POSITION * width + i
        if (tile < tiles) & (failed == 0):
            missing = 0
            if MATRIX:
                first, last = tiles_of_head(tile, tiles, width, NV)
                for other in range(first - POSITION * width, last - POSITION * width):
                    if missing == 0:
                        flags = flag_at(own + (lanes * flag_stride + other) * 4)
                        missing = wait_for(flags, is_rank, tl.zeros_like(lanes) + epoch, limit, ASM)
            else:
                flags = flag_at(own + (lanes * flag_stride + i) * 4)
                missing = wait_for(flags, is_rank, tl.zeros_like(lanes) + epoch, limit, ASM)
            if missing > 0:
                give_up(failure, status, epoch, missing - 1, 1)
                failed = 1
            else:
                place = data_at(own + inbox + parity * P * inbox_stride, state) + i * TILE
                decays_place = data_at(own + decays_box + parity * P * decays_stride, state)
                value = tl.load(place + offsets, mask=inside, other=0.0)
                target = results + parity * 2 * results_stride
                if MATRIX:
                    # Of this tile's head. The first rank has none: the state before it is in its own, if there is one.
                    decays_place += (tile // NV - POSITION * width // NV) * (K * KB)
                    across = tl.arange(0, KB)[None, :]
                    running = value
                    LAST: tl.constexpr = P if WANT_CARRY else P - 1
                    for p in tl.range(1, P, num_stages=1):
                        folds = p < LAST
                        at = decays_place + p * (decays_stride // size) + k * KB + across
                        matrix = tl.load(at, mask=(k < K) & (across < K) & folds, other=0.0)
                        value = tl.load(place + p * (inbox_stride // size) + offsets, mask=inside & folds, other=0.0)
                        at = data_at(tl.load(peers + p) + target, state) + tile * TILE
                        tl.store(at + offsets, running, mask=inside)
                        if folds:
                            running = value + product(split(matrix), split(running))
                else:
                    decays_place += i * KB
                    decays = tl.load(decays_place + k, mask=k < K, other=0.0)
                    running = tl.zeros_like(value)
                    for p in tl.static_range(P):
                        if p + 1 < P - 1 or (p + 1 < P and WANT_CARRY):
                            value_after = tl.load(
                                place + (p + 1) * (inbox_stride // size) + offsets, mask=inside, other=0.0
                            )
                            decays_after = tl.load(
                                decays_place + (p + 1) * (decays_stride // size) + k, mask=k < K, other=0.0
                            )
                        if p > 0:
                            at = data_at(tl.load(peers + p) + target, state) + tile * TILE
                            tl.store(at + offsets, running, mask=inside)
                        if p < P - 1 or WANT_CARRY:
                            running = tl.exp(decays) * running + value
                        if p + 1 < P - 1 or (p + 1 < P and WANT_CARRY):
                            value, decays = value_after, decays_after
                if WANT_CARRY:
                    for p in tl.static_range(P):
                        at = data_at(tl.load(peers + p) + target + results_stride, state) + tile * TILE
                        tl.store(at + offsets, running, mask=inside)
                signal(flag_at(arenas + results_flags + tile * 4), is_rank, epoch, ASM)
        i = next_turn(i, control, 0, MATRIX)

    # 3. The results, out of the arena.
    i = i - width if MATRIX else cta
    while i < width:
        if failed == 0:
            flags = flag_at(own + results_flags + (lanes * width + i) * 4)
            active = is_rank & (lanes * width + i < tiles)
            missing = wait_for(flags, active, tl.zeros_like(lanes) + epoch, limit, ASM)
            if missing > 0:
                give_up(failure, status, epoch, missing - 1, 2)
                failed = 1
        place = data_at(own + results + parity * 2 * results_stride, state)
        for n in tl.static_range(P):
            tile = n * width + i
            valid = tile < tiles
            found = inside & valid & (failed == 0)
            at = place + tile * TILE
            if POSITION > 0:
                value = tl.load(at + offsets, mask=found, other=float("nan"))
                store_state_tile(output, tile, valid, value, K, V, KB, BV)
            if WANT_CARRY:
                value = tl.load(at + results_stride // size + offsets, mask=found, other=float("nan"))
                store_state_tile(carry_out, tile, valid, value, K, V, KB, BV)
        i = next_turn(i, control, width, MATRIX)
