"""All-Scan by two all-to-alls in one launch: tiles are sent to their owners, scanned there, and sent back."""

from __future__ import annotations

import triton
import triton.language as tl

from zeco_train.kernels.all_scan import (
    add_product,
    advance,
    data_at,
    flag_at,
    give_up,
    load_matrix,
    signal,
    split,
    start,
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
def fold(value, factor, before, MATRIX: tl.constexpr):
    """A tile's state after a rank, from that before it; `factor` holds log-decays [KB, 1], or a matrix [KB, KB]."""
    if MATRIX:
        value, small = add_product(split(factor), split(before), value, tl.zeros_like(value))
        return value + small
    return value + tl.exp(factor) * before


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
    """This rank's input to a tile: its state, with `carry_in` folded in if it has one, and the transition."""
    NV: tl.constexpr = (V + BV - 1) // BV
    k = tl.arange(0, KB)[:, None]
    head = tile // NV * K  # its first row
    if MATRIX:
        factor = load_matrix(transition, head, head, head + tl.where(valid, K, 0), 0, K, KB, KB, TRANSPOSED)
    else:
        factor = tl.load(transition + head + k, mask=(k < K) & valid, other=0.0)
    value = load_state_tile(state, tile, valid, K, V, KB, BV)
    if HAS_CARRY:
        value = fold(value, factor, load_state_tile(carry_in, tile, valid, K, V, KB, BV), MATRIX)
    return value, factor


@triton.jit(do_not_specialize=["tiles", "width", "limit"])
def two_shot_kernel(
    state,  # [B·H, K, V]
    transition,  # log-decays [B·H, K], or matrices [B·H, K, K], each or its transpose
    carry_in,  # like the state; read if HAS_CARRY
    output,  # like the state; written unless POSITION is 0
    carry_out,  # like the state; written if WANT_CARRY
    peers,  # [P] int64, addresses of the ranks' arenas in scan order
    control,  # int32: epoch, CTAs that have read it
    failure,  # int64: 0, or the arena's first failure
    status,  # address of the host's copy of it
    limit: tl.int64,  # ns, of each wait
    tiles,  # of the state
    width,  # tiles of an owner
    flag_stride,  # flags of a rank's inputs
    results_flags,  # offsets in an arena, bytes; the flags of inputs are at 0
    inbox,
    inbox_stride,  # of one rank's tiles
    factors_box,
    factors_stride,
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
    Inputs and results are also double-buffered by the epoch's parity. Each tile travels with its head's transition.
    """
    TILE: tl.constexpr = K * BV
    WIDTH: tl.constexpr = KB if MATRIX else 1  # of a factor
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
    of_factor = tile_offsets(K, KB, WIDTH)

    # 1. This rank's part of every owner's tiles, beginning with the next rank's, so that not all write to one rank.
    slot = inbox + (parity * P + POSITION) * inbox_stride
    factors_slot = factors_box + (parity * P + POSITION) * factors_stride
    if failed == 0:
        for i in range(cta, width, tl.num_programs(0)):
            if POSITION < P - 1 or WANT_CARRY:
                owner: tl.constexpr = (POSITION + 1) % P
                tile = owner * width + i
                value, factor = load_input(
                    state, transition, carry_in, tile, tile < tiles, HAS_CARRY, MATRIX, TRANSPOSED, K, V, KB, BV
                )
                for n in tl.static_range(P):
                    # The load of the next tile overlaps the store of this one.
                    if n + 1 < P:
                        after = ((POSITION + 2 + n) % P) * width + i
                        exists = after < tiles
                        value_next, factor_next = load_input(
                            state, transition, carry_in, after, exists, HAS_CARRY, MATRIX, TRANSPOSED, K, V, KB, BV
                        )
                    valid = ((POSITION + 1 + n) % P) * width + i < tiles
                    arena = tl.load(peers + (POSITION + 1 + n) % P)
                    place = data_at(arena + slot, state) + i * TILE
                    tl.store(place + offsets, value, mask=inside & valid)
                    place = data_at(arena + factors_slot, state) + i * (KB * WIDTH)
                    tl.store(place + of_factor, factor, mask=(k < K) & valid)
                    if n + 1 < P:
                        value, factor = value_next, factor_next
            flags = flag_at(arenas + (POSITION * flag_stride + i) * 4)
            signal(flags, is_rank & (lanes * width + i < tiles), epoch, ASM)
    advance(control, epoch)

    # 2. This rank's own tiles: the scan over all ranks.
    for i in range(cta, width, tl.num_programs(0)):
        tile = POSITION * width + i
        if (tile < tiles) & (failed == 0):
            flags = flag_at(own + (lanes * flag_stride + i) * 4)
            missing = wait_for(flags, is_rank, tl.zeros_like(lanes) + epoch, limit, ASM)
            if missing > 0:
                give_up(failure, status, epoch, missing - 1, 1)
                failed = 1
            else:
                place = data_at(own + inbox + parity * P * inbox_stride, state) + i * TILE
                factors_at = data_at(own + factors_box + parity * P * factors_stride, state)
                factors_at += i * (KB * WIDTH) + of_factor
                value = tl.load(place + offsets, mask=inside, other=0.0)
                factor = tl.load(factors_at, mask=k < K, other=0.0)
                running = tl.zeros_like(value)
                target = results + parity * 2 * results_stride
                for p in tl.static_range(P):
                    if p + 1 < P - 1 or (p + 1 < P and WANT_CARRY):
                        value_next = tl.load(place + (p + 1) * (inbox_stride // size) + offsets, mask=inside, other=0.0)
                        factor_next = tl.load(factors_at + (p + 1) * (factors_stride // size), mask=k < K, other=0.0)
                    if p > 0:
                        at = data_at(tl.load(peers + p) + target, state) + tile * TILE
                        tl.store(at + offsets, running, mask=inside)
                    if p < P - 1 or WANT_CARRY:
                        running = value if p == 0 else fold(value, factor, running, MATRIX)
                    if p + 1 < P - 1 or (p + 1 < P and WANT_CARRY):
                        value, factor = value_next, factor_next
                if WANT_CARRY:
                    for p in tl.static_range(P):
                        at = data_at(tl.load(peers + p) + target + results_stride, state) + tile * TILE
                        tl.store(at + offsets, running, mask=inside)
                signal(flag_at(arenas + results_flags + tile * 4), is_rank, epoch, ASM)

    # 3. The results, out of the arena.
    for i in range(cta, width, tl.num_programs(0)):
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
