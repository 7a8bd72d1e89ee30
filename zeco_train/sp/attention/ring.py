"""Keys and values travel from rank to rank (Ring Attention, Liu et al., 2023), each block while one is computed.

    step t, rank r:  send block r − t to r+1, receive block r − t − 1 from r−1, meanwhile attend to block r − t

Causal queries read earlier tokens only, so no block goes round from the last rank to the first; and with windows or
documents a block goes only as far as a later rank reads it, without the tokens that none does. All ranks know all
ranges, so no rank waits for a message that is not sent. Parts merge by their log-sum-exp, in the order of steps.

In the backward pass the blocks travel again. The part that a block's keys have in a rank's outputs follows from the
merged output and log-sum-exp; its gradients go straight to the owner of the block, one step after they are computed,
and so arrive, and are added, in the order of ranks. A message's sender and receiver have it in the same step, and a
step waits only for its own messages, so that no ranks wait for each other in a circle.

Memory: three blocks, of keys and values. Balance: none, rank r computes r + 1 blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.collectives.wire import Message, Transfer, Wire
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec, ShardedAttention
from zeco_train.sp.attention.routes import Bounds, Range


class Ring(ShardedAttention):
    """Ring Attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float) -> Attended:
        # Messages between some ranks must not be the first ones.
        self.connect(q)
        blocks = _Blocks(self.wire, self.spans(span, bounds), k, v)
        found: Attended | None = None
        for _ in range(self.wire.size):
            transfers = self.wire.send_and_receive(*blocks.messages())
            if blocks.is_read:
                part = attend(q, blocks.k, blocks.v, span, blocks.keys[0], scale)
                found = part if found is None else Attended.merged(found, part)
            _wait(transfers)
            blocks.advance()
        if found is None:
            # A shard without tokens.
            return attend(q, k, v, span, span.start, scale)
        return Attended(found.o.to(q.dtype), found.lse)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulation_dtype(q.dtype)
        blocks = _Blocks(self.wire, self.spans(span, bounds), k, v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        part: Tensor | None = None
        for step in range(self.wire.size + 1):
            sent, received = blocks.messages()
            partials = _Partials(blocks, step - 1, dk, dv)
            transfers = self.wire.send_and_receive([*sent, *partials.sent(part)], [*received, *partials.received()])
            part = None
            if blocks.is_read:
                dqp, dkp, dvp = attend_backward(
                    do, q, blocks.k, blocks.v, attended, span, blocks.keys[0], scale, self.deterministic
                )
                dq += dqp
                if step == 0:
                    dk += dkp
                    dv += dvp
                else:
                    part = _packed(dkp, dvp).to(wide)
            _wait(transfers)
            partials.add()
            blocks.advance()
        return dq, dk, dv


class _Blocks:
    # The blocks that pass a rank, one a step: its own, then those of the ranks before it, the nearest first. `owner` is
    # the rank of the tokens of the block that is here, < 0 if none is left; `keys` are the positions in it that this
    # rank or a later one reads; `k` and `v` are theirs, [B, keys, G, …].
    def __init__(self, wire: Wire, spans: Sequence[Span], k: Tensor, v: Tensor) -> None:
        self.wire, self.owner, self.k, self.v = wire, wire.rank, k, v
        self._spans = spans
        # The first key that each rank or a later one reads; one without tokens reads none, but passes blocks on.
        self._first = [spans[-1].stop] * (wire.size + 1)
        for rank in reversed(range(wire.size)):
            own = [spans[rank].first_key] if spans[rank].stop > spans[rank].start else []
            self._first[rank] = min(*own, self._first[rank + 1]) if own else self._first[rank + 1]
        self.keys = spans[wire.rank].start, spans[wire.rank].stop
        self._message: Tensor | None = None
        self._next: Tensor | None = None

    @property
    def is_read(self) -> bool:
        # Whether this rank's queries read the block that is here.
        return self.owner >= 0 and self.reads(self.owner, self.wire.rank)

    def reads(self, owner: int, rank: int) -> bool:
        # Whether the queries of `rank` read keys of `owner`.
        return self._spans[rank].stop > self._spans[rank].start and _length(self.travelling(owner, rank)) > 0

    def travelling(self, owner: int, rank: int) -> Range:
        # Keys of `owner` that go to `rank`: it reads them, or a later rank does.
        span = self._spans[owner]
        return max(span.start, min(self._first[rank], span.stop)), span.stop

    def messages(self) -> tuple[list[Message], list[Message]]:
        # Those of this step: the block that is here to the next rank, and the next block from the rank before.
        rank, sent, received = self.wire.rank, [], []
        if self.owner >= 0 and rank + 1 < self.wire.size and _length(keys := self.travelling(self.owner, rank + 1)):
            sent.append(Message(self._packed(keys), rank + 1, f"keys of rank {self.owner}"))
        self._next = None
        if self.owner >= 1 and (length := _length(self.travelling(self.owner - 1, rank))):
            self._next = self.k.new_empty(length * sum(_per_token(x) for x in (self.k, self.v)))
            received.append(Message(self._next, rank - 1, f"keys of rank {self.owner - 1}"))
        return sent, received

    def advance(self) -> None:
        self.owner, self._message = self.owner - 1, self._next
        if self.owner >= 0:
            self.keys = self.travelling(self.owner, self.wire.rank)
        if self._message is not None:
            self.k, self.v = _unpacked(self._message, _length(self.keys), self.k, self.v)

    def _packed(self, keys: Range) -> Tensor:
        # The message of the last tokens of the block; passed on as it came if those are all.
        if self._message is not None and keys == self.keys:
            return self._message
        first = keys[0] - self.keys[0]
        return _packed(self.k[:, first:], self.v[:, first:])


class _Partials:
    # Gradients of keys and values on their way to the owner, of the blocks that came `hops` ranks far.
    def __init__(self, blocks: _Blocks, hops: int, dk: Tensor, dv: Tensor) -> None:
        self._blocks, self._hops, self._dk, self._dv = blocks, hops, dk, dv
        self._message: Tensor | None = None
        self._length = 0

    def sent(self, part: Tensor | None) -> list[Message]:
        if part is None:
            return []
        return [Message(part, self._blocks.wire.rank - self._hops, "gradients of keys")]

    def received(self) -> list[Message]:
        rank = self._blocks.wire.rank
        reader = rank + self._hops
        if self._hops < 1 or reader >= self._blocks.wire.size or not self._blocks.reads(rank, reader):
            return []
        self._length = _length(self._blocks.travelling(rank, reader))
        numbers = self._length * (_per_token(self._dk) + _per_token(self._dv))
        self._message = self._dk.new_empty(numbers)
        return [Message(self._message, reader, "gradients of keys")]

    def add(self) -> None:
        if self._message is not None:
            dk, dv = _unpacked(self._message, self._length, self._dk, self._dv)
            self._dk[:, -self._length :] += dk
            self._dv[:, -self._length :] += dv


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(message: Tensor, tokens: int, *like: Tensor) -> list[Tensor]:
    shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in like]
    parts = message.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _per_token(x: Tensor) -> int:
    return math.prod((x.shape[0], *x.shape[2:]))


def _length(keys: Range) -> int:
    return keys[1] - keys[0]


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _costs(load: AttentionLoad) -> MethodCosts:
    ahead = load.ranks * load.tokens if load.window is None else load.window - 1
    blocks = min(ahead, (load.ranks - 1) * load.tokens) * load.keys_per_token * load.itemsize
    back = [min(ahead, (load.ranks - 1 - rank) * load.tokens) * load.keys_per_token * load.wide for rank in (0, 1)]
    # Blocks: sent, here and arriving. Gradients: computed, sent and arriving; those of this rank's queries.
    held = load.tokens * load.keys_per_token * (3.0 * load.itemsize + 3.0 * load.wide) + load.queries * load.wide
    slowest = 2 - 1 / load.ranks if load.window is None else 1.0
    return MethodCosts(blocks, max(back[0], blocks + back[1]), (load.ranks, load.ranks + 1), held, slowest, 1.0)


RING = MethodSpec(
    name="ring",
    description="keys and values travel from rank to rank under compute; least memory, but later ranks work longer",
    build=Ring,
    costs=_costs,
    balanced=False,
)
