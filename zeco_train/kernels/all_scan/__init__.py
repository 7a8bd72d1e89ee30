"""All-Scan in one launch over memory that all ranks of an NVLink domain map (docs/mathematics.md).

    R_0 = carry_in,    R_{p+1} = exp(log_decay_p) ⊙_K R_p + state_p    or    M_p R_p + state_p

A rank writes into its peers' memory with plain stores and then raises a flag there; it waits for flags in its own
memory. The protocol is correct for any delay of any rank and of any of its CTAs:

- A flag holds the epoch, the number of the scan that raised it last, and a wait is for `flag >= epoch`.
- The epoch is in device memory and is advanced by the kernel itself, once all its CTAs have read it.
- Between the stores of a CTA's threads and the one thread that raises the flag (release, system scope) lies a barrier,
  and another one between the thread that saw a flag (acquire) and the loads of the others.
- The positions of data and flags are fixed by the arena, for any shape or number of CTAs (collectives/symmetric.py).
- CTA c of a rank waits only for CTAs c of other ranks (for `chain`'s credit: for CTA 0), all of which run or have run:
  they are few, and launched in order. In `chain` a fold by a matrix also waits for other CTAs of the rank before, which
  send parts of its operand. A CTA waits for a carry, or for a state that is received after its own is sent, only once
  all CTAs of its rank have started, so that it keeps none from starting.
- Every wait is bounded: after `limit` nanoseconds the CTA reports the wait to the host, sets the arena's failure word,
  outputs NaN, and raises no further flag. Later kernels of the arena find the word set and do the same.

Offsets within a state are 32-bit: states have fewer than 2³¹ elements (checked by the caller), addresses are 64-bit.
Ranks here are positions in scan order: 0 is where the scan starts. The peers' table is in that order too.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Flags are compared by the sign of the difference, which stays right when the epoch wraps around after 2³¹ scans.
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
    """Wait until `flag >= wanted` for each active lane; then all threads of the CTA see what was written before it.

    Returns:
        0, or 1 + the last lane whose flag was not raised within `limit` ns. The same in all threads: there are as many
        lanes as threads, so their maximum goes through shared memory.
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
        # Triton's interpreter has no clock; each poll takes a good part of a millisecond.
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
    """Raise the active lanes' flags; a rank that sees one sees all that this CTA stored before."""
    tl.debug_barrier()
    if ASM:
        # Not pure: the compiler would remove it, since its result is not used.
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
    """Advance the epoch when the last CTA calls this: all have read it then. Once per CTA, any time after `start`."""
    tl.debug_barrier()
    if tl.atomic_add(control + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(control + 1, 0)
        tl.store(control + 2, 0)
        tl.atomic_xchg(control, epoch, sem="release", scope="gpu")


@triton.jit
def all_started(control, epoch):
    """Whether all CTAs of this scan have called `advance`."""
    return tl.atomic_add(control, 0, sem="acquire", scope="gpu") == epoch


@triton.jit
def take(control):
    """A number that no other CTA of this scan gets, from 0 on."""
    return tl.atomic_add(control + 2, 1, sem="relaxed", scope="gpu")


@triton.jit
def give_up(failure, status, epoch, peer, what):
    """Record the arena's first failure, for later kernels and, in mapped host memory, for the host."""
    word = (epoch.to(tl.int64) << 24) + (what << 16) + 1 + peer
    if tl.atomic_cas(failure, tl.zeros_like(word), word) == 0:
        # Triton takes an address below 2³¹, as a Python without PIE has them, for an int32.
        tl.store(status.to(tl.int64).to(tl.pointer_type(tl.int64)), word)


@triton.jit
def flag_at(address):
    """A pointer to the flag at a byte address."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def data_at(address, like):
    """A pointer to elements of the type that `like` points to; arenas keep everything on 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def load_matrix(x, head, row, end, k, K: tl.constexpr, KB: tl.constexpr, SUB: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[SUB, KB] of the matrix of the head that begins at row `head`, from `row` and column `k` on, below `end`."""
    r, k = row + tl.arange(0, SUB)[:, None], k + tl.arange(0, KB)[None, :]
    places = head * K + k * K + (r - head) if TRANSPOSED else r * K + k
    return tl.load(x + places, mask=(r < end) & (k < K), other=0.0)


@triton.jit
def split(x):
    """Three tensors in bf16, the sum of which is x but for 2⁻²⁴ of it; of fp64 x itself."""
    if x.dtype == tl.float64:
        parts = x, x, x
    else:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        parts = high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return parts


@triton.jit
def add_product(a, b, total, small):
    """Add the product of two matrices, each `split`, to `total + small`, on tensor cores with the error of fp32.

    Tensor cores truncate their sums, always towards 0. So those of the largest term are of 32 products each, 0 for all
    other k, and are added up with rounding: a number of imprecise sums keeps Triton from doing so on tensor cores.
    """
    if a[0].dtype == tl.float64:
        total = tl.dot(a[0], b[0], total, out_dtype=tl.float64)
    else:
        part = tl.arange(0, b[0].shape[0])[:, None] // 32
        for n in tl.static_range((b[0].shape[0] + 31) // 32):
            total += tl.dot(a[0], tl.where(part == n, b[0], 0.0).to(tl.bfloat16), max_num_imprecise_acc=32)
        small = tl.dot(a[2], b[0], tl.dot(a[1], b[1], tl.dot(a[0], b[2], small)))
        small = tl.dot(a[1], b[0], tl.dot(a[0], b[1], small))
    return total, small
