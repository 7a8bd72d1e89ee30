"""A kernel that only takes time, for measurements of delays. Triton only."""

from __future__ import annotations

import triton
import triton.language as tl

# By the clock of wall time, whose unit does not depend on the GPU's frequency, as cycles do.
_SPIN_ASM = tl.constexpr("""
{
    .reg .pred more;
    .reg .b64 now, end;
    mov.u64 end, %globaltimer;
    add.u64 end, end, $1;
SPIN:
    mov.u64 now, %globaltimer;
    setp.lt.u64 more, now, end;
    @more bra SPIN;
    mov.b32 $0, 0;
}
""")


@triton.jit(do_not_specialize=["index"])
def spin_kernel(
    nanoseconds,  # int64: read when the kernel runs, so a replayed CUDA graph has those of the replay
    index,
    LANES: tl.constexpr,  # threads of the one program
):
    """Occupy the stream for `nanoseconds[index]`."""
    lanes = tl.zeros([LANES], tl.int64)
    # Not pure: the compiler would remove it, since its result is not used.
    tl.inline_asm_elementwise(
        _SPIN_ASM, "=r,l", [lanes + tl.load(nanoseconds + index)], dtype=tl.int32, is_pure=False, pack=1
    )
