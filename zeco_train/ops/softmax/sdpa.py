"""The attention of a span to consecutive keys by PyTorch's own SDPA kernel of CPUs, with its log-sum-exp.

The same call serves whole sequences and blocks of keys: the backward pass takes the output and the log-sum-exp over all
keys, so blocks of a ring need no other formula. Queries are taken in blocks, each with the keys that it can read, so
that masks stay small and keys that no query of a block reads cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attended import Attended
from zeco_train.ops.softmax.span import Span

# Queries of a block: its mask has this many rows.
_BLOCK = 512


class _Block(NamedTuple):
    queries: slice
    keys: slice
    mask: Tensor
    reads_any: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, key_start: int, scale: float) -> Attended:
    """Attention of the span's queries to the keys from position `key_start` on.

    Args:
        q: [B, N, H, D], of the span.
        k: [B, M, G, D], of consecutive tokens; G divides H, each head serves H / G heads of q in a row.
        v: [B, M, G, V].
        span: positions of the queries.
        key_start: position of the first key.
        scale: factor of the scores.
    """
    wide = accumulation_dtype(q.dtype)
    o = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
    for block in _blocks(q, k, span, key_start):
        of_block, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v, block), 0.0, False, attn_mask=block.mask, scale=scale
        )
        o[:, block.queries] = of_block.transpose(1, 2)
        # The kernel gives 0 for a query without keys.
        lse[:, :, block.queries] = torch.where(block.reads_any, sums, -torch.inf)
    return Attended(o, lse)


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, key_start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in fp32 (fp64 for fp64), of the part that these keys have in o.

    `attended`: over all keys, of which k and v may be a part.
    """
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for block in _blocks(q, k, span, key_start):
        part = attended.o[:, block.queries].transpose(1, 2), attended.lse[:, :, block.queries]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do[:, block.queries].transpose(1, 2), *_heads_first(q, k, v, block), *part, 0.0, False,
            attn_mask=block.mask, scale=scale,
        )  # fmt: skip
        of_q, of_k, of_v = (grad.transpose(1, 2) for grad in grads)
        dq[:, block.queries] += of_q
        dk[:, block.keys] += of_k.to(wide).unflatten(2, (k.shape[2], -1)).sum(3)
        dv[:, block.keys] += of_v.to(wide).unflatten(2, (v.shape[2], -1)).sum(3)
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, span: Span, key_start: int) -> Iterator[_Block]:
    """Blocks of queries with the keys that some of them read; blocks that read none are left out."""
    key_stop = key_start + k.shape[1]
    for start in range(span.start, span.stop, _BLOCK):
        part = span.part(start, min(start + _BLOCK, span.stop))
        first, stop = max(part.first_key, key_start), min(part.stop, key_stop)
        if first >= stop:
            continue
        visible = part.visible(first, stop, q.device)
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
        queries = slice(part.start - span.start, part.stop - span.start)
        yield _Block(queries, slice(first - key_start, stop - key_start), mask, visible.any(1))


def _heads_first(q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, tokens, D] of a block, with a head of keys and values for each of queries."""
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x[:, block.keys].repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (k, v))
    return q[:, block.queries].transpose(1, 2), keys, values
