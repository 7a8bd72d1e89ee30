"""Unmasked linear attention (LASP-2, Sun et al. 2025, arXiv 2502.07563, algorithm 1): each token reads all tokens.

    S = Σ_j k_j v_jᵀ over the whole sequence,    o_i = scale · q_iᵀ S

q, k [B, T, H, K]; v, o [B, T, H, V]; no decay, since decays need an order. The gradient with respect to S is one sum
over the whole sequence, too (algorithm 3). A scan over ranks gives both sums as its state after the whole sequence
(`Operator.reads_whole`), so each pass is a few batched products, which are PyTorch's on GPUs too:

    forward    S_loc = kᵀ v               | all ranks' sum S  | o = scale · q S
    backward   D_loc = scale · qᵀ do      | all ranks' sum D  | dk = v Dᵀ, dv = k D        (dq = scale · do Sᵀ overlaps)

Generation is refused: a token of an unmasked model reads tokens that are yet to be generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import Kind, Operator
from zeco_train.ops.oracle import by_pairs
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes
from zeco_train.ops.scalar_decay import FIXED_TIME


class _UnmaskedForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        if self.doc_ids is not None:
            raise ValueError(
                "doc_ids: an unmasked operator reads whole sequences; data.reset_state_at_document must be off"
            )
        query, key, value = operands
        self._query, self._dtype = query, value.dtype
        self.state = _by_head(key).mT @ _by_head(value)
        # Logarithms of no decay at all.
        self.transition = self.state.new_zeros(self.state.shape[:3])

    def outputs(self, incoming_state: Tensor) -> Tensor:
        return _by_token(_by_head(self._query) @ (self.scale * incoming_state), self._dtype)


class _UnmaskedBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._operands, self._do = operands, _by_head(self.do)
        self._scaled_state = self.scale * self.received
        self.state_grad = self.scale * (_by_head(operands[0]).mT @ self._do)

    def overlap(self) -> None:
        # The sum of the states is known from the forward pass, so dq need not wait for that of the gradients.
        self._dq = _by_token(self._do @ self._scaled_state.mT, self._operands[0].dtype)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        _, key, value = self._operands
        dk = _by_token(_by_head(value) @ incoming_grad.mT, key.dtype)
        return self._dq, dk, _by_token(_by_head(key) @ incoming_grad, value.dtype)


def _by_head(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2)


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(1, 2)


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass, of adding k vᵀ to the state and of applying q to it."""
    return float(heads * 4 * key_dim * value_dim)


def refuse_step(*arguments: object) -> NoReturn:
    """Refuse generation, the operator's `one_token`, with a ConfigError."""
    raise ConfigError("model.causal", "false", "each token reads the whole text; generation needs model.causal=true")


UNMASKED = Operator(
    operands=("q", "k", "v"),
    dims=("BTHK", "BTHK", "BTHV"),
    kind=Kind.diagonal,
    portable=Passes(_UnmaskedForward, _UnmaskedBackward),
    oracle=by_pairs,
    one_token=refuse_step,
    forward_flops=forward_flops,
    about="Unmasked linear attention: each token reads all tokens (Sun et al. 2025, arXiv 2502.07563)."
    "\n\n    o_i = scale · q_iᵀ Σ_j k_j v_jᵀ,    over the whole sequence",
    reads_whole=True,
    time=FIXED_TIME,  # not measured; the most like it
)
