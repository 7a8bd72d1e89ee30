"""The runs to verify, over the ranks of a sequence, and the runs to compare with, on one device.

And more than 2³¹ elements in the values and in the chunk states, where 32-bit offsets overflow, on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import CHUNK, accumulation_dtype
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.ops.seam import Exchange, ScanRequest, StateScan
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended
from zeco_train.sp.backend import TappedScan
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.config import VerifyConfig
from zeco_train.verify.reference import SequenceRank, exact
from zeco_train.verify.report import Deviation, deviations
from zeco_train.verify.sequences import AttentionSequence, RankedSequence, Sequence, decay_rates, pieces

# First cut of the sequence in the second run on one device: not a multiple of a chunk.
ODD_PLACE = 37
# Runs of softmax attention on one device, by the queries of a piece.
IN_SHARDS, IN_HALVES = "one device, in shards", "one device, in halves"


# Records the incoming state `R` and the incoming gradient `D_in`.
class _RecordingScan(TappedScan):
    def __init__(self, scan: StateScan, into: dict[str, Tensor]) -> None:
        super().__init__(scan)
        self._into = into

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        self._into["D_in" if request.reverse else "R"] = state.clone()
        return state


def _recording(exchange: Exchange, into: dict[str, Tensor]) -> Exchange:
    return exchange.wrapped(lambda scan: _RecordingScan(scan, into))


def run_backend(sequence: Sequence, part: dict[str, Tensor], exchange: Exchange, rank: int) -> dict[str, Tensor]:
    """Forward and backward of a rank's tokens by a backend; results as of `exact`. Collective over the ranks."""
    received: dict[str, Tensor] = {}
    recording = _recording(exchange, received)
    bounds = range(0, sequence.seq_len + 1, sequence.tokens)
    results = _forward_backward(sequence, part, [sequence.position(recording, bounds, rank)])
    return results | received


def run_method(
    sequence: AttentionSequence, part: Mapping[str, Tensor], exchange: Exchange, rank: int
) -> dict[str, Tensor]:
    """The same by a method of softmax attention; results as of `exact_attention`."""
    q, k, v = (part[name].detach().requires_grad_() for name in ("q", "k", "v"))
    documents = [sequence.borders] if sequence.documents else None
    bounds = even_bounds(sequence.seq_len, sequence.seq_len // q.shape[1])
    position = SequencePosition(bounds, rank, documents=documents, exchange=exchange)
    o, _ = attend_at(q, k, v, sequence.scale, position, [StateInput()] * 2, sequence.window)
    grads = torch.autograd.grad(o, (q, k, v), part["do"])
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))


