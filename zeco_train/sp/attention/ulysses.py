"""Every rank gets some heads of the whole sequence (DeepSpeed-Ulysses), and computes them like one device.

Four all-to-alls: queries, keys and values before, outputs after; in the backward pass gradients of outputs before, of
queries, keys and values after. It reads queries, keys, values and outputs by heads, which the forward pass has kept; a
replay sends them again. In the backward pass messages of one sequence of a batch travel while another is computed. All
ranks have the same work. There must be a head for each rank; with fewer heads of keys and values than ranks, those are
repeated, and not kept.

Memory: queries, keys, values and outputs of the whole sequence, of H / P heads: as much as without sharding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeco_train.collectives.wire import Transfer
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, AttendedHeads, Span
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec
from zeco_train.sp.attention.pipelined import PipelinedAttention, Steps, num_parts
from zeco_train.sp.attention.routes import Bounds

# Of one sequence, with the tensor that it arrives in.
_Message = tuple[Transfer, Tensor]


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
        (q, k, v), arriving = self._by_heads({"queries": q, "keys": k, "values": v}, spans)
        yield
        # The batch at once: one sequence after another is no faster (2 H200).
        for row in arriving:
            list(_arrived(row))
        found = attend(q, k, v, whole, 0, scale)
        returning = [[self._by_tokens(row, spans, "outputs")] for row in found.o.split(1)]
        yield
        (o,) = _placed(returning)
        return Attended(o, found.lse) if is_repeated else AttendedHeads(o, found.lse, q, k, v, found.o)

    def backward_steps(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        spans, whole = self.spans(span, bounds), Span(bounds[0], bounds[-1], span.borders, span.window)
        of_forward = {"queries": q, "outputs": attended.o, "keys": k, "values": v}
        kept = [*of_forward.values()] if q.shape[2] < do.shape[2] else []
        sent = {"gradients": do} | ({} if kept else of_forward)
        arriving = [
            self._by_heads({what: x[row : row + 1] for what, x in sent.items()}, spans)[1][0] for row in range(len(do))
        ]
        yield
        returning = [
            [self._by_tokens(x, spans, "gradients") for x in self._gradients(of_row, row, kept, attended, whole, scale)]
            for row, of_row in enumerate(arriving)
        ]
        yield
        dq, dk, dv = _placed(returning)
        return (dq, dk, dv) if kept else (dq, self._summed(dk, k), self._summed(dv, v))

    def _gradients(
        self, arriving: list[_Message], row: int, kept: list[Tensor], attended: Attended, whole: Span, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Of queries, keys and values of this rank's heads, of one sequence; what has arrived is freed with the return.
        do, q, o, k, v = *_arrived(arriving), *(x[row : row + 1] for x in kept)
        of_row = Attended(o, attended.lse[row : row + 1])
        return attend_backward(do, q, k, v, of_row, whole, 0, scale, self.deterministic)

    def _summed(self, grad: Tensor, like: Tensor) -> Tensor:
        if grad.shape[2] == like.shape[2]:
            return grad
        return grad.to(accumulation_dtype(grad.dtype)).unflatten(2, (like.shape[2], -1)).sum(3)

    def _by_heads(self, tensors: dict[str, Tensor], spans: list[Span]) -> tuple[list[Tensor], list[list[_Message]]]:
        # Start [B, own tokens, H, D] → [B, all tokens, own heads, D], where the tokens of each rank arrive in their
        # place: these tensors, and the messages of each sequence.
        size, lengths = self.wire.size, [span.stop - span.start for span in spans]
        wholes = [x.new_empty(len(x), sum(lengths), max(1, x.shape[2] // size), x.shape[3]) for x in tensors.values()]
        return wholes, [
            [
                self._start(self._by_ranks(x[row]), whole[row : row + 1], what, lengths, [x.shape[1]] * size)
                for (what, x), whole in zip(tensors.items(), wholes, strict=True)
            ]
            for row in range(len(wholes[0]))
        ]

    def _by_ranks(self, x: Tensor) -> Tensor:
        # [own tokens, H, D] → [P, own tokens, heads of a rank, D]; heads are repeated one tensor after another.
        repeats = _repeats(x.shape[1], self.wire.size)
        return (x if repeats == 1 else x.repeat_interleave(repeats, 1)).unflatten(1, (self.wire.size, -1)).movedim(1, 0)

    def _by_tokens(self, x: Tensor, spans: list[Span], what: str) -> _Message:
        # Start [1, all tokens, own heads, D] → [P, own tokens, own heads, D].
        size, lengths = self.wire.size, [span.stop - span.start for span in spans]
        into = x.new_empty(size, lengths[self.wire.rank], *x.shape[2:])
        return self._start(x, into, what, [into.shape[1]] * size, lengths)

    def _start(self, parts: Tensor, into: Tensor, what: str, received: list[int], sent: list[int]) -> _Message:
        # So many tokens from and to each rank; they are packed while earlier messages travel.
        counts = [[tokens * into.shape[-2:].numel() for tokens in way] for way in (received, sent)]
        message = _wide(parts).reshape(-1).view(parts.dtype)
        return self.wire.all_to_all(into.view(-1), message, what, *counts), into


def _arrived(under_way: list[_Message]) -> Iterator[Tensor]:
    # One after another, once: the messages are freed.
    while under_way:
        transfer, into = under_way.pop(0)
        transfer.wait()
        yield into


def _placed(returning: list[list[_Message]]) -> list[Tensor]:
    # Of each sequence tensors [P, own tokens, own heads, D] → [B, own tokens, H, D].
    found: list[Tensor] = []
    for row, under_way in enumerate(returning):
        for index, into in enumerate(_arrived(under_way)):
            by_tokens = into.movedim(0, 1)
            if row == 0:
                found.append(into.new_empty(len(returning), *by_tokens.shape))
            _wide(found[index][row]).copy_(_wide(by_tokens))
    return [x.flatten(2, 3) for x in found]


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
    # Not what one sequence hides of another's gradients: two runs on 2 H200s disagree.
    hidden = 1 - 1 / num_parts(load.key_heads, load.ranks, load.tokens, load.nodes)
    if load.replayed or repeats > 1:
        operands, messages = forward + queries, (4 * load.batch, 8 * load.batch)
        backward = leaving * (operands + gradients)
        return MethodCosts(leaving * forward, backward, messages, 2.0 * operands, hidden=hidden)
    # Then gradients are, as computed and arriving.
    backward, messages = leaving * (queries + gradients), (4 * load.batch, 4 * load.batch)
    held = 2.0 * (load.queries + repeated) * load.itemsize
    return MethodCosts(leaving * forward, backward, messages, held, hidden=hidden, kept=float(queries))


ULYSSES = MethodSpec(
    name="ulysses",
    description="every rank gets some heads of the whole sequence; the ranks must divide the heads",
    build=Ulysses,
    heads_problem=_heads_problem,
    costs=_costs,
)
