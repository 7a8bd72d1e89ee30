"""Selection of an implementation by device, dtype and head dims, shared by the operators."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def has_kernels(tokens: Tensor, decays: Tensor) -> bool:
    """Whether Triton kernels serve these operands: bf16 or fp32 tokens on CUDA with fp32 log-decays.

    PyTorch serves all else, such as fp64. On CUDA that is logged once for each combination of dtypes.
    """
    if not tokens.is_cuda:
        return False
    if decays.dtype == torch.float32 and tokens.dtype in (torch.bfloat16, torch.float32):
        return True
    _log_without_kernels(tokens.dtype, decays.dtype)
    return False


@cache
def head_dims_fit(key_dim: int, value_dim: int, largest: int) -> bool:
    """Whether kernels for head dims up to `largest` serve these; if not, that is logged once for each pair."""
    if max(key_dim, value_dim) <= largest:
        return True
    logger.info(
        "no kernels for head dims K %d, V %d: at most %d; the operator runs in PyTorch", key_dim, value_dim, largest
    )
    return False


@cache
def _log_without_kernels(tokens: torch.dtype, decays: torch.dtype) -> None:
    names = (str(dtype).removeprefix("torch.") for dtype in (tokens, decays))
    logger.info("no kernels for %s tokens with %s decays: the operator runs in PyTorch", *names)
