"""The exact results of a sequence over ranks, by the oracle: no code of the backends, methods or kernels takes part.

Each rank computes its own tokens once it has the state before them; then the gradients, from the last rank to the
first. So peak memory is that of one rank's tokens, and the active rank may use all processors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import ExactTokens, exact_softmax
from zeco_train.verify.sequences import AttentionSequence, Sequence


@dataclass(frozen=True)
class SequenceRank:
    """A rank among those that share a sequence. `group` carries CPU tensors; None for one rank."""

    rank: int
    size: int
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: ProcessMesh) -> SequenceRank:
        return cls(mesh.sp_rank, mesh.sp_size, mesh.devices.get_group("sp") if mesh.sp_size > 1 else None)

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def exact(
    sequence: Sequence, part: dict[str, Tensor], place: SequenceRank, heads: list[int] | None = None
) -> dict[str, Tensor]:
    """This rank's results in fp64 on the CPU. Collective over the ranks of the sequence.

    Args:
        sequence: shared by all ranks of `place`.
        part: `Sequence.part` of this rank.
        place: this rank among those of the sequence.
        heads: those that `part` holds; None: all.

    Returns:
        o, dq, dk, dv of this rank's tokens, and dg where decays are of tokens; R, D_in: the state before them and the
        gradient of the state after them; with a carry also carry_out and dcarry_in, the same on every rank.
    """
    operator, start = OPERATORS[sequence.operator], place.rank * sequence.tokens
    wide = {name: x.double() for name, x in part.items()}
    operands = dict(zip(operator.operands, sequence.complete(wide), strict=True))
    starts = [restart - start for restart in sequence.restarts if start <= restart < start + sequence.tokens]
    tokens = ExactTokens(operator, operands, wide["do"], starts)
    chosen = slice(None) if heads is None else heads
    carries = {name: state[:, chosen].double() for name, state in sequence.carries().items()}
    zero, results = tokens.zero_state(), tokens.results

    state = carries.get("carry_in", zero) if place.rank == 0 else _receive(zero, place, place.rank - 1)
    results["R"] = state
    # One rank of each sequence is active.
    active = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // place.size)
    with processors(active):
        state = tokens.forward(state)
    if not place.is_last:
        _send(state, place, place.rank + 1)

    grad = carries.get("dcarry_out", zero) if place.is_last else _receive(zero, place, place.rank + 1)
    results["D_in"] = grad
    with processors(active):
        grad = tokens.backward(grad)
    if place.rank > 0:
        _send(grad, place, place.rank - 1)
    if sequence.carry:
        results["carry_out"] = _from(state, place, place.size - 1)
        results["dcarry_in"] = _from(grad, place, 0)
    return results


def exact_attention(sequence: AttentionSequence, place: SequenceRank) -> dict[str, Tensor]:
    """o, dq, dk and dv of this rank's tokens, in fp64 on the CPU. Collective over the ranks of the sequence.

    Each rank has all keys and computes its own queries; gradients of keys and values are summed over ranks.
    """
    parts = [sequence.part(rank) for rank in range(sequence.num_ranks)]
    k, v = (torch.cat([part[name] for part in parts], 1) for name in ("k", "v"))
    q, do = (parts[place.rank][name] for name in ("q", "do"))
    own, borders = place.rank * sequence.tokens, sequence.span(0, sequence.seq_len).borders
    with processors(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        results = exact_softmax(q, k, v, do, offset=own, borders=borders, window=sequence.window)
    for name in ("dk", "dv"):
        if place.group is not None:
            dist.all_reduce(results[name], group=place.group)
        results[name] = results[name][:, own : own + sequence.tokens]
    return results


def is_short(sequence: Sequence) -> bool:
    """Whether every rank can compute the whole sequence in fp64."""
    per_token = sequence.batch * sequence.heads * sequence.key_dim * sequence.value_dim
    return sequence.seq_len <= 1024 and sequence.seq_len * per_token <= 1 << 24


def _receive(like: Tensor, place: SequenceRank, source: int) -> Tensor:
    received = torch.empty_like(like)
    dist.recv(received, group=place.group, group_src=source)
    return received


def _send(state: Tensor, place: SequenceRank, target: int) -> None:
    dist.send(state.contiguous(), group=place.group, group_dst=target)


def _from(state: Tensor, place: SequenceRank, source: int) -> Tensor:
    """Broadcast that rank's state to every rank."""
    state = state.clone()
    if place.size > 1:
        dist.broadcast(state, group=place.group, group_src=source)
    return state


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
