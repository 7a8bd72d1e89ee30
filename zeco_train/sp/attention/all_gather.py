"""Every rank gets the keys and values that its queries read (LASP-2H; Llama 3), and no others.

Causal queries of consecutive tokens differ in work: the last rank's read P times as many keys as the first's. So each
shard is cut in halves, 2P in all, and rank r computes the queries of halves r and 2P − 1 − r, which read as many keys
on every rank. Queries and outputs travel for that; the tokens of the other layers stay where they are.

With a window, ranks are equal as they are: each computes its own queries, and receives the few keys before its tokens.

Memory: the keys and values that a rank reads, without a window those of the whole sequence. In the backward pass they
are fetched again, and each rank's gradients of them go back to the owners, which add them up in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.collectives.wire import Wire
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec
from zeco_train.sp.attention.pipelined import PipelinedAttention, Steps, num_parts
from zeco_train.sp.attention.routes import Arrival, Bounds, Here, Range, Routes


class _Work(NamedTuple):
    # What each rank computes.
    own: Sequence[Span]  # its tokens
    computed: Sequence[Sequence[Span]]  # spans of queries
    keys: Sequence[Range]  # the range that these read

    @property
    def held(self) -> list[list[Range]]:
        return [[(span.start, span.stop)] for span in self.own]

    @property
    def queries(self) -> list[list[Range]]:
        return [[(span.start, span.stop) for span in spans] for spans in self.computed]


class AllGather(PipelinedAttention):
    """Where there is no window, each rank computes two halves if `paired`, else its own queries."""

    def __init__(self, wire: Wire, *, num_parts: int | None = None, paired: bool = True) -> None:
        super().__init__(wire, num_parts=num_parts)
        self._paired = paired and wire.size > 1

    def forward_steps(
        self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float
    ) -> Steps[Attended]:
        work = self._work(span, bounds)
        keys = self._routes(work.held, [[keys] for keys in work.keys])
        arriving, queries = keys.start([k, v], "keys and values"), self._to_computing(work, [q])
        yield
        (q,), (k, v) = queries.wait(), arriving.wait()
        found = [
            attend(part, k, v, of_part, work.keys[self.wire.rank][0], scale)
            for part, of_part in zip(self._cut(q, work), work.computed[self.wire.rank], strict=True)
        ]
        o, lse = (torch.cat(tensors, 1) for tensors in zip(*((x.o, x.lse.mT) for x in found), strict=True))
        if not self._is_paired(span):
            return Attended(o, lse.mT)
        back = self._routes(work.queries, work.held)
        outputs, sums = back.start([o], "outputs"), back.start([lse], "log-sum-exps")
        del found, o, lse, q, k, v
        yield
        (o,), (lse,) = outputs.wait(), sums.wait()
        return Attended(o, lse.mT)

    def backward_steps(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        work = self._work(span, bounds)
        wanted = [[keys] for keys in work.keys]
        arriving = self._routes(work.held, wanted).start([k, v], "keys and values")
        queries = self._to_computing(work, [do, q, attended.o])
        sums = self._to_computing(work, [attended.lse.mT])
        yield
        dq, dk, dv = self._gradients(work, [*queries.wait(), *sums.wait()], arriving, scale)
        back = self._routes(wanted, work.held)
        parcel = back.pack([dk, dv], accumulation_dtype(q.dtype))
        del dk, dv
        arriving = back.send(parcel, "gradients of keys and values")
        del parcel
        if self._is_paired(span):
            returning = self._routes(work.queries, work.held).start([dq], "gradients of queries")
            del dq
            yield
            (dq,) = returning.wait()
        else:
            yield
        dk, dv = arriving.wait(add=True)
        return dq, dk, dv

    def _gradients(
        self, work: _Work, of_queries: list[Tensor], arriving: Arrival, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Gradients of the computed queries and of the keys and values that they read; those are freed with the return.
        # `of_queries`: gradients of outputs, queries, outputs and log-sum-exps [B, N, H], of the computed queries.
        k, v = arriving.wait()
        (start, stop), dqs = work.keys[self.wire.rank], []
        of_keys: list[tuple[slice, Tensor, Tensor]] = []
        for do, q, o, lse, span in zip(
            *(self._cut(x, work) for x in of_queries), work.computed[self.wire.rank], strict=True
        ):
            # Gradients of no more keys than the span reads: together they are hardly larger than those of all.
            read = slice(span.first_key - start, span.stop - start)
            found = Attended(o, lse.mT)
            dq, dk, dv = attend_backward(
                do, q, k[:, read], v[:, read], found, span, span.first_key, scale, self.deterministic
            )
            dqs.append(dq)
            of_keys.append((read, dk, dv))
        of_keys.sort(key=lambda each: each[1].shape[1])
        read, dk, dv = of_keys.pop()
        if not of_keys:
            # They travel in the dtype of the keys, as kernels give them: the owner adds them up.
            return dqs[0], dk.to(k.dtype), dv.to(v.dtype)
        dk, dv = (_widened(x, read, stop - start) for x in (dk, dv))
        while of_keys:
            read, *parts = of_keys.pop()
            for total, part in zip((dk, dv), parts, strict=True):
                total[:, read] += part
        return torch.cat(dqs, 1), dk, dv

    def _is_paired(self, span: Span) -> bool:
        return self._paired and span.window is None

    def _work(self, span: Span, bounds: Bounds) -> _Work:
        own = self.spans(span, bounds)
        computed = [[each] for each in own]
        if self._is_paired(span):
            halves = [half for each in own for half in _halves(each)]
            computed = [[halves[rank], halves[-1 - rank]] for rank in range(self.wire.size)]
        keys = [(min(part.first_key for part in parts), max(part.stop for part in parts)) for parts in computed]
        return _Work(own, computed, keys)

    def _routes(self, held: Sequence[Sequence[Range]], wanted: Sequence[Sequence[Range]]) -> Routes:
        return Routes(self.wire, held, wanted)

    def _to_computing(self, work: _Work, tensors: list[Tensor]) -> Arrival | Here:
        # Start to send tensors of this rank's queries to the ranks that compute them.
        if not self._is_paired(work.own[0]):
            return Here(tensors)
        return self._routes(work.held, work.queries).start(tensors, "queries")

    def _cut(self, x: Tensor, work: _Work) -> Sequence[Tensor]:
        return x.split([span.stop - span.start for span in work.computed[self.wire.rank]], 1)


def _halves(span: Span) -> tuple[Span, Span]:
    middle = (span.start + span.stop) // 2
    return span.part(span.start, middle), span.part(middle, span.stop)


def _widened(x: Tensor, read: slice, length: int) -> Tensor:
    # [B, tokens read, G, D] → [B, length, G, D] in the dtype of sums, 0 where nothing is read.
    dtype = accumulation_dtype(x.dtype)
    if x.shape[1] == length:
        return x.to(dtype)
    whole = x.new_zeros((x.shape[0], length, *x.shape[2:]), dtype=dtype)
    whole[:, read] = x
    return whole


def _costs(load: AttentionLoad) -> MethodCosts:
    if load.window is not None:
        return _window_costs(load, load.window)
    ranks, sums, operands = load.ranks, load.tokens * load.heads * load.wide, load.queries * load.itemsize
    candidates = []
    # In halves of a shard: queries that leave for another rank, outputs that do, and gradients of keys and values. Rank
    # 0 computes the last queries, which read all keys; from rank 1 on both halves leave, as far as there are ranks.
    first, second = (1, 1, 2 * ranks - 2), (min(2, ranks - 1), min(2, ranks - 1), 2 * ranks - 3)
    keys = (ranks - 1) * load.tokens * load.keys_per_token * load.itemsize
    for queries, outputs, gradients in (first, second):
        forward = keys + (queries + outputs) / 2 * operands + outputs / 2 * sums
        backward = keys + queries / 2 * (3 * operands + sums) + outputs / 2 * load.queries * load.wide
        candidates.append((forward, backward + gradients / 2 * load.tokens * load.keys_per_token * load.wide))
    forward, backward = (max(sent) for sent in zip(*candidates, strict=True))
    # The sums of keys' and values' gradients beside their message or, half as wide, what they come from: keys, values
    # and gradients of the last span. Queries, outputs and their gradients arrive, too, and gradients are joined.
    held = ranks * load.tokens * load.keys_per_token * 2.0 * load.wide + 4.0 * operands
    return MethodCosts(forward, backward, (4, 5), held, hidden=_hidden(load))


def _window_costs(load: AttentionLoad, window: int) -> MethodCosts:
    # Each rank sends keys to ranks after it, and gradients of those of ranks before it back. The rank with the most is
    # about the first that returns all it can.
    ahead, most = window - 1, (load.ranks - 1) * load.tokens
    forward = min(ahead, most) * load.keys_per_token * load.itemsize
    back = (
        min(ahead, (load.ranks - 1 - rank) * load.tokens) + min(ahead, rank * load.tokens)
        for rank in (min(number, load.ranks - 1) for number in (ahead // load.tokens, -(-ahead // load.tokens)))
    )
    # Gradients of all keys, and the message with those of other ranks' keys; the sums are those of the own tokens.
    held = (load.tokens + 2.0 * min(ahead, most)) * load.keys_per_token * load.itemsize
    return MethodCosts(forward, load.keys_per_token * load.itemsize * max(back), (1, 2), held, hidden=_hidden(load))


def _hidden(load: AttentionLoad) -> float:
    return 1 - 1 / num_parts(load.key_heads, 1, load.tokens, load.nodes)


ALL_GATHER = MethodSpec(
    name="all_gather",
    description="every rank gets the keys and values that it needs; queries travel in pairs, so that no rank waits",
    build=AllGather,
    costs=_costs,
)
