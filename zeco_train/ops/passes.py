"""Interface of an operator, and of its two passes on one rank: work before the scan, overlapping it, and after it.

    forward(operands, …)       → launch(state, transition)              | overlap() | wait → outputs(R)
    backward(operands, do, …)  → launch(state_grad, adjoint, reverse)   | overlap() | wait → operand_grads(D_in)

An implementation is a pair of such classes. Each object serves one pass and is used once, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from zeco_train.ops.selection import KernelRule


class ForwardPass(Protocol):
    """One rank's forward pass.

    Attributes:
        state: [B, H, K, V], S_loc: this rank's contribution to the state after its tokens.
        transition: [B, H, K] or [B, H, K, K], how they change an incoming state (`zeco_train.ops.transition`). A matrix
            is costly: it may be computed when first read, and is not read where no state passes through this rank.
    """

    state: Tensor

    @property
    def transition(self) -> Tensor:
        """See the class."""
        ...

    def overlap(self) -> None:
        """Compute the scores inside chunks, which need no other rank."""
        ...

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """Compute o, [B, T, H, V] in the dtype of v, given R, [B, H, K, V]."""
        ...

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """New tensors to save for the backward pass, see `Passes`; called after `outputs`."""
        ...


class BackwardPass(Protocol):
    """One rank's backward pass.

    Attributes:
        state_grad: [B, H, K, V], D_loc: gradient with respect to the incoming state from this rank's outputs alone.
    """

    state_grad: Tensor

    def overlap(self) -> None:
        """Recompute the states and compute the gradients inside chunks, which need no other rank."""
        ...

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, in their order, shaped like the operand, given D_in, [B, H, K, V]."""
        ...


# (operands, scale, pieces) → the pass, see `Passes`.
StartForward = Callable[[Sequence[Tensor], float, Tensor | None], ForwardPass]
# (operands, do, saved, incoming_state, scale, pieces) → the pass.
StartBackward = Callable[
    [Sequence[Tensor], Tensor, Sequence[Tensor], Tensor | None, float, Tensor | None], BackwardPass
]


