"""Softmax attention over a sharded sequence: the one op that serves every method of `sp.attention`.

Tokens stay where they are: each rank has consecutive ones, as linear layers want them. What crosses ranks (keys and
values, or queries and outputs) is the method's own matter. As `zeco::mix` this is one node for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import AttentionMethod, exchange_of
from zeco_train.ops.softmax.attention import attend, extend
from zeco_train.ops.softmax.span import Attended, Span


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    position: SequencePosition,
    state_inputs: Sequence[StateInput],
    window: int | None = None,
) -> tuple[Tensor, tuple[StateOutput, ...]]:
    """Causal softmax attention of this rank's tokens to those before them, exact over the whole sequence.

    Args:
        q: [B, T, H, D], of this rank's tokens, in bf16, fp32 or fp64.
        k: [B, T, G, D]; G divides H, each head serves H / G heads of q in a row.
        v: [B, T, G, V].
        scale: factor of the scores.
        position: of the tokens, with an `Exchange`, which the caller keeps alive until after the backward pass.
        state_inputs: two. In a replay the output and the log-sum-exp of a first forward pass: nothing is computed or
            communicated then. After earlier segments, or pieces of a prompt, the caches of their keys and values as
            `carry_in` (`zeco_train.ops.softmax.attention`), which these are appended to, in place and on every rank;
            a gradient through them is a NotImplementedError.
        window: keys that a query reads at most, itself among them; None: no limit.

    Returns:
        o, [B, T, H, V] in the dtype of q; and o and its log-sum-exp, for a later replay, or the caches, carried out.
    """
    caches = [state_input.carry_in for state_input in state_inputs if state_input.carry_in is not None]
    if caches:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *caches)):
            problem = "softmax layers have no gradient through keys of earlier segments: train.segments must be 1"
            raise NotImplementedError(problem)
        # Every rank gets all ranks' keys and values, since each keeps whole caches. So queries stay where they are;
        # those of the last rank read more keys than those of the first, by less than one segment.
        k, v = _method(position.handle).gather([k, v], position.bounds)
        (keys, first), (values, _) = (
            extend(cache, new, position.bounds[0], window) for cache, new in zip(caches, (k, v), strict=True)
        )
        spans = _spans(position.start, q, position.borders, window)
        o, _ = _by_rows(lambda span, q, k, v: attend(q, k, v, span, first, scale), spans, q, keys, values)
        return o, tuple(StateOutput(o.new_empty(0), cache) for cache in caches)
    if any(state_input.want_carry for state_input in state_inputs):
        raise ValueError("softmax attention carries caches out only if they are carried in")
    replayed = [state_input.incoming_state for state_input in state_inputs]
    method = None if position.exchange is None else position.exchange.attention
    where = 1 if method is None else method.heads_over, position.handle, list(position.bounds), position.rank
    o, lse, *_ = torch.ops.zeco.attend(q, k, v, *replayed, scale, *where, position.borders, window)
    kept = (o.new_empty(0), lse.new_empty(0)) if replayed[0] is not None else (o.detach(), lse)
    return o, tuple(StateOutput(tensor, lse.new_empty(0)) for tensor in kept)


# One span for the whole batch; or, with borders [B, documents + 1], that of each sequence.
def _spans(start: int, q: Tensor, borders: Tensor | None, window: int | None) -> list[Span]:
    stop = start + q.shape[1]
    if borders is None or borders.dim() == 1:
        return [Span(start, stop, borders, window)]
    if len(borders) != q.shape[0]:
        raise ValueError(f"borders: documents of {len(borders)} sequences, for a batch of {q.shape[0]}")
    return [Span(start, stop, row, window) for row in borders]


# With several spans the rows of the batch are computed one after another, on every rank.
def _by_rows(compute: Callable[..., Sequence[Tensor]], spans: Sequence[Span], *tensors: Tensor) -> Sequence[Tensor]:
    if len(spans) == 1:
        return compute(spans[0], *tensors)
    rows = zip(spans, *(x.split(1) for x in tensors), strict=True)
    return [torch.cat(parts) for parts in zip(*(compute(*row) for row in rows), strict=True)]


def _method(handle: Tensor | None) -> AttentionMethod:
    assert handle is not None, "a position without exchange"
    method = exchange_of(handle).attention
    assert method is not None, "an exchange for softmax layers has a method"
    return method


# o, and the log-sum-exp of its scores, fp32 (fp64 for fp64), of the tokens or of heads (`AttentionMethod.heads_over`);
# `known_o` and `known_lse` if given. Then q, k, v and o of `AttendedHeads`, for the backward pass; else each [0].
@custom_op("zeco::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    known_o: Tensor | None,
    known_lse: Tensor | None,
    scale: float,
    heads_over: int,
    handle: Tensor,
    bounds: list[int],
    rank: int,
    borders: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if known_o is not None and known_lse is not None:
        # The outputs of a custom op must not alias its inputs.
        found: Sequence[Tensor] = known_o.clone(), known_lse.clone()
    else:
        method, spans = _method(handle), _spans(bounds[rank], q, borders, window)
        found = _by_rows(lambda span, q, k, v: method.forward(q, k, v, span, bounds, scale), spans, q, k, v)
    o, lse, *kept = (x.contiguous() for x in found)
    q, k, v, of_heads = kept or (o.new_empty(0) for _ in range(4))
    return o, lse, q, k, v, of_heads


@_attend.register_fake
def _attend_shapes(q: Tensor, k: Tensor, v: Tensor, known_o: Tensor | None, *settings: Any) -> tuple[Tensor, ...]:
    (B, T, H, _), (_, _, over, _, bounds, *_) = q.shape, settings
    tokens = T if over == 1 else bounds[-1] - bounds[0]
    o = q.new_empty(B, T, H, v.shape[3])
    lse = q.new_empty(B, H // over, tokens, dtype=accumulation_dtype(q.dtype))
    if over == 1 or k.shape[2] % over or known_o is not None:
        return o, lse, *(q.new_empty(0) for _ in range(4))
    return o, lse, *(q.new_empty(B, tokens, x.shape[2] // over, x.shape[3]) for x in (q, k, v, o))


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
    borders: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    method, spans = _method(handle), _spans(bounds[rank], do, borders, window)

    def of_rows(span: Span, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *attended: Tensor) -> Sequence[Tensor]:
        return method.backward(do, q, k, v, Attended(*attended), span, bounds, scale)

    grads = _by_rows(of_rows, spans, do, q, k, v, o, lse)
    dq, dk, dv = (grad.to(x.dtype).contiguous() for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@_attend_backward.register_fake
def _attend_backward_shapes(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (B, T, H, _), part = do.shape, q.shape[2]
    return tuple(x.new_empty(B, T, H // part * x.shape[2], x.shape[3]) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, scale, _, handle, bounds, rank, borders, window = inputs
    o, lse, *kept = output
    ctx.save_for_backward(*(kept if kept[0].dim() > 1 else (q, k, v, o)), lse, handle, borders)
    ctx.mark_non_differentiable(lse, *kept)
    ctx.scale, ctx.bounds, ctx.rank, ctx.window = scale, bounds, rank, window


def _backward(ctx: Any, do: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, handle, borders = ctx.saved_tensors
    grads = _attend_backward(do.contiguous(), *tensors, ctx.scale, handle, ctx.bounds, ctx.rank, borders, ctx.window)
    return *grads, *(None,) * 9


_attend.register_autograd(_backward, setup_context=_keep)
