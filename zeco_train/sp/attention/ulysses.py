"""Every rank gets some heads of the whole sequence (DeepSpeed-Ulysses), and computes them like one device.

Queries, keys and values travel before, outputs after. All ranks have the same work. There must be a head for each rank;
with fewer heads of keys and values than ranks, those are repeated. What a rank itself computes of its own tokens is in
no message; all tensors travel at once, and are received where they are wanted.

Memory: queries, keys, values and outputs of the whole sequence, of H / P heads: as much as without sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.collectives.wire import Message, Transfer
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attended import Attended
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Span
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec
from zeco_train.sp.attention.pipelined import PipelinedAttention, Steps, num_parts

# Of messages under way at once; gloo's tags have at least 31 bits.
_TAGS = 1 << 30


class Ulysses(PipelinedAttention):
    """See the module."""

    _tag = 0

    @property
    def heads_step(self) -> int:
        """See `PipelinedAttention`: fewer heads of keys than ranks would be repeated."""
        return self.wire.size

    def forward_steps(self, q: Tensor, k: Tensor, v: Tensor, span: Span, seq_len: int, scale: float) -> Steps[Attended]:
        """See `PipelinedAttention`."""
        # Messages between some ranks must not be the first ones.
        self.connect(q)
        spans, whole = self.spans(span, seq_len), Span(0, seq_len, span.borders, span.window)
        arriving = self._start(_by_heads(x, spans, self.wire.rank) for x in (q, self._repeated(k), self._repeated(v)))
        yield
        q, k, v = arriving.wait()
        found = attend(q, k, v, whole, 0, scale)
        returning = self._start(_by_tokens(x, spans, self.wire.rank) for x in (found.o, found.lse.mT.unsqueeze(-1)))
        del found, q, k, v
        yield
        o, lse = returning.wait()
        return Attended(o, lse.squeeze(-1).mT)

    def backward_steps(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, seq_len: int, scale: float
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        """See `PipelinedAttention`."""
        spans, whole = self.spans(span, seq_len), Span(0, seq_len, span.borders, span.window)
        of_queries = do, q, attended.o, attended.lse.mT.unsqueeze(-1)
        # One after another, so that no two repeated tensors of this rank's tokens exist at once.
        operands = (x if index < len(of_queries) else self._repeated(x) for index, x in enumerate((*of_queries, k, v)))
        arriving = self._start(_by_heads(x, spans, self.wire.rank) for x in operands)
        yield
        grads = self._gradients(arriving, whole, scale)
        returning = self._start(_by_tokens(grad, spans, self.wire.rank) for grad in grads)
        del grads
        yield
        dq, dk, dv = returning.wait()
        return dq, self._summed(dk, k), self._summed(dv, v)

    def _gradients(self, arriving: _Exchange, whole: Span, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries, keys and values of this rank's heads; what has arrived is freed with the return."""
        do, q, o, lse, k, v = arriving.wait()
        return attend_backward(do, q, k, v, Attended(o, lse.squeeze(-1).mT), whole, 0, scale, self.deterministic)

    def _repeated(self, x: Tensor) -> Tensor:
        """[B, T, G, D] with G ≥ P heads: each one as often in a row as needed."""
        repeats = _repeats(x.shape[2], self.wire.size)
        return x if repeats == 1 else x.repeat_interleave(repeats, 2)

    def _summed(self, grad: Tensor, like: Tensor) -> Tensor:
        """The gradient of repeated heads → that of the heads."""
        if grad.shape[2] == like.shape[2]:
            return grad
        return grad.to(accumulation_dtype(grad.dtype)).unflatten(2, (like.shape[2], -1)).sum(3)

    def _start(self, moves: Iterable[_Move]) -> _Exchange:
        """Start to send tensors to all ranks, and to receive the same of theirs."""
        own, sent, received, under_way = self.wire.rank, list[Message](), list[Message](), list[_Move]()
        for move in moves:
            self._tag = (self._tag + 1) % _TAGS
            for messages, tensors, way in ((sent, move.parts, "for"), (received, move.blocks, "of")):
                messages += [
                    Message(tensor, rank, f"heads {way} rank {rank}", self._tag)
                    for rank, tensor in enumerate(tensors)
                    if rank != own and tensor.numel()
                ]
            under_way.append(move)
        transfers = self.wire.exchange(sent, received)
        # What stays is copied meanwhile.
        return _Exchange(transfers, [move.received(own) for move in under_way])


