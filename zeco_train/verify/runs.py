"""The runs to verify, over the ranks of a sequence, and the runs to compare with, on one device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange, ScanRequest, StateScan
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended
from zeco_train.sp.backend import TappedScan
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.reference import SequenceRank
from zeco_train.verify.whole import CONSTANTS, SOFTMAX, STATES, Results, Whole

# First cut of the sequence in the second run on one device: not a multiple of a chunk.
ODD_PLACE = 37
# Runs of softmax attention on one device, by the queries of a piece.
IN_SHARDS, IN_HALVES = "one device, in shards", "one device, in halves"


class Pass:
    """A forward pass of some tokens, and its backward pass.

    Args:
        whole: the sequence.
        part: the tokens, as `Whole.part`.
        position: of them, with the exchange over the ranks.
        incoming: what an earlier pass `received`, to be replayed.
        carry_in: the state before the tokens' segment; None: that of the sequence, if it has one.
        want_carry: the state after the segment is wanted; None: if the sequence has one.

    Attributes:
        results: as of `exact`, those that are known.
        carry_out: the state after the segment, if it is wanted.
    """

    def __init__(
        self,
        whole: Whole,
        part: Results,
        position: SequencePosition,
        *,
        incoming: Sequence[Tensor] = (),
        carry_in: Tensor | None = None,
        want_carry: bool | None = None,
    ) -> None:
        # The op keeps only a handle of the position's exchange.
        self._whole, self._do, self._position = whole, part["do"], position
        self._leaves = {
            name: x.detach().requires_grad_(name not in CONSTANTS) for name, x in part.items() if name != "do"
        }
        operands = [*self._leaves.values()]
        self._carry_in = self.carry_out = None
        if whole.operator == SOFTMAX:
            q, k, v = operands
            state_inputs = [StateInput(x) for x in incoming] or [StateInput()] * 2
            self._o, state_outputs = attend_at(q, k, v, whole.key_dim**-0.5, position, state_inputs, whole.window)
            self.results: Results = {"o": self._o.detach()}
            self.received = [state_output.received.clone() for state_output in state_outputs]
            return
        if carry_in is None and whole.carry:
            carry_in = self._end(0)
        self._carry_in = None if carry_in is None else carry_in.detach().clone().requires_grad_()
        want_carry = whole.carry if want_carry is None else want_carry
        scale = OPERATORS[whole.operator].scale_of(operands, whole.scale)
        state_input = StateInput(incoming[0] if incoming else None, self._carry_in, want_carry)
        self._o, state_output = mix_at(whole.operator, operands, scale, position.on(operands[0]), state_input)
        self.results = {"o": self._o.detach()}
        self.received, self.carry_out = [state_output.received], state_output.carry_out if want_carry else None
        if not incoming:
            self.results["R"] = state_output.received
            if self.carry_out is not None:
                self.results["carry_out"] = self.carry_out.detach()

    def backward(self, dcarry_out: Tensor | None = None) -> Results:
        """The results with the gradients; `dcarry_out` is of a wanted `carry_out`, None: that of the sequence."""
        leaves = {name: x for name, x in self._leaves.items() if x.requires_grad}
        outputs, grads = [self._o], [self._do]
        if self.carry_out is not None:
            outputs.append(self.carry_out)
            grads.append(self._end(1) if dcarry_out is None else dcarry_out)
        inputs = [*leaves.values()] + ([] if self._carry_in is None else [self._carry_in])
        found = torch.autograd.grad(outputs, inputs, grads)
        self.results |= dict(zip([*(f"d{name}" for name in leaves), "dcarry_in"], found, strict=False))
        return self.results

    def _end(self, index: int) -> Tensor:
        return self._whole.ends[index].to(self._do.device, accumulation_dtype(self._do.dtype))


# Records the incoming state `R` and the incoming gradient `D_in`.
class _RecordingScan(TappedScan):
    def __init__(self, scan: StateScan, into: Results) -> None:
        super().__init__(scan)
        self._into = into

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        self._into["D_in" if request.reverse else "R"] = state.clone()
        return state


def _recording(exchange: Exchange, into: Results) -> Exchange:
    return exchange.wrapped(lambda scan: _RecordingScan(scan, into))


def run_on_ranks(whole: Whole, part: Results, exchange: Exchange, rank: int) -> Results:
    """Forward and backward of a rank's tokens by a backend or method; as of `exact`. Collective over the ranks."""
    received: Results = {}
    return Pass(whole, part, whole.position(_recording(exchange, received), rank)).backward() | received


