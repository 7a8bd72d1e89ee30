"""The runs to verify, a backend over the ranks of a sequence, and the runs to compare with, one device twice."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange, ScanRequest, StateScan
from zeco_train.sp.backend import TappedScan
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.reference import SequenceRank
from zeco_train.verify.sequences import Sequence

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
