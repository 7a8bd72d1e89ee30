"""Linear attention with one decay a head: `scalar_decay`, of each token, and `fixed_decay`, the same for all tokens.

    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k [B, T, G, K]; v, o [B, T, H, V]. G divides H, and consecutive heads share queries and keys: head h has those of
group h // (H / G). Mamba-2 has few groups, RetNet as many as heads.

`scalar_decay` takes g [B, T, H], log-decays, fp32 or fp64, finite and at most 0. `fixed_decay` takes log_decay [H] in
its place: g_t = log_decay for all t; 0 is no decay. It is a constant: its gradient is zeros, [H], and a forward pass
refuses one that requires a gradient. `op_passes` does not serve it, since it cuts each operand by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.passes import Kind, Operator, Passes
from zeco_train.ops.scalar_decay.chunked import CHUNKED_FIXED, CHUNKED_SCALAR
from zeco_train.ops.scalar_decay.flops import forward_flops, recomputed_flops
from zeco_train.ops.scalar_decay.step import fixed_step, scalar_step
from zeco_train.ops.selection import KernelRule

# A kernel holds one of the state's two dims whole, in shared memory.
_KERNELS = KernelRule(largest=256)


def _select_scalar(operands: Sequence[Tensor]) -> Passes:
    q, _, v, g = operands
    if not _KERNELS.serves(q, v, g):
        return CHUNKED_SCALAR
    from zeco_train.ops.scalar_decay.cuda import CUDA_SCALAR  # imports Triton

    return CUDA_SCALAR


def _select_fixed(operands: Sequence[Tensor]) -> Passes:
    q, _, v, log_decay = operands
    if not _KERNELS.serves(q, v, log_decay):
        return CHUNKED_FIXED
    from zeco_train.ops.scalar_decay.cuda import CUDA_FIXED  # imports Triton

    return CUDA_FIXED


SCALAR_DECAY = Operator(
    operands=("q", "k", "v", "g"),
    kind=Kind.diagonal,
    select=_select_scalar,
    oracle=by_blocks,
    step=scalar_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    kernels=_KERNELS,
)

FIXED_DECAY = Operator(
    operands=("q", "k", "v", "log_decay"),
    kind=Kind.diagonal,
    select=_select_fixed,
    oracle=by_blocks,
    step=fixed_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    kernels=_KERNELS,
)
