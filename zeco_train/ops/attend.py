"""Softmax attention over a sharded sequence: the one op that serves every method of `sp.attention`.

Tokens stay where they are: each rank has consecutive ones, as linear layers want them. What crosses ranks (keys and
values, or queries and outputs) is the method's own matter. As `zeco::mix` this is one node for a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import AttentionMethod, Boundary, Crossing, exchange_of
from zeco_train.ops.softmax.attended import Attended
from zeco_train.ops.softmax.attention import attend
from zeco_train.ops.softmax.cache import extend
from zeco_train.ops.softmax.span import Span


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    position: SequencePosition,
    boundaries: Sequence[Boundary],
    window: int | None = None,
) -> tuple[Tensor, tuple[Crossing, ...]]:
    """Causal softmax attention of this rank's tokens to those before them, exact over the whole sequence.

    After earlier segments of a sequence, or pieces of a prompt, their keys and values are in caches, and those of this
    one are appended, in place and on every rank. There is no gradient then.

    Args:
        q: [B, T, H, D], of this rank's tokens, in bf16, fp32 or fp64.
        k: [B, T, G, D]; G divides H, each head serves H / G heads of q in a row.
        v: [B, T, G, V].
        scale: factor of the scores.
        position: of the tokens, with an `Exchange`, which the caller keeps alive until after the backward pass.
        boundaries: two, with the output and the log-sum-exp of a first forward pass, or without. They are replayed: the
            forward pass then computes and communicates nothing, as recomputation requires. Or with the caches of keys
            and of values as `carry_in`, [B, G, capacity, D], see `zeco_train.ops.softmax.cache`.
        window: keys that a query reads at most, itself among them; None: no limit.

    Returns:
        o, [B, T, H, V] in the dtype of q; and both, for a later replay, [0] in a replay or with caches, which are
        carried out.

    Raises:
        ValueError: caches are wanted, and none given.
        NotImplementedError: a gradient through caches.
    """
    caches = [boundary.carry_in for boundary in boundaries if boundary.carry_in is not None]
    if caches:
        o = _attend_after(q, k, v, scale, position, caches, window)
        return o, tuple(Crossing(o.new_empty(0), cache) for cache in caches)
    if any(boundary.want_carry for boundary in boundaries):
        raise ValueError("softmax attention carries caches out only if they are carried in")
    replayed = [boundary.incoming_state for boundary in boundaries]
    where = position.handle, list(position.bounds), position.rank, list(position.documents or ())
    o, lse = torch.ops.zeco.attend(q, k, v, *replayed, scale, *where, window)
    kept = (o.new_empty(0), lse.new_empty(0)) if replayed[0] is not None else (o.detach(), lse)
    return o, tuple(Crossing(tensor, lse.new_empty(0)) for tensor in kept)


def _attend_after(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    position: SequencePosition,
    caches: Sequence[Tensor],
    window: int | None,
) -> Tensor:
    """Attention of a segment to the tokens in the caches and to its own, which are appended; [B, T, H, V].

    Every rank gets the keys and values of all ranks' tokens, since each keeps whole caches. So queries stay where they
    are; those of the last rank read more keys than those of the first, by less than one segment.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *caches)):
        problem = "softmax layers have no gradient through keys of earlier segments: train.segments must be 1"
        raise NotImplementedError(problem)
    k, v = _method(position.handle).gather([k, v], position.bounds)
    (keys, first), (values, _) = (
        extend(cache, new, position.bounds[0], window) for cache, new in zip(caches, (k, v), strict=True)
    )
    span = Span(position.start, position.stop, _only(position.documents or ()), window)
    return attend(q, keys, values, span, first, scale).o


def _method(handle: Tensor | None) -> AttentionMethod:
    assert handle is not None, "a position without exchange"
    method = exchange_of(handle).attention
    assert method is not None, "an exchange for softmax layers has a method"
    return method


def _only(borders: Sequence[Tensor]) -> Tensor | None:
    """Borders of the documents of a batch of one sequence; None without documents."""
    assert len(borders) <= 1, "documents of a batch above one"
    return borders[0] if borders else None


@custom_op("zeco::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    known_o: Tensor | None,
    known_lse: Tensor | None,
    scale: float,
    handle: Tensor,
    bounds: list[int],
    rank: int,
    borders: list[Tensor],
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """o, and the log-sum-exp of its scores, [B, H, T] fp32 (fp64 for fp64); `known_o` and `known_lse` if given."""
    if known_o is not None and known_lse is not None:
        # The outputs of a custom op must not alias its inputs.
        return known_o.clone(), known_lse.clone()
    span = Span(bounds[rank], bounds[rank + 1], _only(borders), window)
    o, lse = _method(handle).forward(q, k, v, span, bounds, scale)
    return o.contiguous(), lse.contiguous()


@_attend.register_fake
def _attend_shapes(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, H, T, dtype=accumulation_dtype(q.dtype))


@custom_op("zeco::attend_backward", mutates_args=())
def _attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    handle: Tensor,
    bounds: list[int],
    rank: int,
    borders: list[Tensor],
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    span = Span(bounds[rank], bounds[rank + 1], _only(borders), window)
    grads = _method(handle).backward(do, q, k, v, Attended(o, lse), span, bounds, scale)
    dq, dk, dv = (grad.to(x.dtype).contiguous() for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@_attend_backward.register_fake
def _attend_backward_shapes(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, _, scale, handle, bounds, rank, borders, window = inputs
    ctx.save_for_backward(q, k, v, *output, handle, *borders)
    ctx.mark_non_differentiable(output[1])
    ctx.scale, ctx.bounds, ctx.rank, ctx.window = scale, bounds, rank, window


def _backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, handle, *borders = ctx.saved_tensors
    where = handle, ctx.bounds, ctx.rank, borders
    grads = _attend_backward(do.contiguous(), q, k, v, o, lse, ctx.scale, *where, ctx.window)
    return *grads, *(None,) * 6, [None] * len(borders), None


_attend.register_autograd(_backward, setup_context=_keep)
