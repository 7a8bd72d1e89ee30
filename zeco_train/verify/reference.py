"""The exact results of a sequence over ranks, by the oracle: no code of the backends, methods or kernels takes part.

Of launched ranks each computes its own tokens once it has the state before them; then the gradients, from the last rank
to the first. So peak memory is for one rank's tokens, and the active rank may use all processors.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import ExactTokens, exact_softmax
from zeco_train.verify.whole import SOFTMAX, STATES, Results, Whole


@dataclass(frozen=True)
class SequenceRank:
    """A rank among those that share a sequence. `group` carries CPU tensors; None for one rank."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: ProcessMesh) -> SequenceRank:
        return cls(mesh.sp_rank, mesh.sp_size, mesh.devices.get_group("sp") if mesh.sp_size > 1 else None)

    def stepped_by(self, rank: int, step: Callable[[Tensor], Tensor] | None, state: Tensor) -> Tensor:
        """`step(state)` of one rank, on every rank; the others have no step. Collective."""
        state = torch.empty_like(state) if step is None else step(state).contiguous()
        if self.group is not None:
            dist.broadcast(state, group=self.group, group_src=rank)
        return state


ALONE = SequenceRank()


def exact(
    whole: Whole,
    place: SequenceRank = ALONE,
    parts: Sequence[Results] | None = None,
    ends: Sequence[Tensor] | None = None,
) -> list[Results]:
    """The exact results of this rank's shards in fp64 on the CPU; of all shards for one rank alone. Collective.

    Args:
        whole: shared by all ranks of `place`.
        place: this rank among the sequence's.
        parts: `Whole.part` of its shards, or of some of their heads; None: all heads.
        ends: `Whole.ends` of the same heads.

    Returns:
        o, and the gradients of operands: of a convolution's weight and bias the shard's part. R, D_in: the state before
        the shard, or of the whole sequence for an operator that reads it, and the gradient of the state after it.
        carry_out, dcarry_in: the state after the shard's segment and the gradient of the one before it. Of softmax
        attention o, dq, dk, dv.
    """
    pieces = range(place.rank, whole.num_pieces, place.size)
    if whole.operator == SOFTMAX:
        return _exact_attention(whole, place)
    operator = OPERATORS[whole.operator]
    if operator.reads_whole:
        *names, _ = whole.dims
        do = whole.tensors["do"]
        tokens = ExactTokens(operator, {name: whole.tensors[name] for name in names}, do, scale=whole.scale)
        state = tokens.forward(tokens.zero_state())
        tokens.backward(torch.zeros_like(state))
        return [{"R": state, **piece} for piece in whole.split(tokens.results, whole.num_pieces)]
    shards = {}
    for piece, part in zip(pieces, [whole.part(piece) for piece in pieces] if parts is None else parts, strict=True):
        operands = {name: x.double() for name, x in part.items()}
        do = operands.pop("do")
        starts = [restart - piece * whole.tokens for restart in whole.restarts]
        starts = [start for start in starts if 0 <= start < whole.tokens]
        shards[piece] = ExactTokens(operator, operands, do, starts, whole.scale)
    carry_in, dcarry_out = (x.double() for x in (ends or whole.ends))
    # Before each shard, and after the last; and from the last to the first.
    states, grads = [carry_in], [dcarry_out]
    step: Callable[[Tensor], Tensor] | None
    for piece in range(whole.num_pieces):
        step = shards[piece].forward if piece in shards else None
        states.append(place.stepped_by(piece % place.size, step, states[-1]))
    for piece in reversed(range(whole.num_pieces)):
        step = shards[piece].backward if piece in shards else None
        grads.append(place.stepped_by(piece % place.size, step, grads[-1]))
    results = []
    for piece, shard in shards.items():
        first = piece // whole.ranks * whole.ranks
        results.append(
            {
                **shard.results,
                "R": states[piece],
                "D_in": grads[-2 - piece],
                "carry_out": states[first + whole.ranks],
                "dcarry_in": grads[-1 - first],
            }
        )
    return results


def _exact_attention(whole: Whole, place: SequenceRank) -> list[Results]:
    # Each rank has all keys and computes its own queries; gradients of keys and values are summed over ranks.
    parts = [whole.part(piece) for piece in range(whole.num_pieces)]
    k, v = (torch.cat([part[name] for part in parts], 1) for name in ("k", "v"))
    own = parts[place.rank :: place.size]
    q, do = (torch.cat([part[name] for part in own], 1) for name in ("q", "do"))
    start, borders = place.rank * whole.tokens, torch.tensor(whole.borders)
    results = exact_softmax(q, k, v, do, offset=start, borders=borders, window=whole.window)
    for name in ("dk", "dv"):
        if place.group is not None:
            dist.all_reduce(results[name], group=place.group)
        results[name] = results[name][:, start : start + q.shape[1]]
    return whole.split(results, len(own))


def is_short(whole: Whole) -> bool:
    """Whether every rank can compute the whole sequence in fp64."""
    per_token = whole.batch * whole.heads * whole.key_dim * whole.value_dim
    return whole.seq_len <= 1024 and whole.seq_len * per_token <= 1 << 24


@contextlib.contextmanager
def processors(active: int) -> Iterator[None]:
    """Let this machine's active ranks use all processors; torchrun limits each rank to one."""
    before = torch.get_num_threads()
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(before, number // active))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Expected:
    """The exact results of all shards of a sequence, to compare with.

    Args:
        pieces: as of `exact`, by shard.
        beside: tensors that are small differences of large numbers, so that rounding is relative to a hundredth of the
            largest norm of another tensor, or of their own in any head and shard.
    """

    def __init__(self, pieces: list[Results], beside: Mapping[str, str]) -> None:
        self._pieces, self._beside = pieces, beside
        self._norms = {
            name: torch.stack([_by_head(name, piece[name]).norm(dim=1) for piece in pieces]) for name in pieces[0]
        }

    @classmethod
    def of(cls, whole: Whole, pieces: list[Results]) -> Expected:
        # A query that reads one key has no gradient.
        return cls(pieces, {"dq": "dv", "dk": "dv"} if whole.operator == SOFTMAX else {"dg": "dg"})

    def errors(self, results: Results, piece: int) -> dict[str, tuple[float, int]]:
        """The relative error of each tensor's worst head in a shard, and that head.

        A head's norm counts as at least a thousandth of that in the shard where it is largest.
        """
        errors = {}
        for name, actual in results.items():
            wanted, norms = self._pieces[piece][name], self._norms[name]
            if actual.shape != wanted.shape:
                errors[name] = (math.nan, 0)
                continue
            least = self._norms[self._beside[name]].max() / 1e2 if name in self._beside else norms.amax(0) / 1e3
            off = _by_head(name, actual - wanted).norm(dim=1)
            # An expected 0 must be matched exactly.
            error = torch.where(off == 0, 0.0, off / torch.maximum(norms[piece], least))
            head = int(error.nan_to_num(math.inf).argmax())
            errors[name] = (float(error[head]), head)
        return errors


def _by_head(name: str, x: Tensor) -> Tensor:
    # Gradients of operands without tokens begin with heads or channels.
    dim = 1 if name in STATES else 0 if name == "dweight" or x.ndim < 3 else 2
    return x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x[:, None]
