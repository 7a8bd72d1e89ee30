"""All-Scan in one launch over memory that all ranks of an NVLink domain map (DESIGN, section 5): the two kernels.

    R_0 = carry_in,    R_{p+1} = exp(log_decay_p) ⊙_K R_p + state_p

A rank writes into its peers' memory with plain stores and then raises a flag there; it waits for flags in its own
memory. What makes that right, for any delay of any rank and of any of its CTAs:

- A flag holds the number of the scan that raised it last, its *epoch*, and a wait is for `flag >= epoch`.
- The epoch lives in device memory and the kernel itself advances it, once all its CTAs have read it.
- Between the stores of a CTA's threads and the one thread that raises the flag (release, system scope) lies a barrier,
  and another one between the thread that saw a flag (acquire) and the loads of the others.
- Where data and flags lie is fixed by the arena, whatever a call's shape or number of CTAs (collectives/symmetric.py).
- CTA c of a rank waits only for CTAs c of other ranks, all of which run or have run: few of them, launched in order.
- Every wait ends: after `limit` nanoseconds the CTA writes what it waited for where the host reads it, sets the arena's
  failure word, gives NaN, and raises no further flag. Later kernels of the arena find the word set and do the same.

Offsets within a state are 32-bit: states have fewer than 2³¹ elements (checked by the caller), addresses are 64-bit.
Ranks here are positions in scan order: 0 is where the scan starts. The peers' table is in that order too.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WAIT_ASM = tl.constexpr("""
{
    .reg .pred done, more;
    .reg .b32 seen, polls;
    .reg .b64 now, end;
    mov.b32 $0, 0;
    mov.b32 polls, 0;
    mov.b64 end, 0;
    setp.eq.s32 done, $2, 0;
    @done bra LEAVE;
POLL:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $3;
    setp.ge.s32 done, seen, 0;
    @done bra LEAVE;
    add.s32 polls, polls, 1;
    and.b32 seen, polls, 63;
    setp.ne.s32 more, seen, 0;
    @more bra POLL;
    mov.u64 now, %globaltimer;
    setp.eq.u64 more, end, 0;
    @!more bra CHECK;
    add.u64 end, now, $4;
CHECK:
    setp.lt.u64 more, now, end;
    @more bra POLL;
    mov.b32 $0, 1;
LEAVE:
}
""")

_SIGNAL_ASM = tl.constexpr("""
{
    .reg .pred wanted;
    mov.b32 $0, 0;
    setp.ne.s32 wanted, $2, 0;
    @wanted st.release.sys.global.b32 [$1], $3;
}
""")


@triton.jit
def wait_for(flags, active, wanted, limit, ASM: tl.constexpr):
    """Wait until `flag >= wanted` for each active lane; the CTA's threads see then what was written before.

    Returns:
        0, or 1 + the last lane whose flag did not come within `limit` ns. The same in all threads, because the lanes
        are as many as the threads: their maximum goes through shared memory.
    """
    if ASM:
        late = tl.inline_asm_elementwise(
            _WAIT_ASM,
            "=r,l,r,r,l",
            [flags, active.to(tl.int32), wanted, limit],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        # Triton's interpreter has no clock, and takes a good part of a millisecond for each look.
        polls = limit // 1000000
        seen = tl.load(flags, mask=active, other=0)
        while (tl.max((active & (seen < wanted)).to(tl.int32)) > 0) & (polls > 0):
            seen = tl.load(flags, mask=active, other=0)
            polls -= 1
        late = (active & (seen < wanted)).to(tl.int32)
    last = tl.max(late * (1 + tl.arange(0, flags.shape[0])))
    tl.debug_barrier()
    return last


@triton.jit
def signal(flags, active, epoch, ASM: tl.constexpr):
    """Raise the active lanes' flags; whoever sees them sees all that this CTA stored before."""
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(
            _SIGNAL_ASM, "=r,l,r,r", [flags, active.to(tl.int32), epoch], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(flags, tl.zeros_like(active).to(tl.int32) + epoch, mask=active)


@triton.jit
def start(control, failure, LANES: tl.constexpr):
    """This scan's epoch, and whether an earlier one of the arena failed (0 or 1, the same in all threads)."""
    epoch = tl.load(control) + 1
    word = tl.load(failure + tl.zeros([LANES], tl.int32))
    return epoch, tl.max((word != 0).to(tl.int32))


@triton.jit
def advance(control, epoch):
    """Once in each CTA, at any time after `start`: the last one to come finds that all have read the epoch."""
    tl.debug_barrier()
    if tl.atomic_add(control + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(control + 1, 0)
        tl.store(control, epoch)


@triton.jit
def give_up(failure, status, epoch, peer, what):
    """Note the first failure of the arena, where later kernels find it and, in mapped host memory, the host."""
    word = (epoch.to(tl.int64) << 24) + (what << 16) + 1 + peer
    if tl.atomic_cas(failure, tl.zeros_like(word), word) == 0:
        tl.store(status.to(tl.pointer_type(tl.int64)), word)


@triton.jit
def flag_at(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def data_at(address, like):
    """A pointer to elements of the type that `like` points to; arenas keep everything on 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


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
    """Where the elements of a tile lie in an arena: rows of BV, one after the other."""
    return (tl.arange(0, KB) * BV)[:, None] + tl.arange(0, BV)[None, :]


@triton.jit
def load_input(
    state,
    log_decay,
    carry_in,
    tile,
    valid,
    HAS_CARRY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KB: tl.constexpr,
    BV: tl.constexpr,
):
    """What this rank contributes to a tile: its state, with `carry_in` folded in if it has one, and the log-decays."""
    NV: tl.constexpr = (V + BV - 1) // BV
    k = tl.arange(0, KB)[:, None]
    decays = tl.load(log_decay + (tile // NV) * K + k, mask=(k < K) & valid, other=0.0)
    value = load_state_tile(state, tile, valid, K, V, KB, BV)
    if HAS_CARRY:
        value += tl.exp(decays) * load_state_tile(carry_in, tile, valid, K, V, KB, BV)
    return value, decays


@triton.jit(do_not_specialize=["tiles", "width", "limit"])
def two_shot_kernel(
    state,  # [B·H, K, V]
    log_decay,  # [B·H, K]
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
    HAS_CARRY: tl.constexpr,
    WANT_CARRY: tl.constexpr,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
):
    """All-to-all of tiles to owners, the scan of each tile over the ranks, all-to-all of the results.

    Owner j has tiles [j·width, (j+1)·width). It waits for all ranks' inputs of a tile before it writes any result, so
    each of them has ended its previous scan and copied that one's results; it raises the results' flags after its last
    load of the inputs, and every rank waits for all results, so that inputs of the next scan find nobody reading.
    Inputs and results lie besides in one of two buffers by the epoch's parity.
    """
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

    # 1. This rank's part of every owner's tiles, beginning with the next rank's, so that not all write to one rank.
    slot = inbox + (parity * P + POSITION) * inbox_stride
    decays_slot = decays_box + (parity * P + POSITION) * decays_stride
    if failed == 0:
        for i in range(cta, width, tl.num_programs(0)):
            if POSITION < P - 1 or WANT_CARRY:
                owner: tl.constexpr = (POSITION + 1) % P
                tile = owner * width + i
                value, decays = load_input(state, log_decay, carry_in, tile, tile < tiles, HAS_CARRY, K, V, KB, BV)
                for n in tl.static_range(P):
                    # The next tile is on its way while this one is stored.
                    if n + 1 < P:
                        after = ((POSITION + 2 + n) % P) * width + i
                        value_after, decays_after = load_input(
                            state, log_decay, carry_in, after, after < tiles, HAS_CARRY, K, V, KB, BV
                        )
                    valid = ((POSITION + 1 + n) % P) * width + i < tiles
                    arena = tl.load(peers + (POSITION + 1 + n) % P)
                    place = data_at(arena + slot, state) + i * TILE
                    tl.store(place + offsets, value, mask=inside & valid)
                    place = data_at(arena + decays_slot, state) + i * KB
                    tl.store(place + k, decays, mask=(k < K) & valid)
                    if n + 1 < P:
                        value, decays = value_after, decays_after
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
                decays_place = data_at(own + decays_box + parity * P * decays_stride, state) + i * KB
                value = tl.load(place + offsets, mask=inside, other=0.0)
                decays = tl.load(decays_place + k, mask=k < K, other=0.0)
                running = tl.zeros_like(value)
                target = results + parity * 2 * results_stride
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

    Rank p writes scan e into one of two buffers of rank p + 1. That one has to have read scan e − 2 from it: as it
    starts scan e − 1, it gives rank p credit for e − 2. `carry_out` needs no credit: the last rank has it only after
    every rank's part of this scan, and so after the end of every rank's scan before.
    """
    cta = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    own = tl.load(peers + POSITION)
    epoch, failed = start(control, failure, LANES)
    parity = (epoch & 1).to(tl.int64)
    if POSITION > 0:
        # What this rank read in scans before this one is read: kernels of a stream follow each other.
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
        # On its way while this rank waits.
        value = load_rows(state, first, end, V, VB, SUB)
        decays = load_decays(log_decay, first, end, SUB)
        if failed == 0:
            # Lane 0: the block from the rank before. Lane 1: the credit of the rank after.
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
