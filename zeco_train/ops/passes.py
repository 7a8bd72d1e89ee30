"""The two passes of one rank, as autograd drives them: what comes before the scan, beside it, and after it.

    ForwardPass(q, k, v, g, …)    → launch(state, log_decay)           | overlap() | wait → outputs(R)
    BackwardPass(q, k, v, do, …)  → launch(state_grad, G_tot, reverse) | overlap() | wait → input_grads(D_in)

An implementation is a pair of such classes. Each object serves one pass and is used once, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from zeco_train.ops import chunked
from zeco_train.ops.documents import Documents


class ForwardPass(Protocol):
    """One rank's forward pass.

    Attributes:
        state: [B, H, K, V], S_loc: what this rank's tokens add to the state after them.
        log_decay: [B, H, K], G_tot: log of the factor by which the incoming state survives them.
    """

    state: Tensor
    log_decay: Tensor

    def overlap(self) -> None:
        """Do what needs no other rank: the scores inside chunks."""
        ...

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """Make o, [B, T, H, V] in the dtype of v, given R, [B, H, K, V]."""
        ...

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """What the backward pass needs beside q, k, v and `log_decay`; asked for after `outputs`."""
        ...


class BackwardPass(Protocol):
    """One rank's backward pass.

    Attributes:
        state_grad: [B, H, K, V], D_loc: gradient with respect to the incoming state from this rank's outputs alone.
    """

    state_grad: Tensor

    def overlap(self) -> None:
        """Do what needs no other rank: states again, gradients inside chunks."""
        ...

    def input_grads(self, incoming_grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make dq, dk, dv, dg, shaped like q, k, v, g, given D_in, [B, H, K, V]."""
        ...


class StartForward(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: Documents | None, scale: float
    ) -> ForwardPass:
        """Start the pass: it makes the local states.

        Raises:
            ValueError: shapes or dtypes do not fit; the message names the tensor.
        """
        ...


class StartBackward(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        saved: tuple[Tensor, ...],
        documents: Documents | None,
        scale: float,
    ) -> BackwardPass:
        """Start the pass, with `saved` of the forward pass: it makes the local state gradients."""
        ...


class Passes(NamedTuple):
    """An implementation of the operator on one rank.

    Attributes:
        forward, backward: the passes.
        saved_like: of k, v and g, empty tensors like the three of `ForwardPass.saved`; None where those are two, g
            and R themselves.
    """

    forward: StartForward
    backward: StartBackward
    saved_like: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] | None


class ChunkedForward:
    """The forward pass in PyTorch (`zeco_train.ops.chunked`)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: Documents | None, scale: float) -> None:
        self._q, self._k, self._v, self._g, self._documents, self._scale = q, k, v, g, documents, scale
        self._states = chunked.local_states(k, v, g, documents)
        self.state, self.log_decay = self._states.state, self._states.log_decay

    def overlap(self) -> None:
        self._scores = chunked.intra_scores(self._q, self._k, self._g, self._documents, self._scale)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self._incoming = incoming_state
        return chunked.outputs(
            self._q, self._v, self._g, self._scores, self._states, incoming_state, self._documents, self._scale
        )

    @property
    def saved(self) -> tuple[Tensor, ...]:
        return self._g, self._incoming


class ChunkedBackward:
    """The backward pass in PyTorch (`zeco_train.ops.chunked`)."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        saved: tuple[Tensor, ...],
        documents: Documents | None,
        scale: float,
    ) -> None:
        self._q, self._k, self._v, self._do, self._documents, self._scale = q, k, v, do, documents, scale
        self._g, self._incoming = saved
        self._grads = chunked.local_state_grads(q, do, self._g, documents, scale)
        self.state_grad = self._grads.state_grad

    def overlap(self) -> None:
        self._states = chunked.local_states(self._k, self._v, self._g, self._documents)
        self._intra = chunked.intra_grads(self._q, self._k, self._v, self._g, self._do, self._documents, self._scale)

    def input_grads(self, incoming_grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return chunked.input_grads(
            self._q,
            self._k,
            self._v,
            self._g,
            self._do,
            self._states,
            self._incoming,
            self._grads,
            incoming_grad,
            self._intra,
            self._documents,
            self._scale,
        )


CHUNKED = Passes(ChunkedForward, ChunkedBackward, saved_like=None)
