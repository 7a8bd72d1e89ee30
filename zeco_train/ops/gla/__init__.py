"""Gated linear attention (Yang et al. 2024, arXiv 2312.06635): a decay for each channel of the keys and each token.

    S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

q, k, g [B, T, H, K]; v, o [B, T, H, V]; g is log-decays, fp32 or fp64, finite and at most 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from zeco_train.ops.gla.chunked import CHUNKED
from zeco_train.ops.gla.flops import forward_flops, recomputed_flops
from zeco_train.ops.gla.naive import naive_gla
from zeco_train.ops.gla.step import recurrent_step
from zeco_train.ops.passes import Kind, Operator, Passes

logger = logging.getLogger(__name__)


def _select(operands: Sequence[Tensor]) -> Passes:
    """Triton kernels for bf16 and fp32 tokens on CUDA with fp32 log-decays, PyTorch for all else, such as fp64."""
    q, *_, g = operands
    if not q.is_cuda:
        return CHUNKED
    if g.dtype == torch.float32 and q.dtype in (torch.bfloat16, torch.float32):
        from zeco_train.ops.gla.cuda import CUDA  # imports Triton

        return CUDA
    _say_without_kernels(q.dtype, g.dtype)
    return CHUNKED


@cache
def _say_without_kernels(tokens: torch.dtype, decays: torch.dtype) -> None:
    names = (str(dtype).removeprefix("torch.") for dtype in (tokens, decays))
    logger.info("no kernels for %s tokens with %s decays: the operator runs in PyTorch", *names)


GLA = Operator(
    operands=("q", "k", "v", "g"),
    kind=Kind.diagonal,
    select=_select,
    naive=naive_gla,
    step=recurrent_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
)
