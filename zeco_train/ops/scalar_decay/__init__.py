"""Linear attention with one decay a head: `scalar_decay`, of each token, and `fixed_decay`, the same for all tokens.

    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k [B, T, G, K]; v, o [B, T, H, V]. G divides H, and consecutive heads share queries and keys: head h has those of
group h // (H / G). Mamba-2 has few groups, RetNet as many as heads.

`scalar_decay` takes g [B, T, H], log-decays, fp32 or fp64, finite and at most 0. `fixed_decay` takes log_decay [H] in
its place: g_t = log_decay for all t; 0 is no decay. It is a constant: its gradient is zeros, [H], and a forward pass
refuses one that requires a gradient.
"""

from __future__ import annotations

from torch import Tensor

from zeco_train.ops import CHUNK
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, PeerFunction
from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.scalar_decay.chunked import CHUNKED_FIXED, CHUNKED_SCALAR


def forward_flops(heads: int, key_dim: int, value_dim: int, *, groups: int | None = None) -> float:
    """FLOPs per token of the forward pass: H · (2·KV + 2·KV + (C+1)·V) + G · (C+1)·K.

    In this order: adding kᵀv to the state, applying q to the state, scores times v; and the scores q kᵀ, which the
    heads of a group share. `groups` is G, as many as heads if None. For what counts see `zeco_train.ops.gla`. Each
    product has two in the backward pass.
    """
    groups = heads if groups is None else groups
    return float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * value_dim) + groups * (CHUNK + 1) * key_dim)


def recomputed_flops(heads: int, key_dim: int, value_dim: int, *, groups: int | None = None) -> float:
    """H · 2·KV: the chunk states, which the backward pass recomputes instead of keeping them; on GPUs."""
    del groups
    return float(heads * 2 * key_dim * value_dim)


def scalar_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """`Operator.one_token`: q, k [B, 1, G, K], v [B, 1, H, V], g [B, 1, H] → o in the dtype of v."""
    (batch, _, groups, key_dim), dtype = q.shape, state.dtype
    of_groups = state.unflatten(1, (groups, -1))
    key, query = (x.to(dtype).view(batch, groups, 1, 1, key_dim) for x in (k, scale * q.to(dtype)))
    value = v.to(dtype).view(batch, groups, -1, 1, v.shape[-1])
    decay = g.to(dtype).exp().view(batch, groups, -1, 1, 1)
    of_groups.mul_(decay).addcmul_(key.mT, value)
    return (query @ of_groups).view(v.shape).to(v.dtype)


def fixed_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float) -> Tensor:
    """`scalar_step` with log_decay [H], fp32 or fp64, in place of g."""
    return scalar_step(q, k, v, log_decay.expand(v.shape[:3]), state, scale)


# In fp32 PyTorch is faster beyond: K and V 512, 18.1 against 25.3 ms (4 heads, 16,384 tokens, H100).
_KERNELS = KernelRule(largest_fp32=256)
# 16,384 tokens and 16 heads: 0.167 + 0.380 ms.
FIXED_TIME = OperatorTime("fixed_decay", 2.09e-9, 0.31, 128, 128)


_FORMULA = "\n\n    S_t = exp({}) S_{{t-1}} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t"

SCALAR_DECAY = Operator(
    operands=("q", "k", "v", "g"),
    dims=("BTGK", "BTGK", "BTHV", "BTH"),
    kind=Kind.diagonal,
    portable=CHUNKED_SCALAR,
    oracle=by_blocks,
    one_token=scalar_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    about="Linear attention with one decay a head and token, as of Mamba-2." + _FORMULA.format("g_t"),
    cuda="zeco_train.ops.scalar_decay.kernels.launch:CUDA_SCALAR",
    kernels=_KERNELS,
    # 16,384 tokens and 64 heads with common keys, as of Mamba-2 1.3B: 1.176 ms; its share of the forward pass is from
    # 16 heads of 128 × 128.
    time=OperatorTime("scalar_decay", 1.12e-9, 0.20, 128, 64),
    peers=(PeerFunction("fla.ops.simple_gla", "chunk_simple_gla"),),
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
    about="Linear attention with one decay a head for all tokens, as of RetNet." + _FORMULA.format("log_decay"),
    cuda="zeco_train.ops.scalar_decay.kernels.launch:CUDA_FIXED",
    kernels=_KERNELS,
    time=FIXED_TIME,
    # fla's retention has RetNet's decays by itself.
    peers=(
        PeerFunction("fla.ops.retention", "chunk_retention", "retention"),
        PeerFunction("fla.ops.linear_attn", "chunk_linear_attn", "none", (("normalize", False),)),
    ),
)
