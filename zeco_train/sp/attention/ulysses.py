"""Every rank gets some heads of the whole sequence (DeepSpeed-Ulysses), and computes them like one device.

Four all-to-alls: queries, keys and values before, outputs after; in the backward pass gradients of outputs before, of
queries, keys and values after. It reads queries, keys, values and outputs by heads, which the forward pass has kept; a
replay sends them again. All ranks have the same work. There must be a head for each rank; with fewer heads of keys and
values than ranks, those are repeated, and not kept.

Memory: queries, keys, values and outputs of the whole sequence, of H / P heads: as much as without sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.collectives.wire import Transfer
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, AttendedHeads, Span
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec
from zeco_train.sp.attention.pipelined import PipelinedAttention, Steps, num_parts
from zeco_train.sp.attention.routes import Bounds


class Ulysses(PipelinedAttention):
    """DeepSpeed-Ulysses."""

    @property
    def heads_over(self) -> int:
        return self.wire.size

    def forward_steps(
        self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float
    ) -> Steps[Attended | AttendedHeads]:
        is_repeated = _repeats(k.shape[2], self.wire.size) > 1
        spans, whole = self.spans(span, bounds), Span(bounds[0], bounds[-1], span.borders, span.window)
        operands = {"queries": q, "keys": self._repeated(k), "values": self._repeated(v)}
        arriving = [self._by_heads(x, spans, what) for what, x in operands.items()]
        del operands
        yield
        q, k, v = (each.wait() for each in arriving)
        found = attend(q, k, v, whole, 0, scale)
        o = self._by_tokens(found.o, spans, "outputs")
        yield
        return Attended(o.wait(), found.lse) if is_repeated else AttendedHeads(o.wait(), found.lse, q, k, v, found.o)

    def backward_steps(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        spans, whole = self.spans(span, bounds), Span(bounds[0], bounds[-1], span.borders, span.window)
        kept = [q, attended.o, k, v] if q.shape[2] < do.shape[2] else []
        of_queries = {"gradients": do} if kept else {"gradients": do, "queries": q, "outputs": attended.o}
        arriving = [self._by_heads(x, spans, what) for what, x in of_queries.items()]
        if not kept:
            # One after another, so that no two repeated tensors of this rank's tokens exist at once.
            arriving += [self._by_heads(self._repeated(x), spans, what) for what, x in (("keys", k), ("values", v))]
        yield
        grads = self._gradients(arriving, kept, attended.lse, whole, scale)
        returning = [self._by_tokens(grad, spans, "gradients") for grad in grads]
        del grads
        yield
        dq, dk, dv = (each.wait() for each in returning)
        return (dq, dk, dv) if kept else (dq, self._summed(dk, k), self._summed(dv, v))

    def _gradients(
        self, arriving: list[_Shuffled], kept: list[Tensor], lse: Tensor, whole: Span, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Of queries, keys and values of this rank's heads; what has arrived is freed with the return.
        do, q, o, k, v = *(each.wait() for each in arriving), *kept
        return attend_backward(do, q, k, v, Attended(o, lse), whole, 0, scale, self.deterministic)

    def _repeated(self, x: Tensor) -> Tensor:
        repeats = _repeats(x.shape[2], self.wire.size)
        return x if repeats == 1 else x.repeat_interleave(repeats, 2)

    def _summed(self, grad: Tensor, like: Tensor) -> Tensor:
        if grad.shape[2] == like.shape[2]:
            return grad
        return grad.to(accumulation_dtype(grad.dtype)).unflatten(2, (like.shape[2], -1)).sum(3)

    def _by_heads(self, x: Tensor, spans: list[Span], what: str) -> _Shuffled:
        # Start [B, own tokens, H, D] → [B, all tokens, own heads, D]; the tokens of each rank arrive in their place.
        size, lengths = self.wire.size, [span.stop - span.start for span in spans]
        into = x.new_empty(x.shape[0], sum(lengths), x.shape[2] // size, x.shape[3])
        parts = [row.unflatten(1, (size, -1)).movedim(1, 0) for row in x]
        return self._start(parts, into, what, lengths, [x.shape[1]] * size)

    def _by_tokens(self, x: Tensor, spans: list[Span], what: str) -> _Shuffled:
        # Start [B, all tokens, own heads, D] → [B, own tokens, H, D].
        size, lengths = self.wire.size, [span.stop - span.start for span in spans]
        own = lengths[self.wire.rank]
        into = x.new_empty(x.shape[0], size, own, *x.shape[2:])
        return self._start([*x], into, what, [own] * size, lengths)

    def _start(self, parts: list[Tensor], into: Tensor, what: str, received: list[int], sent: list[int]) -> _Shuffled:
        # A message for each sequence of the batch, of so many tokens from and to each rank, so that none is copied
        # before one and after one, but while others travel.
        per_token = into.shape[-2:].numel()
        counts = [[tokens * per_token for tokens in way] for way in (received, sent)]
        transfers = [
            self.wire.all_to_all(row.view(-1), _wide(part).reshape(-1).view(part.dtype), what, *counts)
            for row, part in zip(into, parts, strict=True)
        ]
        return _Shuffled(transfers, into)


class _Shuffled:
    # A tensor under way: by heads [B, all tokens, own heads, D], or by tokens [B, P, own tokens, H / P, D].
    def __init__(self, transfers: list[Transfer], into: Tensor) -> None:
        self._under_way = transfers, into

    def wait(self) -> Tensor:
        # Once: the messages are freed.
        transfers, into = self._under_way
        del self._under_way
        found = into if into.dim() == 4 else None
        for row, message in enumerate(into):
            transfers.pop(0).wait()
            if into.dim() == 5:
                found = into.new_empty(into.movedim(1, 2).shape) if found is None else found
                _wide(found[row]).copy_(_wide(message.movedim(0, 1)))
        assert found is not None, "a batch has a sequence"
        return found if into.dim() == 4 else found.flatten(2, 3)


def _wide(x: Tensor) -> Tensor:
    # A view as elements of 16 bytes, since torch's strided copies move one element after another; x itself if its
    # heads are of other sizes, or lie otherwise.
    step = 16 // x.itemsize
    if x.stride(-1) != 1 or any(size % step for size in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.view(torch.complex128)


def _repeats(key_heads: int, ranks: int) -> int:
    return max(1, ranks // key_heads)


def _heads_problem(heads: int, key_heads: int, ranks: int) -> str | None:
    if heads % ranks:
        return f"needs ranks that divide the {heads} heads of queries, not {ranks}"
    if (key_heads * _repeats(key_heads, ranks)) % ranks:
        return f"needs ranks that divide the {key_heads} heads of keys, or are a multiple of them, not {ranks}"
    return None


def _costs(load: AttentionLoad) -> MethodCosts:
    # Everything but a rank's own part leaves it; the whole sequence of H / P heads has the size of its own tokens. All
    # operands are sent before any is waited for: as messages to the other ranks, and from them.
    repeats, leaving = _repeats(load.key_heads, load.ranks), 1 - 1 / load.ranks
    queries, repeated = load.queries * load.itemsize, load.tokens * load.keys_per_token * repeats
    forward, gradients = (
        2 * queries + repeated * load.itemsize,
        (load.queries + repeated) * (load.computed or load.wide),
    )
    hidden = 1 - 1 / num_parts(load.key_heads, load.ranks, load.tokens, load.nodes)
    if load.replayed or repeats > 1:
        operands = forward + queries
        messages = 4 * load.batch, 8 * load.batch
        backward = leaving * (operands + gradients)
        return MethodCosts(leaving * forward, backward, messages, 2.0 * operands, hidden=hidden)
    # Then gradients are, as computed and arriving.
    held = 2.0 * (load.queries + repeated) * load.itemsize
    return MethodCosts(
        leaving * forward,
        leaving * (queries + gradients),
        (4 * load.batch, 4 * load.batch),
        held,
        hidden=hidden,
        kept=float(queries),
    )


ULYSSES = MethodSpec(
    name="ulysses",
    description="every rank gets some heads of the whole sequence; the ranks must divide the heads",
    build=Ulysses,
    heads_problem=_heads_problem,
    costs=_costs,
)