def run_one_device(
    sequence: Sequence | AttentionSequence, part: dict[str, Tensor], place: SequenceRank
) -> dict[str, dict[str, Tensor]]:
    """The whole sequence on this rank's device, at once and then in pieces, so that the grouping of sums differs.

    Collective: the ranks' tokens are all-gathered.

    Returns:
        By the name of the run, results as of `run_backend` of this rank's tokens, without R and D_in.
    """
    whole, length = {name: gather_tokens(x, place) for name, x in part.items()}, sequence.seq_len

    def own(results: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _own(name, x, place.rank * sequence.tokens, sequence) for name, x in results.items()}

    if isinstance(sequence, AttentionSequence):
        runs = {"one device": own(run_method(sequence, whole, local_exchange(), 0))}
        if place.size > 1:
            runs[IN_SHARDS] = own(_in_pieces(sequence, whole, 1))
            if sequence.window is None:
                runs[IN_HALVES] = own(_in_pieces(sequence, whole, 2))
        return runs
    runs, odd = {}, [0, *range(min(ODD_PLACE, sequence.tokens // 2), length, sequence.tokens), length]
    for name, borders in (("one device", [0, length]), ("one device, cut oddly", odd)):
        shards = [sequence.position(local_exchange(), bounds) for bounds in itertools.pairwise(borders)]
        runs[name] = own(_forward_backward(sequence, whole, shards))
    return runs


def run_in_float64(sequence: Sequence, part: dict[str, Tensor], place: SequenceRank) -> dict[str, Tensor]:
    """The operator's passes in fp64 on the CPU, rank by rank: a second way to the exact results. Collective."""
    whole = {name: gather_tokens(x.double(), place) for name, x in part.items()}
    received: list[dict[str, Tensor]] = [{} for _ in range(place.size)]
    starts = range(0, sequence.seq_len + 1, sequence.tokens)
    shards = [
        sequence.position(_recording(local_exchange(), own), bounds)
        for own, bounds in zip(received, itertools.pairwise(starts), strict=True)
    ]
    results = _forward_backward(sequence, whole, shards)
    own = {name: _own(name, x, place.rank * sequence.tokens, sequence) for name, x in results.items()}
    return own | received[place.rank]


def _in_pieces(sequence: AttentionSequence, tokens: Mapping[str, Tensor], parts_of_shard: int) -> dict[str, Tensor]:
    """The queries of each part of a shard with the keys of one shard after the other, its own first.

    Not at odd places: outputs and gradients of a part are rounded before they are summed, which is most of the noise,
    and with documents the number of a query's parts depends on where the cuts are.
    """
    q, k, v, do = (tokens[name] for name in ("q", "k", "v", "do"))
    wide = accumulation_dtype(q.dtype)
    results = {name: torch.zeros_like(x, dtype=wide) for name, x in (("o", do), ("dq", q), ("dk", k), ("dv", v))}
    shards = pieces(sequence.seq_len, sequence.tokens)
    size = -(-sequence.tokens // parts_of_shard)
    for a, b in ((start + a, start + b) for start, _ in shards for a, b in pieces(sequence.tokens, size)):
        span, earlier = sequence.span(a, b), [(c, min(b, d)) for c, d in reversed(shards) if c < b]
        parts = [attend(q[:, a:b], k[:, c:d], v[:, c:d], span, c, sequence.scale) for c, d in earlier]
        lse = torch.stack([part.lse for part in parts]).logsumexp(0)
        for part in parts:
            results["o"][:, a:b] += part.o.to(wide) * (part.lse - lse).exp().mT.unsqueeze(-1)
        merged = Attended(results["o"][:, a:b].to(q.dtype), lse)
        for c, d in earlier:
            grads = attend_backward(do[:, a:b], q[:, a:b], k[:, c:d], v[:, c:d], merged, span, c, sequence.scale)
            for name, (first, last), grad in zip(("dq", "dk", "dv"), ((a, b), (c, d), (c, d)), grads, strict=True):
                results[name][:, first:last] += grad
    return {name: x.to(q.dtype) for name, x in results.items()}


def _own(name: str, x: Tensor, start: int, sequence: RankedSequence) -> Tensor:
    # A copy, so that the whole tensor can be freed.
    if name in ("carry_out", "dcarry_in") or sequence.num_ranks == 1:
        return x
    return x[:, start : start + sequence.tokens].clone()


def _forward_backward(
    sequence: Sequence, tokens: dict[str, Tensor], shards: list[SequencePosition]
) -> dict[str, Tensor]:
    # One pass over tokens, cut into shards that pass their state on in autograd's graph.
    device, dtype = tokens["do"].device, accumulation_dtype(tokens["do"].dtype)
    carries = {name: state.to(device, dtype) for name, state in sequence.carries().items()}
    carry_in = carries["carry_in"].requires_grad_() if sequence.carry else None
    first, stops = shards[0].start, [*(shard.start for shard in shards[1:]), None]
    leaves: list[Tensor] = []
    outputs: list[Tensor] = []
    state = carry_in
    for shard, stop in zip(shards, stops, strict=True):
        cut = slice(shard.start - first, None if stop is None else stop - first)
        own = {name: tokens[name][:, cut].detach().requires_grad_() for name in sequence.operands}
        operands = sequence.complete(own)
        # Every shard but the last passes its state on.
        o, state = mix(
            sequence.operator, operands, shard, carry_in=state, want_carry=sequence.carry or stop is not None
        )
        leaves += own.values()
        outputs.append(o)
    grads = list(tokens["do"].split([o.shape[1] for o in outputs], dim=1))
    ends = [] if not sequence.carry or state is None else [state]
    found = torch.autograd.grad(
        [*outputs, *ends],
        [*leaves, *([] if carry_in is None else [carry_in])],
        [*grads, *(carries["dcarry_out"] for _ in ends)],
    )
    results = {"o": _joined([o.detach() for o in outputs])}
    # Leaves are in the operator's order of the first shard, then of the next.
    count = len(sequence.operands)
    for index, name in enumerate(sequence.operands):
        results[f"d{name}"] = _joined(found[index : count * len(shards) : count])
    if ends:
        results |= {"carry_out": ends[0].detach(), "dcarry_in": found[-1]}
    return results


def _joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    # A single part is not copied: it may take half of the memory.
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def gather_tokens(part: Tensor, place: SequenceRank) -> Tensor:
    """All-gather the tokens of the sequence, [B, T, H, D] → [B, P·T, H, D]."""
    if place.size == 1:
        return part
    assert place.group is not None
    # As bytes, which all process groups support.
    own = part.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(place.size)]
    dist.all_gather(parts, own, group=place.group)
    return torch.cat(parts, dim=1).view(part.dtype)


_TOKENS = 1 << 16
_ELEMENTS = 1 << 31


def huge_sequence(config: VerifyConfig, dtype: torch.dtype, name: str, elements: int = _ELEMENTS) -> Sequence:
    """A sequence on one rank whose values, and states at chunk boundaries, have more than `elements` elements."""
    # The chunk states have K / CHUNK times as many elements as the values: with K ≥ CHUNK both are large enough.
    key_dim, value_dim = max(config.key_dim, CHUNK), config.value_dim
    heads = elements // (_TOKENS * value_dim) + 1
    return Sequence(name, _TOKENS, 1, 1, heads, key_dim, value_dim, dtype, documents=False, carry=True)


def huge_deviations(sequence: Sequence, device: torch.device) -> dict[str, Deviation]:
    """Forward and backward of all heads; deviations of the first, the middle and the last one."""
    part = _part(sequence, device)
    results = run_backend(sequence, part, local_exchange(), 0)
    heads = sorted({0, sequence.heads // 2, sequence.heads - 1})
    chosen = {name: x[:, :, heads].cpu() for name, x in part.items()}
    expected = exact(sequence, chosen, SequenceRank(0, 1), heads)
    actual = {name: x[:, heads] if name in _STATES else x[:, :, heads] for name, x in results.items()}
    return deviations({name: x.cpu() for name, x in actual.items()}, expected)


_STATES = ("R", "D_in", "carry_out", "dcarry_in")


def _part(sequence: Sequence, device: torch.device) -> dict[str, Tensor]:
    # As of `Sequence.part`, but created on the device, a few tokens at a time.
    generator = torch.Generator(device).manual_seed(sum(sequence.name.encode()))
    shape = (1, sequence.tokens, sequence.heads)
    dims = {"q": sequence.key_dim, "k": sequence.key_dim, "v": sequence.value_dim, "do": sequence.value_dim}
    part = {name: torch.empty(*shape, dim, dtype=sequence.dtype, device=device) for name, dim in dims.items()}
    part["g"] = torch.empty(*shape, sequence.key_dim, device=device)
    rates = decay_rates(sequence.heads, sequence.key_dim).to(device)
    for start, stop in pieces(sequence.tokens, 4096):
        for name, x in part.items():
            piece = x[:, start:stop]
            random = torch.randn(piece.shape, generator=generator, device=device)
            piece.copy_(F.logsigmoid(random) * rates if name == "g" else random)
    return {name: part[name] for name in ("q", "k", "v", "g", "do")}
