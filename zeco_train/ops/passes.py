"""Interface of an operator's two passes on one rank: work before the scan, overlapping it, and after it.

    forward(operands, …)       → launch(state, transition)              | overlap() | wait → outputs(R)
    backward(operands, do, …)  → launch(state_grad, adjoint, reverse)   | overlap() | wait → operand_grads(D_in)

An implementation is a pair of such classes, most of them a `ForwardBase` and a `BackwardBase`. Each object serves one
pass and is used once, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor


class ForwardPass(Protocol):
    """One rank's forward pass."""

    # With a matrix, or if `lazy`, both may be computed when first read, and are not read where no rank needs them.
    @property
    def state(self) -> Tensor:
        """[B, H, K, V], S_loc: this rank's contribution to the state after its tokens."""

    @property
    def transition(self) -> Tensor:
        """[B, H, K] or [B, H, K, K], how these tokens change an incoming state (`zeco_train.ops.seam`)."""

    def overlap(self) -> None:
        """Compute the scores inside chunks, which need no other rank."""

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """O, [B, T, H, V] in the dtype of v, given R, [B, H, K, V]."""

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """New tensors to save for the backward pass; read after `outputs`."""


class BackwardPass(Protocol):
    """One rank's backward pass."""

    @property
    def state_grad(self) -> Tensor:
        """[B, H, K, V], D_loc: gradient of the incoming state from this rank's outputs alone; see `ForwardPass`."""

    def overlap(self) -> None:
        """Recompute the states and compute the gradients inside chunks, which need no other rank."""

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, shaped like the operand, given D_in, [B, H, K, V]."""


@dataclass(eq=False)
class ForwardBase:
    """The arguments of a forward pass.

    Operands are not kept: of padded ones, or of log-decays whose sums take their place, memory would be needed longer.
    """

    operands: InitVar[Sequence[Tensor]]
    scale: float
    doc_ids: Tensor | None

    saved = cast(tuple[Tensor, ...], ())
    lazy = False
    from_zero = False  # R is known to be 0

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        """Compute `state` and `transition`."""
        raise NotImplementedError

    def overlap(self) -> None:
        """Nothing, unless a subclass has something to compute."""


@dataclass(eq=False)
class BackwardBase:
    """The arguments of a backward pass."""

    operands: InitVar[Sequence[Tensor]]
    do: Tensor
    saved: Sequence[Tensor]
    incoming_state: Tensor | None
    scale: float
    doc_ids: Tensor | None

    # K before q and k were padded; their gradients may have that width.
    unpadded = cast("int | None", None)
    lazy = False
    from_zero = False  # D_in is known to be 0

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        """Compute `state_grad`."""
        raise NotImplementedError

    def overlap(self) -> None:
        """Nothing, unless a subclass has something to compute."""

    @property
    def received(self) -> Tensor:
        """R, [B, H, K, V], of passes that need it (`Passes.needs_incoming`)."""
        assert self.incoming_state is not None
        return self.incoming_state


# (operands, scale, doc_ids) → the pass. Doc_ids are [T] for a batch of one (`zeco_train.ops.rows`), or None.
StartForward = Callable[[Sequence[Tensor], float, Tensor | None], ForwardPass]
# (operands, do [B, T, H, V], saved, incoming_state R [B, H, K, V] if needed, scale, doc_ids) → the pass.
StartBackward = Callable[
    [Sequence[Tensor], Tensor, Sequence[Tensor], Tensor | None, float, Tensor | None], BackwardPass
]


class Passes(NamedTuple):
    """An implementation of an operator on one rank, by the constructors of both passes.

    They compute the local state and transition, or the local state gradient. Operands are checked before
    (`Operator.check`); a received state of another shape raises a ValueError that names it.
    """

    forward: StartForward
    backward: StartBackward
    # Empty tensors like `ForwardPass.saved`, of the operands.
    saved_like: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = lambda operands: ()
    # Positions of the operands that are not saved for the backward pass. The first tensors of `saved` take their place,
    # each of the shape and dtype of the operand.
    replaced: tuple[int, ...] = ()
    needs_incoming: bool = True  # the backward pass takes R


_keeping = False


@contextmanager
def keeping_states() -> Iterator[None]:
    """Keep the true states at chunks for the backward pass, which else recomputes them: gla's eager forward passes.

    An ablation of the paper's Algorithm 3 (`lab/paper/states.py`): equal gradients, a state a chunk more memory.
    """
    global _keeping
    before, _keeping = _keeping, True
    try:
        yield
    finally:
        _keeping = before


def keeps_states() -> bool:
    """Whether a forward pass is to keep them."""
    return _keeping


def check_state(state: Tensor, name: str, shape: torch.Size) -> None:
    """Raise a ValueError naming the state if its shape is not [B, H, K, V] = `shape`."""
    if state.shape != shape:
        raise ValueError(f"{name}: expected shape [B, H, K, V] = {list(shape)}, got {list(state.shape)}")
