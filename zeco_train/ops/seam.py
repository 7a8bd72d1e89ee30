"""The seam between models and communication (docs/architecture.md).

A sequence-parallel backend (`zeco_train.sp`) is one exclusive scan over the ranks that share a sequence. Each rank
contributes the pair `(state, transition)` of its own tokens, from a zero start, and receives the state before them:

    R_0 = carry_in,    R_{p+1} = A_p R_p + state_p

A is the *transition* of a rank's tokens, of one of two kinds, known only to `fold` and the functions after it:

    [B, H, K]      log-decays: A = Diag(exp(transition)); −inf is a decay of 0. Gated linear attention and similar.
    [B, H, K, K]   matrices: A = transition; a zero matrix cuts the incoming state off. The delta rule and similar.

In reverse the scan runs from the last rank to the first, over gradients of states. Backends hold no autograd state.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeco_train.ops.softmax.span import Attended, AttendedHeads, Span


def is_matrix(transition: Tensor) -> bool:
    """Whether a transition consists of matrices, [B, H, K, K], rather than log-decays, [B, H, K]."""
    return transition.ndim == 4


def fold(state: Tensor, transition: Tensor, incoming: Tensor) -> Tensor:
    """The state after a shard, `A incoming + state`, a new tensor; never NaN for a finite `incoming`."""
    if not is_matrix(transition):
        return torch.addcmul(state, transition.exp().unsqueeze(-1), incoming)
    return torch.baddbmm(*(x.flatten(0, 1) for x in (state, transition, incoming))).view(state.shape)


def compose(later: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two neighbouring shards, (state, transition) each, as one, with the `fold` of the earlier and then the later."""
    (state, transition), (earlier_state, earlier_transition) = later, earlier
    joined = transition @ earlier_transition if is_matrix(transition) else transition + earlier_transition
    return fold(state, transition, earlier_state), joined


def adjoint(transition: Tensor) -> Tensor:
    """Aᵀ, a view: the transition of a reverse scan, over gradients with respect to states."""
    return transition.mT if is_matrix(transition) else transition


def cut(transition: Tensor, heads: Tensor) -> Tensor:
    """The transitions of some heads […, N] as rows of K numbers, to be sent along with columns of states.

    [B, H, K] → [B, …, N, K], [B, H, K, K] → [B, …, N · K, K]; `join` is the inverse.
    """
    rows = transition[:, heads]
    return rows.flatten(-3, -2) if is_matrix(transition) else rows


def join(rows: Tensor, like: Tensor) -> Tensor:
    """Inverse of `cut`: transitions of the kind of `like`, [B, N, K] or [B, N, K, K]."""
    return rows.unflatten(-2, (-1, rows.shape[-1])) if is_matrix(like) else rows


def as_columns(transition: Tensor) -> Tensor:
    """A transition as columns of K numbers, to be sent along with those of a state: [B, H, K, 1] or [B, H, K, K]."""
    return transition if is_matrix(transition) else transition.unsqueeze(-1)


def from_columns(columns: Tensor, like: Tensor) -> Tensor:
    """Inverse of `as_columns`: a transition of the kind of `like`."""
    return columns if is_matrix(like) else columns.squeeze(-1)


@dataclass(frozen=True, eq=False)
class ScanRequest:
    """One rank's input to a scan; a ValueError names what does not fit."""

    state: Tensor  # [B, H, K, V], fp32 (fp64 for fp64 inputs): this rank's contribution from a zero start
    # In the dtype of the state; all ranks' are of one kind. A reverse scan takes the `adjoint` of the forward scan's.
    transition: Tensor
    reverse: bool = False  # from the last rank to the first
    # [B, H, K, V], a replicated value that only the first rank in scan direction reads; None is zero.
    carry_in: Tensor | None = None
    want_carry: bool = False  # `carry_out` will be called; all ranks agree
    # The host knows, without reading the transition, that it is 0: a scan between neighbours then sends at once. Ranks
    # may differ in it.
    cuts: bool = False

    def __post_init__(self) -> None:
        state, transition, carry_in = self.state, self.transition, self.carry_in
        if state.ndim != 4 or state.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"state must be [B, H, K, V] in float32 or float64, not {_describe(state)}")
        wanted = (state.dtype, state.device)
        shapes = state.shape[:3], (*state.shape[:3], state.shape[2])
        if transition.shape not in shapes or (transition.dtype, transition.device) != wanted:
            problem = f"like the state, {_describe(state)}, not {_describe(transition)}"
            raise ValueError(f"transition must be [B, H, K] or [B, H, K, K] {problem}")
        if carry_in is not None and (carry_in.shape != state.shape or (carry_in.dtype, carry_in.device) != wanted):
            raise ValueError(f"carry_in must be like the state, {_describe(state)}, not {_describe(carry_in)}")

    def first_incoming(self) -> Tensor:
        """The incoming state of the first rank in scan direction, R_0: `carry_in` itself, or zeros."""
        return torch.zeros_like(self.state) if self.carry_in is None else self.carry_in


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


