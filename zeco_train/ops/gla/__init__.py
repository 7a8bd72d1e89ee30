"""Gated linear attention (Yang et al. 2024, arXiv 2312.06635): a decay for each channel of the keys and each token.

    S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k, g [B, T, H, K]; v, o [B, T, H, V]; g is log-decays, fp32 or fp64, finite and at most 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeco_train.ops.gla.chunked import CHUNKED
from zeco_train.ops.gla.flops import forward_flops, recomputed_flops
from zeco_train.ops.gla.step import STEP_KERNELS, recurrent_step
from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.passes import Kind, Operator, Passes
from zeco_train.ops.selection import KernelRule

_KERNELS = KernelRule()


def _select(operands: Sequence[Tensor]) -> Passes:
    q, _, v, g = operands
    if not _KERNELS.serves(q, v, g):
        return CHUNKED
    from zeco_train.ops.gla.cuda import CUDA  # imports Triton

    return CUDA


GLA = Operator(
    operands=("q", "k", "v", "g"),
    kind=Kind.diagonal,
    select=_select,
    oracle=by_blocks,
    step=recurrent_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    kernels=_KERNELS,
    step_kernels=STEP_KERNELS,
)
