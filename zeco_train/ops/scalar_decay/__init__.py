"""Linear attention with one decay a head: `scalar_decay`, of each token, and `fixed_decay`, the same for all tokens.

    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k [B, T, G, K]; v, o [B, T, H, V]. G divides H, and consecutive heads share queries and keys: head h has those of
group h // (H / G). Mamba-2 has few groups, RetNet as many as heads.

`scalar_decay` takes g [B, T, H], log-decays, fp32 or fp64, finite and at most 0. `fixed_decay` takes log_decay [H] in
its place: g_t = log_decay for all t; 0 is no decay. It is a constant: its gradient is zeros, [H], and a forward pass
refuses one that requires a gradient.
"""

from __future__ import annotations

from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, Peer
from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.passes import Passes
from zeco_train.ops.scalar_decay.chunked import CHUNKED_FIXED, CHUNKED_SCALAR
from zeco_train.ops.scalar_decay.flops import forward_flops, recomputed_flops
from zeco_train.ops.scalar_decay.step import fixed_step, scalar_step

# A kernel holds one of the state's two dims whole, in shared memory.
_KERNELS = KernelRule(largest=256)
# 16,384 tokens and 16 heads: 0.167 + 0.380 ms.
FIXED_TIME = OperatorTime("fixed_decay", 2.09e-9, 0.31, 128, 128)


def _cuda_scalar() -> Passes:
    from zeco_train.ops.scalar_decay.cuda import CUDA_SCALAR  # imports Triton

    return CUDA_SCALAR


def _cuda_fixed() -> Passes:
    from zeco_train.ops.scalar_decay.cuda import CUDA_FIXED  # imports Triton

    return CUDA_FIXED


SCALAR_DECAY = Operator(
    operands=("q", "k", "v", "g"),
    dims=("BTGK", "BTGK", "BTHV", "BTH"),
    kind=Kind.diagonal,
    portable=CHUNKED_SCALAR,
    oracle=by_blocks,
    one_token=scalar_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    cuda=_cuda_scalar,
    kernels=_KERNELS,
    # 16,384 tokens and 16 heads: 0.186 + 0.742 ms.
    time=OperatorTime("scalar_decay", 3.54e-9, 0.20, 128, 128),
    peers=(Peer("fla.ops.simple_gla", "chunk_simple_gla"),),
)

FIXED_DECAY = Operator(
    operands=("q", "k", "v", "log_decay"),
    dims=("BTGK", "BTGK", "BTHV", "H"),
    kind=Kind.diagonal,
    portable=CHUNKED_FIXED,
    oracle=by_blocks,
    one_token=fixed_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    cuda=_cuda_fixed,
    kernels=_KERNELS,
    time=FIXED_TIME,
    # fla's retention has RetNet's decays by itself.
    peers=(
        Peer("fla.ops.retention", "chunk_retention", "retention"),
        Peer("fla.ops.linear_attn", "chunk_linear_attn", "none", (("normalize", False),)),
    ),
)
