"""The exact results in float64 on the CPU: the chunked operator, with the state handed serially from rank to rank.

Each rank computes its own tokens, in pieces, once it has the state before them; then the gradients, from the last rank
to the first. So peak memory is that of one rank's tokens, and the active rank may use all processors. No code of the
backends, their scans or the autograd Function is involved. For short sequences this reference is itself checked against
the recurrence, token by token under autograd.
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
from zeco_train.ops import CHUNK
from zeco_train.ops.documents import pieces_between
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.transition import adjoint, fold
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.sequences import Sequence, pieces

# Elements of the boundary states of a piece's chunks: 256 MiB; a piece takes about ten times that.
_PIECE_STATES = 1 << 25
# Elements of all tokens' states, of which the recurrence under autograd keeps several copies.
NAIVE_STATES = 1 << 24


@dataclass(frozen=True)
class Place:
    """A rank among those that share a sequence. `group` carries CPU tensors; None for one rank."""

    rank: int
    size: int
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: ProcessMesh) -> Place:
        """The place of this process."""
        return cls(mesh.sp_rank, mesh.sp_size, mesh.devices.get_group("sp") if mesh.sp_size > 1 else None)

    @property
    def is_last(self) -> bool:
        """Whether the rank has the end of the sequence."""
        return self.rank == self.size - 1


@torch.no_grad()
def exact(
    sequence: Sequence, part: dict[str, Tensor], place: Place, heads: list[int] | None = None
) -> dict[str, Tensor]:
    """This rank's results in fp64 on the CPU. Collective over the ranks of the sequence.

    Args:
        sequence: shared by all ranks of `place`.
        part: `Sequence.part` of this rank; of `heads` only where those are given.
        place: this rank among those of the sequence.
        heads: the heads that `part` holds; None for all.

    Returns:
        o, dq, dk, dv of this rank's tokens, and dg where decays are of tokens; R, D_in: the state before them and the
        gradient of the state after them; with a carry also carry_out and dcarry_in, the same on every rank.
    """
    tokens = _RankTokens(sequence, part, place)
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


class _RankTokens:
    """A rank's tokens in fp64, computed in pieces: once forward, then once backward.

    Attributes:
        results: o, and the gradients of the operands that have tokens, filled by the passes.
    """

    def __init__(self, sequence: Sequence, part: dict[str, Tensor], place: Place) -> None:
        self._sequence, self._inputs = sequence, {name: x.double() for name, x in part.items()}
        start = place.rank * sequence.tokens
        # For its document borders only: nothing is launched.
        shard = sequence.shard(local_exchange(), start, start + sequence.tokens)
        self._restarts = shard.pieces(sequence.tokens, torch.device("cpu"))
        _, num_tokens, _, key_dim = self._inputs["q"].shape
        self._scale = key_dim**-0.5
        self._bounds = pieces(num_tokens, max(1, _PIECE_STATES // self.zero_state().numel()) * CHUNK)
        # In PyTorch, on a CPU.
        self._passes = OPERATORS[sequence.operator].select(sequence.cut(self._inputs, slice(None)))
        # Of each piece, the state before it and its transition.
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.results = {name: torch.empty_like(self._inputs[like]) for name, like in sequence.results.items()}

    def zero_state(self) -> Tensor:
        """[B, H, K, V]."""
        batch, _, num_heads, key_dim = self._inputs["q"].shape
        return torch.zeros(batch, num_heads, key_dim, self._inputs["v"].shape[-1], dtype=torch.float64)

    def forward(self, state: Tensor) -> Tensor:
        """Fill o, given the state before these tokens; the state after them."""
        for a, b in self._bounds:
            operands = self._sequence.cut(self._inputs, slice(a, b))
            forward = self._passes.forward(operands, self._scale, pieces_between(self._restarts, a, b))
            forward.overlap()
            # Enough for the backward pass, which recomputes the states within a piece.
            self._kept.append((state, forward.transition))
            after = fold(forward.state, forward.transition, state)
            self.results["o"][:, a:b] = forward.outputs(state)
            state = after
        return state

    def backward(self, grad: Tensor) -> Tensor:
        """Fill the operands' gradients, given that of the state after these tokens; that of the state before them."""
        for (a, b), (before, transition) in zip(reversed(self._bounds), reversed(self._kept), strict=True):
            operands, do = self._sequence.cut(self._inputs, slice(a, b)), self._inputs["do"][:, a:b]
            between = pieces_between(self._restarts, a, b)
            backward = self._passes.backward(operands, do, (), before, self._scale, between)
            backward.overlap()
            earlier = fold(backward.state_grad, adjoint(transition), grad)
            # The gradient of a constant, which comes last, is not among them.
            for name, piece in zip(self._sequence.operands, backward.operand_grads(grad), strict=False):
                self.results[f"d{name}"][:, a:b] = piece
            grad = earlier
        return grad


def is_short(sequence: Sequence) -> bool:
    """Whether the recurrence under autograd is fast and small enough for the whole sequence."""
    per_token = sequence.batch * sequence.heads * sequence.key_dim * sequence.value_dim
    return sequence.seq_len <= 1024 and sequence.seq_len * per_token <= NAIVE_STATES


def recurrence(sequence: Sequence, place: Place) -> dict[str, Tensor]:
    """The same results as `exact` from the operator's recurrence over the whole sequence, in fp64 on this rank."""
    parts = [sequence.part(rank) for rank in range(sequence.num_ranks)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1).double() for name in parts[0]}
    do = whole.pop("do")
    leaves = [x.requires_grad_() for x in whole.values()]
    recurrent = OPERATORS[sequence.operator].naive
    zero = torch.zeros(*leaves[0].shape[::2], leaves[0].shape[-1], do.shape[-1], dtype=torch.float64)
    carries = {name: state.double() for name, state in sequence.carries().items()}
    carry_in = carries.get("carry_in", zero).clone().requires_grad_()
    # A separate state tensor at each rank's boundary, whose gradient is D_in of the rank before it.
    states, outputs = [carry_in], []
    for start, stop in pieces(sequence.seq_len, sequence.tokens):
        shard = sequence.shard(local_exchange(), start, stop)
        o, after = recurrent(
            *sequence.cut(whole, slice(start, stop)),
            initial_state=states[-1],
            pieces=shard.pieces(stop - start, torch.device("cpu")),
        )
        outputs.append(o)
        states.append(after.clone())
    found = torch.autograd.grad(
        [torch.cat(outputs, dim=1), states[-1]],
        [*leaves, *states],
        [do, carries.get("dcarry_out", zero)],
        # The state before a rank that begins with a new document.
        allow_unused=True,
    )
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip([*leaves, *states], found, strict=True)]
    dstates = grads[len(leaves) :]
    start = place.rank * sequence.tokens
    tokens = dict(zip(sequence.results, [torch.cat(outputs, dim=1).detach(), *grads], strict=False))
    results = {name: x[:, start : start + sequence.tokens] for name, x in tokens.items()}
    results |= {"R": states[place.rank].detach(), "D_in": dstates[place.rank + 1]}
    if sequence.carry:
        results |= {"carry_out": states[-1].detach(), "dcarry_in": dstates[0]}
    return results


def _receive(like: Tensor, place: Place, source: int) -> Tensor:
    received = torch.empty_like(like)
    dist.recv(received, group=place.group, group_src=source)
    return received


def _send(state: Tensor, place: Place, target: int) -> None:
    dist.send(state.contiguous(), group=place.group, group_dst=target)


def _from(state: Tensor, place: Place, source: int) -> Tensor:
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