class _Move(NamedTuple):
    """A tensor's way to all ranks, and what comes in its place.

    Attributes:
        parts: one for each rank, contiguous but for this rank's own.
        blocks: one from each rank, contiguous; of this rank's own only the shape counts.
        dim: along which the blocks lie in the result.
        whole: the result, if the blocks are views of it.
    """

    parts: Sequence[Tensor]
    blocks: Sequence[Tensor]
    dim: int
    whole: Tensor | None = None

    def received(self, own: int) -> _Received:
        """With the part of rank `own`, this one, in its place."""
        if self.whole is not None:
            self.blocks[own].copy_(self.parts[own])
            return _Received([self.whole], self.dim)
        kept = self.parts[own].contiguous()
        return _Received([kept if rank == own else block for rank, block in enumerate(self.blocks)], self.dim)


class _Received(NamedTuple):
    """A tensor in one piece, or in several along `dim`."""

    pieces: list[Tensor]
    dim: int

    def joined(self) -> Tensor:
        """In one piece."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces, self.dim)


class _Exchange:
    """Tensors under way."""

    def __init__(self, transfers: list[Transfer], received: list[_Received]) -> None:
        self._under_way = transfers, received

    def wait(self) -> list[Tensor]:
        """The tensors. Once: what they are made of is freed."""
        transfers, received = self._under_way
        del self._under_way
        while transfers:
            transfers.pop().wait()
        return [each.joined() for each in received]


def _by_heads(x: Tensor, spans: Sequence[Span], rank: int) -> _Move:
    """[B, own tokens, H, D] → [B, all tokens, own heads, D]."""
    by_rank = x.unflatten(2, (len(spans), -1)).movedim(2, 0)
    parts = [*by_rank[:rank].contiguous(), by_rank[rank], *by_rank[rank + 1 :].contiguous()]
    lengths, (batch, _, *heads) = [span.stop - span.start for span in spans], by_rank.shape[1:]
    if batch > 1:
        return _Move(parts, [x.new_empty(batch, length, *heads) for length in lengths], 1)
    # The ranks' tokens lie one after another: they are received where they are wanted.
    whole = x.new_empty(batch, sum(lengths), *heads)
    return _Move(parts, whole.split(lengths, 1), 1, whole)


def _by_tokens(x: Tensor, spans: Sequence[Span], rank: int) -> _Move:
    """[B, all tokens, own heads, D] → [B, own tokens, H, D]."""
    parts = [part.contiguous() for part in x.split([span.stop - span.start for span in spans], 1)]
    return _Move(parts, [part if part is parts[rank] else torch.empty_like(parts[rank]) for part in parts], 2)


def _repeats(key_heads: int, ranks: int) -> int:
    return max(1, ranks // key_heads)


def _heads_problem(heads: int, key_heads: int, ranks: int) -> str | None:
    if heads % ranks:
        return f"needs ranks that divide the {heads} heads of queries, not {ranks}"
    if (key_heads * _repeats(key_heads, ranks)) % ranks:
        return f"needs ranks that divide the {key_heads} heads of keys, or are a multiple of them, not {ranks}"
    return None


def _costs(load: AttentionLoad) -> MethodCosts:
    """Everything but a rank's own part leaves it; the whole sequence of H / P heads has the size of its own tokens.

    All operands are sent at once: as messages to the other ranks, and as tensors of the whole sequence.
    """
    repeated = load.tokens * load.keys_per_token * _repeats(load.key_heads, load.ranks)
    sums, leaving = load.tokens * load.heads * load.wide, 1 - 1 / load.ranks
    forward = (2 * load.queries + repeated) * load.itemsize + sums
    operands = (3 * load.queries + repeated) * load.itemsize
    gradients = (load.queries + repeated) * load.wide
    backward = operands + gradients + sums
    hidden = 1 - 1 / num_parts(load.key_heads, load.ranks, load.tokens, load.nodes)
    return MethodCosts(leaving * forward, leaving * backward, (2, 2), (1 + leaving) * operands, hidden=hidden)


ULYSSES = MethodSpec(
    name="ulysses",
    description="every rank gets some heads of the whole sequence; needs as many heads as ranks",
    build=Ulysses,
    heads_problem=_heads_problem,
    costs=_costs,
)