def run_one_device(whole: Whole, part: Results, place: SequenceRank) -> dict[str, Results]:
    """The whole sequence on this rank's device, at once and then in pieces, so that the grouping of sums differs.

    Collective: the ranks' tokens are all-gathered.

    Returns:
        By the name of the run, results as of `run_on_ranks` of this rank's tokens, without R and D_in.
    """
    tokens, length = _gathered(part, place), whole.seq_len
    odd = [0, *range(min(ODD_PLACE, whole.tokens // 2), length, whole.tokens), length]
    runs = {"one device": _own(_in_series(whole, tokens, [0, length]), whole, place)}
    if whole.operator != SOFTMAX:
        runs["one device, cut oddly"] = _own(_in_series(whole, tokens, odd), whole, place)
    elif place.size > 1:
        runs[IN_SHARDS] = _own(_in_pieces(whole, tokens, 1), whole, place)
        if whole.window is None:
            runs[IN_HALVES] = _own(_in_pieces(whole, tokens, 2), whole, place)
    return runs


def run_in_float64(whole: Whole, part: Results, place: SequenceRank) -> Results:
    """The operator's passes in fp64 on the CPU, rank by rank: a second way to the exact results. Collective."""
    tokens = _gathered({name: x.double() for name, x in part.items()}, place)
    received: list[Results] = [{} for _ in range(place.size)]
    exchanges = [_recording(local_exchange(), own) for own in received]
    results = _in_series(whole, tokens, range(0, whole.seq_len + 1, whole.tokens), exchanges)
    return _own(results, whole, place) | received[place.rank]


def _in_series(
    whole: Whole, tokens: Results, borders: Sequence[int], exchanges: Sequence[Exchange] | None = None
) -> Results:
    # The tokens between two borders after those before them, whose state they get; all on one device.
    exchanges = exchanges or [local_exchange() for _ in borders[1:]]
    passes: list[Pass] = []
    for (start, stop), exchange in zip(itertools.pairwise(borders), exchanges, strict=True):
        part = {name: x if name in CONSTANTS else x[:, start:stop] for name, x in tokens.items()}
        position, state = whole.position_in(exchange, (start, stop)), passes[-1].carry_out if passes else None
        want_carry = whole.carry or stop != borders[-1]
        passes.append(Pass(whole, part, position, carry_in=state, want_carry=want_carry))
    dcarry = None
    for each in reversed(passes):
        dcarry = each.backward(dcarry).get("dcarry_in")
    first, last = passes[0].results, passes[-1].results
    # A single part is not copied: it may take half of the memory.
    joined = {
        name: x if len(passes) == 1 else torch.cat([each.results[name] for each in passes], 1)
        for name, x in first.items()
        if name not in STATES
    }
    return joined | ({"carry_out": last["carry_out"], "dcarry_in": first["dcarry_in"]} if whole.carry else {})


def _in_pieces(whole: Whole, tokens: Mapping[str, Tensor], parts_of_shard: int) -> Results:
    # The queries of each part of a shard with the keys of one shard after the other, its own first. Not at odd places:
    # outputs and gradients of a part are rounded before they are summed, which is most of the noise, and with documents
    # the number of a query's parts depends on where the cuts are.
    q, k, v, do = (tokens[name] for name in ("q", "k", "v", "do"))
    wide, scale = accumulation_dtype(q.dtype), whole.key_dim**-0.5
    results = {name: torch.zeros_like(x, dtype=wide) for name, x in (("o", do), ("dq", q), ("dk", k), ("dv", v))}
    shards = pieces(whole.seq_len, whole.tokens)
    size = -(-whole.tokens // parts_of_shard)
    for a, b in ((start + a, start + b) for start, _ in shards for a, b in pieces(whole.tokens, size)):
        span, earlier = whole.span(a, b), [(c, min(b, d)) for c, d in reversed(shards) if c < b]
        parts = [attend(q[:, a:b], k[:, c:d], v[:, c:d], span, c, scale) for c, d in earlier]
        lse = torch.stack([part.lse for part in parts]).logsumexp(0)
        for part in parts:
            results["o"][:, a:b] += part.o.to(wide) * (part.lse - lse).exp().mT.unsqueeze(-1)
        merged = Attended(results["o"][:, a:b].to(q.dtype), lse)
        for c, d in earlier:
            grads = attend_backward(do[:, a:b], q[:, a:b], k[:, c:d], v[:, c:d], merged, span, c, scale)
            for name, (first, last), grad in zip(("dq", "dk", "dv"), ((a, b), (c, d), (c, d)), grads, strict=True):
                results[name][:, first:last] += grad
    return {name: x.to(q.dtype) for name, x in results.items()}


def _own(results: Results, whole: Whole, place: SequenceRank) -> Results:
    # This rank's tokens: copies, so that the whole tensors can be freed.
    start, stop = place.rank * whole.tokens, (place.rank + 1) * whole.tokens
    if place.size == 1:
        return results
    return {name: x if name in STATES else x[:, start:stop].clone() for name, x in results.items()}


def _gathered(part: Results, place: SequenceRank) -> Results:
    # The tokens of all ranks.
    found = {}
    for name, x in part.items():
        found[name] = x
        if place.group is not None and name not in CONSTANTS:
            # As bytes, which all process groups support.
            own = x.contiguous().view(torch.uint8)
            parts = [torch.empty_like(own) for _ in range(place.size)]
            dist.all_gather(parts, own, group=place.group)
            found[name] = torch.cat(parts, dim=1).view(x.dtype)
    return found


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    """Split [0, length) into pieces of `size`, the last one shorter."""
    return list(itertools.pairwise([*range(0, length, size), length]))
