"""The attention of a span to consecutive keys by PyTorch's own SDPA kernel of CPUs, with its log-sum-exp.

On GPUs, for calls that FlashAttention refuses, by plain products in the accumulation dtype: PyTorch's other kernels
there take no fp64, or no mask.

The backward pass takes the output and the log-sum-exp over all keys, so blocks of a ring need no other formula. Queries
are taken in blocks, each with the keys that it can read: masks stay small, and keys that no query of a block reads cost
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.span import Attended, Span

# Queries of a block: its mask has this many rows.
_BLOCK = 512


class _KeyBlock(NamedTuple):
    queries: slice
    keys: slice
    mask: Tensor
    reads_any: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, key_start: int, scale: float) -> Attended:
    """The attention of a span, as `zeco_train.ops.softmax.attention.attend`."""
    o, lse = attended = Attended.by_no_keys(q, v)
    for block in _blocks(q, k, span, key_start):
        of_block, sums = _forward(*_heads_first(q, k, v, block), block.mask, scale)
        o[:, block.queries] = of_block.transpose(1, 2)
        # The kernel gives 0 for a query without keys.
        lse[:, :, block.queries] = torch.where(block.reads_any, sums, -torch.inf)
    return attended


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, key_start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, as `zeco_train.ops.softmax.attention.attend_backward`; fp32 (fp64 for fp64)."""
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for block in _blocks(q, k, span, key_start):
        part = attended.o[:, block.queries].transpose(1, 2), attended.lse[:, :, block.queries]
        of_o = do[:, block.queries].transpose(1, 2)
        grads = _backward(of_o, *_heads_first(q, k, v, block), *part, block.mask, scale)
        of_q, of_k, of_v = (grad.transpose(1, 2) for grad in grads)
        dq[:, block.queries] += of_q
        dk[:, block.keys] += of_k.to(wide).unflatten(2, (k.shape[2], -1)).sum(3)
        dv[:, block.keys] += of_v.to(wide).unflatten(2, (v.shape[2], -1)).sum(3)
    return dq, dk, dv


def _is_for_torch(q: Tensor, v: Tensor) -> bool:
    return q.device.type != "cuda" and q.shape[-1] == v.shape[-1]


# Outputs [B, H, N, V] and their log-sum-exp [B, H, N].
def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if _is_for_torch(q, v):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    q, k, v = (x.to(accumulation_dtype(x.dtype)) for x in (q, k, v))
    scores = q @ k.mT * scale + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num() @ v, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if _is_for_torch(q, v):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(do, q, k, v, o, lse, 0.0, False, attn_mask=mask, scale=scale)
    do, q, k, v, o = (x.to(accumulation_dtype(x.dtype)) for x in (do, q, k, v, o))
    weights = (q @ k.mT * scale + mask - lse[..., None]).exp().nan_to_num()
    of_scores = weights * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return of_scores @ k, of_scores.mT @ q, weights.mT @ do


# Blocks of queries with the keys that some of them read; blocks that read none are left out.
def _blocks(q: Tensor, k: Tensor, span: Span, key_start: int) -> Iterator[_KeyBlock]:
    key_stop = key_start + k.shape[1]
    for start in range(span.start, span.stop, _BLOCK):
        part = span.part(start, min(start + _BLOCK, span.stop))
        first, stop = max(part.first_key, key_start), min(part.stop, key_stop)
        if first >= stop:
            continue
        visible = part.visible(first, stop, q.device)
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
        queries = slice(part.start - span.start, part.stop - span.start)
        yield _KeyBlock(queries, slice(first - key_start, stop - key_start), mask, visible.any(1))


def _heads_first(q: Tensor, k: Tensor, v: Tensor, block: _KeyBlock) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel of CPUs takes channels to lie side by side and does not check it.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x[:, block.keys].repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (k, v))
    return q[:, block.queries].transpose(1, 2), keys, values