class LaunchedScan(Protocol):
    """A scan in flight. Call `wait`, `finish`, `carry_out` in this order."""

    def wait(self) -> Tensor:
        """The incoming state R_p (in reverse: D_in = D_{p+1}), [B, H, K, V], in the dtype of the state."""

    def finish(self) -> None:
        """Call after computing the outputs that use the incoming state: LASP-1 folds and sends here."""

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, the same on every rank; only with `want_carry=True`."""


class StateScan(Protocol):
    """An exclusive scan of `(state, transition)` over the ranks of one sequence-parallel group."""

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """Start the scan."""

    def drain(self) -> None:
        """Wait until everything launched is received *and* sent, before groups are destroyed.

        Raises:
            CommunicationError: a scan failed.
        """


class AttentionMethod(Protocol):
    """Softmax attention over the ranks of one sequence-parallel group, each of which has consecutive tokens."""

    @property
    def heads_over(self) -> int:
        """P if each rank computes some heads of all tokens: log-sum-exps are [B, H / P, all tokens] then; else 1."""
        return 1

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Sequence[int], scale: float
    ) -> Attended | AttendedHeads:
        """Attention of this rank's queries [B, T, H, D], at `span`, a collective.

        k [B, T, G, D] and v [B, T, G, V] are of its tokens. Of the whole sequence rank r has the tokens [bounds[r],
        bounds[r + 1]). The result is `AttendedHeads` if `heads_over` is not 1 and divides G.
        """

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: Attended,
        span: Span,
        bounds: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, in any dtype, a collective.

        q, k, v and o are those of the tokens, or of `AttendedHeads`.
        """

    def gather(self, tensors: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
        """Tensors of one dtype of this rank's tokens, [B, T, ...] → of all ranks', [B, tokens of the segment, ...].

        A collective; `bounds` of the ranks' tokens in the segment need not begin at 0.
        """


_numbers = itertools.count()
# Weak: graphs, which contain handles, keep no groups alive.
_BY_NUMBER: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
# By the address of a handle in use: to read a number from a GPU waits for its queued work.
_BY_ADDRESS: WeakValueDictionary[int, Exchange] = WeakValueDictionary()


class Exchange:
    """What connects the ranks of a sequence: a frozen record. Keep it alive until after the backward pass.

    A custom op takes tensors and plain values but no objects, so an exchange is passed as a tensor, its `handle`. A
    compiled graph does not depend on a tensor's value: it runs with any `Exchange`, and keeps none alive.
    """

    # Not a dataclass: FSDP2 copies those among a module's inputs, and a copy would be another exchange.
    states: StateScan
    halo: StateScan  # of states that cross one border only, as a convolution's; `states` itself, or a cheaper one
    attention: AttentionMethod | None  # of softmax layers; None: the model has none
    is_first: bool  # this rank has the first tokens of the sequence
    is_last: bool
    _number: int
    _handles: dict[torch.device, Tensor]

    def __init__(
        self, states: StateScan, halo: StateScan, attention: AttentionMethod | None, *, is_first: bool, is_last: bool
    ) -> None:
        vars(self).update(states=states, halo=halo, attention=attention, is_first=is_first, is_last=is_last)
        self._register()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: an exchange is frozen, take `replaced`")

    def _register(self) -> None:
        vars(self).update(_number=next(_numbers), _handles={})
        _BY_NUMBER[self._number] = self

    def handle(self, device: torch.device) -> Tensor:
        """[] int64 on `device`, that of the tokens: what an op takes in place of this record.

        On the tokens' device, since Inductor takes the outputs of an op for unaligned if one of its inputs is on the
        CPU, and reads them more slowly.
        """
        if device not in self._handles:
            # Kept for later: so neither a fake tensor, nor one made in inference mode, which no backward pass can save.
            with torch.inference_mode(False), unset_fake_temporarily():
                handle = self._handles[device] = torch.full((), self._number, device=device)
            _BY_ADDRESS[handle.data_ptr()] = self
        return self._handles[device]

    def replaced(self, **changes: object) -> Self:
        """Another exchange, with other values of some attributes."""
        assert changes.keys() <= vars(self).keys(), f"an exchange has no {changes.keys() - vars(self).keys()}"
        found = copy.copy(self)
        vars(found).update(changes)
        found._register()
        return found

    def wrapped(self, wrap: Callable[[StateScan], StateScan]) -> Self:
        """The same with other scans in the place of its own."""
        states = wrap(self.states)
        return self.replaced(states=states, halo=states if self.halo is self.states else wrap(self.halo))

    def drain(self) -> None:
        """Wait until everything launched is received and sent, as `StateScan.drain`."""
        self.states.drain()
        if self.halo is not self.states:
            self.halo.drain()


def exchange_of(handle: Tensor) -> Exchange:
    """Look up an `Exchange` by its handle, or by a copy of it; RuntimeError: it was freed."""
    found = _BY_ADDRESS.get(handle.data_ptr())
    found = _BY_NUMBER.get(int(handle)) if found is None else found
    if found is None:
        raise RuntimeError(f"exchange {int(handle)} is gone: keep it until the backward pass is over")
    return found
