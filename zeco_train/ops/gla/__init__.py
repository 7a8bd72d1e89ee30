"""Gated linear attention (Yang et al. 2024, arXiv 2312.06635): a decay for each channel of the keys and each token.

    S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k, g [B, T, H, K]; v, o [B, T, H, V]; g is log-decays, fp32 or fp64, finite and at most 0.

FLOPs are those of matrix products per token, a multiply-add counting as two. Of the token pairs inside a chunk of C =
64 only the causal half counts, (C+1)/2 per token, although kernels compute the whole square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import CHUNK
from zeco_train.ops.gla.chunked import CHUNKED
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime, PeerFunction
from zeco_train.ops.oracle import by_blocks


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass: H · (2·KV + 2·KV + (C+1)·K + (C+1)·V).

    In this order: adding kᵀv to the state, applying q to the state, scores q kᵀ, and scores times v. Each product has
    two in the backward pass.
    """
    return float(heads * (4 * key_dim * value_dim + (CHUNK + 1) * (key_dim + value_dim)))


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """H · 2·KV: the chunk states, which the backward pass recomputes instead of keeping them; on GPUs."""
    return float(heads * 2 * key_dim * value_dim)


STEP_KERNELS = KernelRule()


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """`Operator.one_token`: q, k, g [B, 1, H, K] and v [B, 1, H, V] → o in the dtype of v.

    On CUDA one kernel, which is not tuned and compiles in a second, so a process's first token is not delayed.
    """
    if STEP_KERNELS.serves(q, v, g):
        from zeco_train.ops.gla.kernels.states import launch_step  # imports Triton

        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        # Triton launches on the current device.
        with torch.cuda.device_of(q):
            launch_step(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), state, o, scale)
        return o
    heads = state.view(-1, *state.shape[-2:])
    query, key, value, log_decay = (x.to(state.dtype).reshape(len(heads), 1, -1) for x in (q, k, v, g))
    heads.mul_(log_decay.exp().mT).baddbmm_(key.mT, value)
    return torch.bmm(query * scale, heads).view(v.shape).to(v.dtype)


GLA = Operator(
    operands=("q", "k", "v", "g"),
    dims=("BTHK", "BTHK", "BTHV", "BTHK"),
    kind=Kind.diagonal,
    portable=CHUNKED,
    oracle=by_blocks,
    one_token=recurrent_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    about="Gated linear attention, a decay for each channel of the keys (Yang et al. 2023, arXiv 2312.06635)."
    "\n\n    S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t",
    cuda="zeco_train.ops.gla.kernels.launch:CUDA",
    kernels=KernelRule(largest=(512, 65536)),
    step_kernels=STEP_KERNELS,
    # 0.700 ms for 16,384 tokens and 16 heads on an H200, by its kernels on an H100 0.41 of them forward
    # (docs/benchmarks.md); 60.7 ms for 4,096 tokens and 4 heads on two CPU cores.
    time=OperatorTime("gla", 2.67e-9, 0.41, 64, 128),
    cpu_time=OperatorTime("gla", 7.4e-6, 0.31, 64, 128),
    peers=(PeerFunction("fla.ops.gla", "chunk_gla"),),
)
