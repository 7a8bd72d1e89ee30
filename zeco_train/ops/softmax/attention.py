"""Softmax attention of a span to consecutive keys, by the kernel for the device and dtype."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from zeco_train.ops.operator import KernelRule
from zeco_train.ops.softmax import flash, sdpa
from zeco_train.ops.softmax.span import Attended, Span

# PyTorch's FlashAttention refuses other heads when it is launched.
KERNELS = KernelRule((torch.bfloat16,), largest=256, row_bytes=16)


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, key_start: int, scale: float) -> Attended:
    """Attention of the span's queries to the keys from position `key_start` on.

    Args:
        q: [B, N, H, D], of the span; bf16, fp32 or fp64.
        k: [B, M, G, D], of consecutive tokens; G divides H, each head serves H / G heads of q in a row.
        v: [B, M, G, V].
        span: positions of the queries.
        key_start: position of the first key.
        scale: factor of the scores.
    """
    return _kernels(q, v).attend(q, k, v, span, key_start, scale)


def attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    span: Span,
    key_start: int,
    scale: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, of the part that these keys have in o: in fp32, or the dtype of q.

    Args:
        do: gradient of o, in its shape and dtype.
        q: as of `attend`.
        k: likewise.
        v: likewise.
        attended: over all keys, of which k and v may be a part.
        span: as of `attend`.
        key_start: likewise.
        scale: likewise.
        deterministic: add up in one order; FlashAttention does not by default, SDPA always does.
    """
    operands = do, q, k, v, attended, span, key_start, scale
    if _kernels(q, v) is flash:
        return flash.attend_backward(*operands, deterministic)
    return sdpa.attend_backward(*operands)


def _kernels(q: Tensor, v: Tensor) -> ModuleType:
    return flash if KERNELS.serves(q, v) else sdpa
