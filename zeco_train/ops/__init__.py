"""Gated linear attention on one rank: the oracle, the chunked phases, and the choice of an implementation."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from zeco_train.ops.chunk_layout import CHUNK, accumulation_dtype
from zeco_train.ops.chunked import (
    ChunkStateGrads,
    ChunkStates,
    IntraGrads,
    input_grads,
    intra_grads,
    intra_scores,
    local_state_grads,
    local_states,
    outputs,
)
from zeco_train.ops.documents import Documents
from zeco_train.ops.naive import naive_gla
from zeco_train.ops.passes import CHUNKED, BackwardPass, ForwardPass, Passes

logger = logging.getLogger(__name__)

__all__ = [
    "CHUNK",
    "CHUNKED",
    "BackwardPass",
    "ChunkStateGrads",
    "ChunkStates",
    "Documents",
    "ForwardPass",
    "IntraGrads",
    "Passes",
    "accumulation_dtype",
    "input_grads",
    "intra_grads",
    "intra_scores",
    "local_state_grads",
    "local_states",
    "naive_gla",
    "outputs",
    "select",
]


def select(q: Tensor, g: Tensor) -> Passes:
    """The implementation for tokens like these: the only place where a device or a dtype gets one.

    Triton kernels for bf16 and fp32 tokens on CUDA with fp32 log-decays; PyTorch for everything else, fp64 above all.
    """
    if not q.is_cuda:
        return CHUNKED
    if g.dtype == torch.float32 and q.dtype in (torch.bfloat16, torch.float32):
        from zeco_train.ops.cuda import CUDA  # Triton is imported where it is used

        return CUDA
    _say_without_kernels(q.dtype, g.dtype)
    return CHUNKED


@cache
def _say_without_kernels(tokens: torch.dtype, decays: torch.dtype) -> None:
    names = (str(dtype).removeprefix("torch.") for dtype in (tokens, decays))
    logger.info("no kernels for %s tokens with %s decays: the operator runs in PyTorch", *names)
