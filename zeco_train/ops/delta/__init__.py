"""Delta rules: each token replaces what the state holds for its key by its value, by the share β.

    S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k [B, T, G, K]; v, o [B, T, H, V]; β [B, T, H], fp32 or fp64. G divides H, and consecutive heads share queries and
keys. The state decays before the token writes. The operators differ in g, fp32 or fp64, finite and at most 0:

    `delta`          none                    DeltaNet (Schlag et al. 2021; Yang et al. 2024, arXiv 2406.06484)
    `gated_delta`    [B, T, H]               Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464)
    `kda`            [B, T, H, K]            Kimi Delta Attention (2025, arXiv 2510.26692)

Keys must have norm 1 (or less), as mixers see to, and β lie between 0 and 2: each transition, of a shard a matrix [B,
H, K, K], is then no expansion. Values are not checked, since that would synchronise with the device.

FLOPs are those of matrix products and of the triangular systems of chunks, a multiply-add counting as two. Of the token
pairs inside a chunk of C = 64 only the causal half counts: (C+1)/2 per token with the token itself, (C−1)/2 without.
Products with matrices of transitions, which only several ranks need, count as nothing, like the scan itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from zeco_train.ops import CHUNK
from zeco_train.ops.delta.chunked import CHUNKED
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, PeerFunction
from zeco_train.ops.oracle import by_blocks


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · ((C−1)·K + (C−1)·(K+V) + 2·KV + 2·KV + 2·KV + (C+1)·K + (C+1)·V) FLOPs per token of the forward pass.

    In this order, of the PyTorch form: the products k kᵀ, the systems for W and U, W times the state, adding k̃ᵀN to
    the state, applying q to the state, scores q kᵀ, and scores times N.
    """
    return _systems(heads, key_dim, value_dim) + heads * (6 * key_dim * value_dim + (CHUNK + 1) * (key_dim + value_dim))


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · ((C−1)·K + (C−1)·(K+V) + 4·KV + (C+1)·K): systems, states and scores, which the backward pass recomputes."""
    return _systems(heads, key_dim, value_dim) + float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * key_dim))


def _systems(heads: int, key_dim: int, value_dim: int) -> float:
    return float(heads * (CHUNK - 1) * (2 * key_dim + value_dim))


def delta_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    """`gated_delta_step` without decay: g = 0."""
    return gated_delta_step(q, k, v, beta.new_zeros(1).expand(beta.shape), beta, state, scale)


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Tensor:
    """`Operator.one_token`: o is [B, 1, H, V] in the dtype of v."""
    (batch, _, groups, key_dim), dtype = q.shape, state.dtype
    of_groups = state.unflatten(1, (groups, -1))
    key, query = (x.to(dtype).view(batch, groups, 1, 1, key_dim) for x in (k, scale * q.to(dtype)))
    value, strength = (x.to(dtype).view(batch, groups, v.shape[2] // groups, 1, -1) for x in (v, beta))
    decay = g.to(dtype).exp().view(batch, groups, v.shape[2] // groups, -1, 1)
    of_groups.mul_(decay)
    of_groups.addcmul_(key.mT, strength * (value - key @ of_groups))
    return (query @ of_groups).view(v.shape).to(v.dtype)


# A walk holds all K rows of its columns of the state, and as much of a chunk's tokens in shared memory. V goes by
# tiles; no published shape has more. With K 256 the reverse walk takes 112 KB of it, whatever its columns and stages.
_KERNELS = KernelRule(largest=(256, 512), largest_small=128)
# 16,384 tokens and 16 heads on an H200: gated_delta 1.042 ms, kda 1.769; shares of the forward pass by their kernels on
# an H100 (docs/benchmarks.md).
_GATED_TIME = OperatorTime("gated_delta", 3.98e-9, 0.29, 128, 128)

_FORMULA = (
    "; keys must have norm 1.\n\n"
    "    S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t"
)

DELTA = Operator(
    operands=("q", "k", "v", "beta"),
    dims=("BTGK", "BTGK", "BTHV", "BTH"),
    kind=Kind.matrix,
    portable=CHUNKED,
    oracle=by_blocks,
    one_token=delta_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    about="The delta rule of DeltaNet (Yang et al. 2024, arXiv 2406.06484); keys must have norm 1.\n\n"
    "    S_t = (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t",
    cuda="zeco_train.ops.delta.kernels.launch:CUDA_DELTA",
    kernels=_KERNELS,
    time=_GATED_TIME,  # not measured; the most like it
    peers=(PeerFunction("fla.ops.delta_rule", "chunk_delta_rule"),),
)

GATED_DELTA = Operator(
    operands=("q", "k", "v", "g", "beta"),
    dims=("BTGK", "BTGK", "BTHV", "BTH", "BTH"),
    kind=Kind.matrix,
    portable=CHUNKED,
    oracle=by_blocks,
    one_token=gated_delta_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    about=f"The gated delta rule, a decay a head (Yang et al. 2024, arXiv 2412.06464){_FORMULA}",
    cuda="zeco_train.ops.delta.kernels.launch:CUDA_GATED",
    kernels=_KERNELS,
    time=_GATED_TIME,
    peers=(PeerFunction("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", takes_context=True),),
)

# The same functions: g has one dimension more.
KDA = replace(
    GATED_DELTA,
    dims=("BTGK", "BTGK", "BTHV", "BTHK", "BTH"),
    about=f"Kimi Delta Attention, a decay for each channel of the keys (2025, arXiv 2510.26692){_FORMULA}",
    time=OperatorTime("kda", 6.75e-9, 0.35, 128, 128),
    peers=(PeerFunction("fla.ops.kda", "chunk_kda", takes_context=True),),
)
