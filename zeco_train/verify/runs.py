"""The runs to verify, a backend over the ranks of a sequence, and the runs to compare with, one device twice.

More than 2³¹ elements in the values and in the chunk states, where 32-bit offsets overflow, on one device.

Heads are independent, so only a few of them are compared with float64 over all tokens: the first, the middle and the
last one, whose last tokens have the largest offsets.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import CHUNK, accumulation_dtype
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange, ScanRequest, StateScan
from zeco_train.sp.backend import TappedScan
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.config import VerifyConfig
from zeco_train.verify.reference import SequenceRank, exact
from zeco_train.verify.report import Deviation, deviations
from zeco_train.verify.sequences import Sequence, decay_rates, pieces

# First cut of the sequence in the second run on one device: not a multiple of a chunk.
ODD_PLACE = 37


class RecordingScan(TappedScan):
    """A scan that records its incoming state `R` and incoming gradient `D_in`, by name.

    Args:
        scan: that is recorded.
        into: the record.
    """

    def __init__(self, scan: StateScan, into: dict[str, Tensor]) -> None:
        super().__init__(scan)
        self._into = into

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        """See `TappedScan`."""
        self._into["D_in" if request.reverse else "R"] = state.clone()
        return state


def _recording(exchange: Exchange, into: dict[str, Tensor]) -> Exchange:
    return exchange.wrapped(lambda scan: RecordingScan(scan, into))


def run_backend(
    sequence: Sequence, part: dict[str, Tensor], exchange: Exchange, place: SequenceRank
) -> dict[str, Tensor]:
    """Forward and backward of this rank's tokens by a backend. Collective over the ranks of the sequence.

    Returns:
        The tensors of `zeco_train.verify.reference.exact`, on the device of `part`.
    """
    received: dict[str, Tensor] = {}
    recording = _recording(exchange, received)
    bounds = range(0, sequence.seq_len + 1, sequence.tokens)
    results = _forward_backward(sequence, part, [sequence.position(recording, bounds, place.rank)])
    return results | received


def run_one_device(sequence: Sequence, part: dict[str, Tensor], place: SequenceRank) -> dict[str, dict[str, Tensor]]:
    """The whole sequence on this rank's device, twice: in one piece, and cut into one piece more than there are ranks.

    The cuts are at odd positions where neither a chunk nor a rank begins, so both the chunks and the grouping of sums
    differ.

    Collective: the ranks' tokens are all-gathered. Results as of `run_backend`, of this rank's tokens, without R and
    D_in, by the name of the run.
    """
    whole = {name: gather_tokens(x, place) for name, x in part.items()}
    length, start = sequence.seq_len, place.rank * sequence.tokens
    odd = [0, *range(min(ODD_PLACE, sequence.tokens // 2), length, sequence.tokens), length]
    runs = {}
    for run, borders in (("one device", [0, length]), ("one device, cut oddly", odd)):
        shards = [sequence.position(local_exchange(), bounds) for bounds in itertools.pairwise(borders)]
        results = _forward_backward(sequence, whole, shards)
        runs[run] = {name: _own(name, x, start, sequence) for name, x in results.items()}
    return runs


def run_in_float64(sequence: Sequence, part: dict[str, Tensor], place: SequenceRank) -> dict[str, Tensor]:
    """The operator's passes in fp64 on the CPU, rank by rank: two ways to the exact results, which must agree.

    Collective: the ranks' tokens are all-gathered. Results as of `run_backend`, of this rank's tokens.
    """
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


def _own(name: str, x: Tensor, start: int, sequence: Sequence) -> Tensor:
    """This rank's part of a result; a copy, so that the whole tensor can be freed."""
    if name in ("carry_out", "dcarry_in") or sequence.num_ranks == 1:
        return x
    return x[:, start : start + sequence.tokens].clone()


def _forward_backward(
    sequence: Sequence, tokens: dict[str, Tensor], shards: list[SequencePosition]
) -> dict[str, Tensor]:
    """One pass over tokens, cut into shards that pass their state on in autograd's graph."""
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
        operands = sequence.cut(own, slice(None))
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
    """Forward and backward of all heads; deviations of some of them."""
    part = _part(sequence, device)
    results = run_backend(sequence, part, local_exchange(), SequenceRank(0, 1))
    heads = sorted({0, sequence.heads // 2, sequence.heads - 1})
    chosen = {name: x[:, :, heads].cpu() for name, x in part.items()}
    expected = exact(sequence, chosen, SequenceRank(0, 1), heads)
    actual = {name: x[:, heads] if name in _STATES else x[:, :, heads] for name, x in results.items()}
    return deviations({name: x.cpu() for name, x in actual.items()}, expected)


_STATES = ("R", "D_in", "carry_out", "dcarry_in")


def _part(sequence: Sequence, device: torch.device) -> dict[str, Tensor]:
    """q, k, v, g, do as of `Sequence.part`, but created on the device, a few tokens at a time."""
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
