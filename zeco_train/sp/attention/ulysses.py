"""Every rank gets some heads of the whole sequence (DeepSpeed-Ulysses), and computes them like one device.

Four all-to-alls: queries, keys and values before, outputs after. All ranks have the same work. There must be a head for
each rank; with fewer heads of keys and values than ranks, those are repeated.

Memory: queries, keys, values and outputs of the whole sequence, of H / P heads: as much as without sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attended import Attended
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Span
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec, ShardedAttention


class Ulysses(ShardedAttention):
    """See the module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, seq_len: int, scale: float) -> Attended:
        """See `zeco_train.ops.seam.AttentionMethod`."""
        spans, whole = self.spans(span, seq_len), Span(0, seq_len, span.borders, span.window)
        k, v = self._repeated(k), self._repeated(v)
        q, k, v = (self._by_heads(x, spans, what) for x, what in ((q, "queries"), (k, "keys"), (v, "values")))
        found = attend(q, k, v, whole, 0, scale)
        o = self._by_tokens(found.o, spans, "outputs")
        return Attended(o, self._by_tokens(found.lse.mT.unsqueeze(-1), spans, "log-sum-exps").squeeze(-1).mT)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, seq_len: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `zeco_train.ops.seam.AttentionMethod`."""
        spans, whole = self.spans(span, seq_len), Span(0, seq_len, span.borders, span.window)
        of_queries = {
            "gradients": do,
            "queries": q,
            "outputs": attended.o,
            "log-sum-exps": attended.lse.mT.unsqueeze(-1),
        }
        do, q, o, lse = (self._by_heads(x, spans, what) for what, x in of_queries.items())
        # One after another, so that no two repeated tensors of this rank's tokens exist at once.
        keys = self._by_heads(self._repeated(k), spans, "keys")
        values = self._by_heads(self._repeated(v), spans, "values")
        grads = attend_backward(do, q, keys, values, Attended(o, lse.squeeze(-1).mT), whole, 0, scale)
        dq, dk, dv = (self._by_tokens(grad, spans, "gradients") for grad in grads)
        return dq, self._summed(dk, k), self._summed(dv, v)

    def _repeated(self, x: Tensor) -> Tensor:
        """[B, T, G, D] with G ≥ P heads: each one as often in a row as needed."""
        repeats = _repeats(x.shape[2], self.wire.size)
        return x if repeats == 1 else x.repeat_interleave(repeats, 2)

    def _summed(self, grad: Tensor, like: Tensor) -> Tensor:
        """The gradient of repeated heads → that of the heads."""
        return grad.to(accumulation_dtype(grad.dtype)).unflatten(2, (like.shape[2], -1)).sum(3)

    def _by_heads(self, x: Tensor, spans: list[Span], what: str) -> Tensor:
        """[B, own tokens, H, D] → [B, all tokens, own heads, D]."""
        size, lengths = self.wire.size, [span.stop - span.start for span in spans]
        batch, tokens, heads, width = x.shape
        per_token = batch * heads // size * width
        parts = x.unflatten(2, (size, -1)).movedim(2, 0).reshape(-1)
        into = x.new_empty(sum(lengths) * per_token)
        counts = [length * per_token for length in lengths]
        self.wire.all_to_all(into, parts, what, counts, [tokens * per_token] * size).wait()
        blocks = into.split(counts)
        shapes = [(batch, length, heads // size, width) for length in lengths]
        return torch.cat([block.view(shape) for block, shape in zip(blocks, shapes, strict=True)], 1)

    def _by_tokens(self, x: Tensor, spans: list[Span], what: str) -> Tensor:
        """[B, all tokens, own heads, D] → [B, own tokens, H, D]."""
        size, lengths = self.wire.size, [span.stop - span.start for span in spans]
        batch, _, heads, width = x.shape
        per_token, own = batch * heads * width, lengths[self.wire.rank]
        parts = torch.cat([part.reshape(-1) for part in x.split(lengths, 1)])
        into = x.new_empty(size * own * per_token)
        sent = [length * per_token for length in lengths]
        self.wire.all_to_all(into, parts, what, [own * per_token] * size, sent).wait()
        return into.view(size, batch, own, heads, width).movedim(0, 2).flatten(2, 3)


def _repeats(key_heads: int, ranks: int) -> int:
    return max(1, ranks // key_heads)


def _heads_problem(heads: int, key_heads: int, ranks: int) -> str | None:
    if heads % ranks:
        return f"needs ranks that divide the {heads} heads of queries, not {ranks}"
    if (key_heads * _repeats(key_heads, ranks)) % ranks:
        return f"needs ranks that divide the {key_heads} heads of keys, or are a multiple of them, not {ranks}"
    return None


def _costs(load: AttentionLoad) -> MethodCosts:
    """Everything but a rank's own part leaves it; the whole sequence of H / P heads has the size of its own tokens."""
    repeated = load.tokens * load.keys_per_token * _repeats(load.key_heads, load.ranks)
    sums, leaving = load.tokens * load.heads * load.wide, 1 - 1 / load.ranks
    forward = (2 * load.queries + repeated) * load.itemsize + sums
    operands = (3 * load.queries + repeated) * load.itemsize
    gradients = (load.queries + repeated) * load.wide
    return MethodCosts(leaving * forward, leaving * (operands + gradients + sums), (5, 9), operands + 2.0 * gradients)


ULYSSES = MethodSpec(
    name="ulysses",
    description="every rank gets some heads of the whole sequence; needs as many heads as ranks",
    build=Ulysses,
    heads_problem=_heads_problem,
    costs=_costs,
)
