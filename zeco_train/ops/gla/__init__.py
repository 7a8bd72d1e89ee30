"""Gated linear attention (Yang et al. 2024, arXiv 2312.06635): a decay for each channel of the keys and each token.

    S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k, g [B, T, H, K]; v, o [B, T, H, V]; g is log-decays, fp32 or fp64, finite and at most 0.
"""

from __future__ import annotations

from zeco_train.ops.gla.chunked import CHUNKED
from zeco_train.ops.gla.flops import forward_flops, recomputed_flops
from zeco_train.ops.gla.step import STEP_KERNELS, recurrent_step
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, Peer
from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.passes import Passes


def _cuda() -> Passes:
    from zeco_train.ops.gla.cuda import CUDA  # imports Triton

    return CUDA


GLA = Operator(
    operands=("q", "k", "v", "g"),
    dims=("BTHK", "BTHK", "BTHV", "BTHK"),
    kind=Kind.diagonal,
    portable=CHUNKED,
    oracle=by_blocks,
    one_token=recurrent_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    cuda=_cuda,
    kernels=KernelRule(),
    step_kernels=STEP_KERNELS,
    # 0.745 ms for 16,384 tokens and 16 heads, 0.274 of them forward (docs/benchmarks.md); 60.7 ms for 4,096 tokens and
    # 4 heads on two CPU cores.
    time=OperatorTime("gla", 2.84e-9, 0.37, 64, 128),
    cpu_time=OperatorTime("gla", 7.4e-6, 0.31, 64, 128),
    peers=(Peer("fla.ops.gla", "chunk_gla"),),
)
