"""Softmax attention of a span to consecutive keys, by the kernel for the device and dtype, and of one token to caches.

Caches of keys and values are tensors of fixed size, [B, G, capacity, D], which a CUDA graph can be bound to. The token
at position p is in slot p, or with a window in slot p mod window, where it replaces the token that no later query
reads. So one rule masks both: a query at position p reads slots 0 to p.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops.operator import KernelRule, Target
from zeco_train.ops.softmax import cudnn, flash, sdpa
from zeco_train.ops.softmax.span import Attended, Span

# cuDNN and PyTorch's FlashAttention refuse other heads when they are launched.
KERNELS = KernelRule((torch.bfloat16,), largest=(256, 256), row_bytes=16, lesser=cudnn.missing)
# Of PyTorch's fused attention with a mask; for other calls it takes plain products, without a word.
STEP_KERNELS = KernelRule(row_bytes=16)


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, key_start: int, scale: float) -> Attended:
    """Attention of the span's queries q [B, N, H, D] to keys of consecutive tokens from position `key_start` on.

    k [B, M, G, D] and v [B, M, G, V] have heads that divide H: each serves H / G heads of q in a row. All are bf16,
    fp32 or fp64.
    """
    return _kernels(q, k, v).attend(q, k, v, span, key_start, scale)


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

    `do` and `attended` are of o over all keys, of which k and v may be a part; all else as of `attend`. FlashAttention
    adds up in one order if it must be `deterministic`, SDPA always does, cuDNN never.
    """
    operands, kernels = (do, q, k, v, attended, span, key_start, scale), _kernels(q, k, v, deterministic)
    return flash.attend_backward(*operands, deterministic) if kernels is flash else kernels.attend_backward(*operands)


def kernel_name(target: Target, is_served: bool, deterministic: bool = False) -> str:
    """What computes attention on a target, for reports, if `KERNELS` serve its heads, or not."""
    if not is_served:
        return "PyTorch's SDPA" if target.kind != "cuda" else "PyTorch's products"
    if not cudnn.serves(target):
        return "FlashAttention 2"
    return "cuDNN, backward FlashAttention 2" if deterministic else "cuDNN"


def _kernels(q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False) -> ModuleType:
    if not KERNELS.serves(q, v):
        return sdpa
    if deterministic or not cudnn.serves(Target.of(q.device)) or not cudnn.is_countable(q, k, v):
        return flash
    return cudnn


def extend(cache: Tensor, new: Tensor, start: int, window: int | None) -> tuple[Tensor, int]:
    """Append tokens [B, T, G, D] to a cache of the `start` tokens before them, in place.

    Returns the keys, or values, that the new tokens read, their own among them, [B, M, G, D], and the position of the
    first; without a window a view of the cache. A ValueError says that the capacity is too small.
    """
    stop, capacity = start + new.shape[1], cache.shape[2]
    if (needed := stop if window is None else min(stop, window)) > capacity:
        raise ValueError(f"a cache of {capacity} tokens cannot keep {needed}")
    if window is None:
        cache[:, :, start:stop] = new.transpose(1, 2)
        return cache[:, :, :stop].transpose(1, 2), 0
    first = max(0, start - (window - 1))
    before = torch.arange(first, start, device=cache.device) % window
    # Indexing copies, before these slots are overwritten.
    joined = torch.cat([cache[:, :, before].transpose(1, 2), new], 1)
    kept = torch.arange(max(start, stop - window), stop, device=cache.device)
    cache[:, :, kept % window] = new[:, kept - start].transpose(1, 2)
    return joined, first


def attend_next(
    q: Tensor, k: Tensor, v: Tensor, caches: Sequence[Tensor], positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention of one more token of each sequence, q [B, 1, H, D], whose keys and values are written to the caches.

    Nothing depends on the positions' values [B] but the contents of tensors, as a CUDA graph requires. A position
    beyond the capacity is an index out of bounds. Returns [B, 1, H, V].
    """
    rows = torch.arange(len(positions), device=positions.device)
    slots = positions if window is None else positions % window
    for cache, new in zip(caches, (k, v), strict=True):
        cache[rows, :, slots] = new[:, 0]
    keys, values = caches
    visible = torch.arange(keys.shape[2], device=positions.device) <= positions[:, None]
    # The H / G heads that share a head of keys are the queries of one call, so no head is repeated.
    grouped = q[:, 0].unflatten(1, (k.shape[2], -1))
    o = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible[:, None, None], scale=scale)
    return o.flatten(1, 2).unsqueeze(1)
