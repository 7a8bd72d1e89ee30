"""The passes of the short convolution in PyTorch: w multiply-adds of shifted slices, in fp32 (fp64 for fp64 inputs).

    y_t = bias + Σ_lag weight[lag] ⊙ x_{t−lag},    dx_t = Σ_lag weight[lag] ⊙ do_{t+lag},    lag = 0 … w − 1

where weight[lag] is weight[:, 0, w−1−lag], and tokens of different documents do not see each other. The received inputs
R are w − 1 more tokens before the shard, of piece 0. All but the first (in reverse: the last) w − 1 tokens are complete
without them; these few are computed again once R (D_in) is known, so that each result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state


def convolve(x: Tensor, weight: Tensor, bias: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Compute y of tokens with zeros before them, [B, T, C] in the accumulation dtype."""
    dtype = accumulation_dtype(x.dtype)
    x, taps = x.to(dtype), _taps(weight, dtype)
    y = torch.addcmul(bias.to(dtype), x, taps[0])
    for lag in range(1, min(len(taps), x.shape[1])):
        y[:, lag:].addcmul_(_seen(x[:, :-lag], doc_ids, lag), taps[lag])
    return y


def input_grads(do: Tensor, weight: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Compute dx of tokens with zero gradients after them, [B, T, C] in the accumulation dtype."""
    dtype = accumulation_dtype(do.dtype)
    do, taps = do.to(dtype), _taps(weight, dtype)
    dx = do * taps[0]
    for lag in range(1, min(len(taps), do.shape[1])):
        dx[:, :-lag].addcmul_(_seen(do[:, lag:], doc_ids, lag), taps[lag])
    return dx


def weight_grads(x: Tensor, do: Tensor, width: int, doc_ids: Tensor | None) -> Tensor:
    """Compute dweight [C, 1, w] of tokens with zeros before them, in the accumulation dtype."""
    dtype = accumulation_dtype(x.dtype)
    x, do, tokens = x.to(dtype), do.to(dtype), x.shape[1]
    grads = x.new_zeros(width, x.shape[2])
    for lag in range(min(width, tokens)):
        grads[width - 1 - lag] = (_seen(do[:, lag:], doc_ids, lag) * x[:, : tokens - lag]).sum((0, 1))
    return grads.mT[:, None]


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight[:, 0].mT.flip(0).to(dtype)


def _seen(x: Tensor, doc_ids: Tensor | None, lag: int) -> Tensor:
    """Return x [B, T − lag, C] with zeros where a token and the one `lag` after it are of different doc_ids."""
    if doc_ids is None or lag == 0:
        return x
    return x.masked_fill((doc_ids[lag:] != doc_ids[:-lag])[:, None], 0.0)


def last_inputs(x: Tensor, rows: int, doc_ids: Tensor | None) -> Tensor:
    """S_loc, [B, 1, rows, C]: the last inputs, zeros before the shard and of other documents than the last one."""
    batch, tokens, channels = x.shape
    count, dtype = min(tokens, rows), accumulation_dtype(x.dtype)
    last = x[:, tokens - count :]
    if doc_ids is not None:
        last = last.masked_fill((doc_ids[tokens - count :] != doc_ids[-1])[:, None], 0.0)
    if count == rows:
        return last.to(dtype, copy=True, memory_format=torch.contiguous_format)[:, None]
    state = x.new_zeros(batch, 1, rows, channels, dtype=dtype)
    state[:, 0, rows - count :] = last
    return state


def shift(x: Tensor, rows: int, doc_ids: Tensor | None) -> Tensor:
    """The transition, [B, 1, rows, rows]: row r of the state after T tokens is row r + T of the one before."""
    batch, tokens, _ = x.shape
    matrix = x.new_zeros(batch, 1, rows, rows, dtype=accumulation_dtype(x.dtype))
    if tokens < rows:
        matrix.diagonal(tokens, -2, -1).fill_(1.0)
        if doc_ids is not None:
            matrix.mul_(doc_ids[-1] == 0)
    return matrix


class PlainForward(ForwardBase):
    """The forward pass, of which kernels have other parts."""

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, self._weight, self._bias = operands
        self._rows = self._weight.shape[2] - 1
        self.state = last_inputs(self._x, self._rows, self.doc_ids)
        self.transition = shift(self._x, self._rows, self.doc_ids)

    def overlap(self) -> None:
        """Convolve with zeros before the shard."""
        self._y = convolve(self._x, self._weight, self._bias, self.doc_ids).to(self._x.dtype)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """The first w − 1 tokens are computed once more, with R before them."""
        check_state(incoming_state, "incoming_state", self.state.shape)
        first = self._x[:, : self._rows]
        joined = torch.cat([incoming_state[:, 0], first.to(incoming_state.dtype)], dim=1)
        doc_ids = _with_received(self.doc_ids, self._rows)
        self._y[:, : self._rows] = convolve(joined, self._weight, self._bias, doc_ids)[:, self._rows :]
        return self._y


class PlainBackward(BackwardBase):
    """The backward pass, of which kernels have other parts."""

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, self._weight, self._bias = operands
        self._rows = self._weight.shape[2] - 1
        batch, _, channels = self._x.shape
        check_state(self.received, "incoming_state", torch.Size((batch, 1, self._rows, channels)))
        self.state_grad = self._received_grads()

    def _received_grads(self) -> Tensor:
        # D_loc, from do of the first w − 1 tokens, which see inputs before them
        grads = input_grads(self._first_grads(), self._weight, _with_received(self.doc_ids, self._rows))
        return grads[:, None, : self._rows].contiguous()

    def _first_grads(self) -> Tensor:
        # do of the first w − 1 tokens, after zeros for the received inputs
        first = self.do[:, : self._rows].to(self.received.dtype)
        return torch.cat([torch.zeros_like(self.received[:, 0]), first], dim=1)

    def overlap(self) -> None:
        """Compute dx with zeros after the shard, dweight, dbias."""
        self._dx = input_grads(self.do, self._weight, self.doc_ids).to(self._x.dtype)
        width, first_grads = self._rows + 1, self._first_grads()
        received = torch.zeros_like(first_grads)
        received[:, : self._rows] = self.received[:, 0]
        doc_ids = _with_received(self.doc_ids, self._rows)
        dweight = weight_grads(self._x, self.do, width, self.doc_ids)
        self._dweight = (dweight + weight_grads(received, first_grads, width, doc_ids)).to(self._weight.dtype)
        dbias = self.do.sum((0, 1), dtype=accumulation_dtype(self.do.dtype))
        self._dbias = dbias.to(self._bias.dtype)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """D_in is the gradient of the last w − 1 inputs."""
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        count = min(self._rows, self._x.shape[1])
        doc_ids = None if self.doc_ids is None else self.doc_ids[-count:]
        sent = incoming_grad[:, 0, -count:]
        if doc_ids is not None:
            sent = sent.masked_fill((doc_ids != doc_ids[-1])[:, None], 0.0)
        self._dx[:, -count:] = input_grads(self.do[:, -count:], self._weight, doc_ids) + sent
        return self._dx, self._dweight, self._dbias


def _with_received(doc_ids: Tensor | None, rows: int) -> Tensor | None:
    """The doc_ids of the received inputs, 0, and of the first `rows` tokens."""
    return None if doc_ids is None else torch.cat([doc_ids.new_zeros(rows), doc_ids[:rows]])


PLAIN = Passes(PlainForward, PlainBackward)
