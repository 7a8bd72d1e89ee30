"""Delta rules: each token replaces what the state holds for its key by its value, by the share β.

    S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k [B, T, G, K]; v, o [B, T, H, V]; β [B, T, H], fp32 or fp64. G divides H, and consecutive heads share queries and
keys, as in `zeco_train.ops.scalar_decay`. The state decays before the token writes. The operators differ in g:

    `delta`          none                    DeltaNet (Schlag et al. 2021; Yang et al. 2024, arXiv 2406.06484)
    `gated_delta`    [B, T, H]               Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464)
    `kda`            [B, T, H, K]            Kimi Delta Attention (2025, arXiv 2510.26692)

g is log-decays, fp32 or fp64, finite and at most 0. Keys must have norm 1 (or less) and β lie between 0 and 2: each
transition is then no expansion. With longer keys the state may grow without bound; mixers normalise them, and the
values are not checked here, since that would synchronise with the device.

The transition of a shard is a matrix, [B, H, K, K].
"""

from __future__ import annotations

from dataclasses import replace

from zeco_train.ops.delta.chunked import CHUNKED_DELTA, CHUNKED_GATED
from zeco_train.ops.delta.flops import forward_flops, recomputed_flops
from zeco_train.ops.delta.step import delta_step, gated_delta_step
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, PeerFunction
from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.passes import Passes

# A walk holds all K rows of its columns of the state, and as much of a chunk's tokens in shared memory.
_KERNELS = KernelRule(largest=256)
# 16,384 tokens and 16 heads: gated_delta 1.963 ms, 0.648 of them forward, kda 2.777 and 0.870 (docs/benchmarks.md).
_GATED_TIME = OperatorTime("gated_delta", 7.49e-9, 0.33, 128, 128)


def _cuda_delta() -> Passes:
    from zeco_train.ops.delta.cuda import CUDA_DELTA  # imports Triton

    return CUDA_DELTA


def _cuda_gated() -> Passes:
    from zeco_train.ops.delta.cuda import CUDA_GATED  # imports Triton

    return CUDA_GATED


DELTA = Operator(
    operands=("q", "k", "v", "beta"),
    dims=("BTGK", "BTGK", "BTHV", "BTH"),
    kind=Kind.matrix,
    portable=CHUNKED_DELTA,
    oracle=by_blocks,
    one_token=delta_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    cuda=_cuda_delta,
    kernels=_KERNELS,
    # Not measured; the most like it.
    time=_GATED_TIME,
    peers=(PeerFunction("fla.ops.delta_rule", "chunk_delta_rule"),),
)

GATED_DELTA = Operator(
    operands=("q", "k", "v", "g", "beta"),
    dims=("BTGK", "BTGK", "BTHV", "BTH", "BTH"),
    kind=Kind.matrix,
    portable=CHUNKED_GATED,
    oracle=by_blocks,
    one_token=gated_delta_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    cuda=_cuda_gated,
    kernels=_KERNELS,
    time=_GATED_TIME,
    peers=(PeerFunction("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", takes_context=True),),
)

# The same functions: g has one dimension more.
KDA = replace(
    GATED_DELTA,
    dims=("BTGK", "BTGK", "BTHV", "BTHK", "BTH"),
    time=OperatorTime("kda", 1.06e-8, 0.31, 128, 128),
    peers=(PeerFunction("fla.ops.kda", "chunk_kda", takes_context=True),),
)