def nothing_saved(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`Passes.saved_like` of passes that save only operands and R."""
    del operands
    return ()


class Passes(NamedTuple):
    """An implementation of an operator on one rank.

    The constructors of both passes compute the local state and transition, or the local state gradients, from:

    - operands, in the operator's order; for the backward pass without those replaced by saved tensors;
    - do, [B, T, H, V], the gradient of o, and the saved tensors (backward pass only);
    - incoming_state: R, [B, H, K, V], if needed (backward pass only);
    - scale: factor of the outputs;
    - pieces: [T], see `zeco_train.ops.documents`, for a batch of one (`zeco_train.ops.rows`); None without documents.

    An invalid shape or dtype raises a ValueError that names the tensor.

    Attributes:
        forward, backward: the passes.
        saved_like: operands → empty tensors like `ForwardPass.saved`.
        replaced: positions of the operands that are not saved for the backward pass. The first tensors of `saved`, as
            many as these, are passed to it in their place, each of the shape and dtype of the operand.
        needs_incoming: the backward pass takes R.
    """

    forward: StartForward
    backward: StartBackward
    saved_like: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = nothing_saved
    replaced: tuple[int, ...] = ()
    needs_incoming: bool = True


# recurrence(*operands, scale=K^-1/2, initial_state=0) → o, [B, T, H, V] in the dtype of v, and the state after the last
# token, [B, H, K, V] in fp64 or fp32; differentiable by autograd.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


class Kind(Enum):
    """The kinds of transitions, see `zeco_train.ops.transition`."""

    diagonal = "diagonal"
    matrix = "matrix"


class OperatorTime(NamedTuple):
    """Measured seconds of an operator alone per token and head, forward + backward, for the planner.

    Attributes:
        operator: that was measured.
        seconds: at K `key_dim` and V `value_dim`; other head dims are scaled by K + V.
        forward: the forward pass's share.
        key_dim, value_dim: of the measurement.
    """

    operator: str
    seconds: float
    forward: float
    key_dim: int
    value_dim: int


class Peer(NamedTuple):
    """Function of flash-linear-attention for the same operator, to which `bench` compares it.

    Attributes:
        module, function: its name; it takes the operands that have tokens, in the operator's order.
        decay: for which constant decays, by their name in `bench`; None: the operator has none.
        options: keyword arguments.
        takes_context: it has context parallelism, by the argument `cp_context`.
    """

    module: str
    function: str
    decay: str | None = None
    options: tuple[tuple[str, bool], ...] = ()
    takes_context: bool = False


def one_a_multiprocessor(key_dim: int, value_dim: int) -> int:
    """`Operator.walk_programs` of programs that take a multiprocessor each."""
    return 132


@dataclass(frozen=True)
class Operator:
    """An operator as the rest of the project sees it.

    Attributes:
        operands: names of the operands, in call order; q, k, v first.
        dims: their dimensions, a letter each: B, the first of all, T; H heads, of which consecutive ones may share one
            of G; K, V; of a convolution C channels and W inputs; 1. An operand without T is the same for all tokens.
        kind: of its transition.
        select: operands → implementation: the only place that dispatches on device or dtype. Also takes the operands of
            a backward pass.
        oracle: the formula that `verify` and `bench` compare with (`zeco_train.ops.oracle`), of the operands by name.
        step: (operands of one token [B, 1, …], state updated in place) → o, [B, 1, H, V].
        forward_flops: (H, K, V) → FLOPs per token of the forward pass.
        recomputed_flops: (H, K, V) → FLOPs per token that the backward pass recomputes.
        output: position of the operand whose shape and dtype the outputs have.
        neighbours: a shard's state depends on its last tokens only, so it crosses one border, or a few of short shards:
            it is exchanged by the halo scan (`Exchange.halo`).
        reads_whole: outputs read the state of the whole sequence instead of the state before each token. R, and D_in in
            reverse, is then the scan's `carry_out`: the same on every rank, this rank's own tokens included.
        kernels: which calls its kernels on GPUs serve; None: there are none, and PyTorch's products are as fast.
        step_kernels: the same for `step`.
        walk_programs: (K, V) → programs that walk over chunks at once on an H200, for 64 columns of the values each, of
            kernels that keep the states that the walks start from; None: they keep the states of all chunks.
        time, cpu_time: on an H200 in bf16, and on a CPU core in PyTorch and fp32, for the planner, which takes the
            default operator's for None.
        peers: functions of flash-linear-attention; empty: `bench operator` does not measure it.
    """

    operands: tuple[str, ...]
    dims: tuple[str, ...]
    kind: Kind
    select: Callable[[Sequence[Tensor]], Passes]
    oracle: Recurrence
    step: Callable[..., Tensor]
    forward_flops: Callable[[int, int, int], float]
    recomputed_flops: Callable[[int, int, int], float]
    output: int = 2
    neighbours: bool = False
    reads_whole: bool = False
    kernels: KernelRule | None = None
    step_kernels: KernelRule = KernelRule(dtypes=())  # noqa: RUF009
    walk_programs: Callable[[int, int], int] | None = one_a_multiprocessor
    time: OperatorTime | None = None
    cpu_time: OperatorTime | None = None
    peers: tuple[Peer, ...] = ()

    @property
    def dims_of(self) -> dict[str, str]:
        """`dims` by operand."""
        return dict(zip(self.operands, self.dims, strict=True))

    @property
    def is_grouped(self) -> bool:
        """Whether heads of values may share one of keys."""
        return any("G" in dims for dims in self.dims)

    def check_carries(self, carry_in: Tensor | None, want_carry: bool) -> None:
        """Refuse states of other segments for an operator that reads the whole sequence.

        Raises:
            ValueError: names the argument, and the setting that it comes from.
        """
        if self.reads_whole and (carry_in is not None or want_carry):
            name = "want_carry" if carry_in is None else "carry_in"
            raise ValueError(f"{name}: an unmasked operator reads the whole sequence at once, not by train.segments")

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, V)."""
        query, _, value, *_ = operands
        return value.shape[0], value.shape[2], query.shape[3], value.shape[3]

    def transition_shape(self, operands: Sequence[Tensor]) -> tuple[int, ...]:
        """(B, H, K) or (B, H, K, K)."""
        *outer, key_dim, _ = self.state_shape(operands)
        return (*outer, key_dim) if self.kind is Kind.diagonal else (*outer, key_dim, key_dim)

    def cuts(self, operands: Sequence[Tensor]) -> bool:
        """Whether shapes alone say that the transition is 0: the state after these tokens is theirs alone."""
        return False
