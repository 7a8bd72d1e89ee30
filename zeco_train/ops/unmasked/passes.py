"""The two passes of unmasked linear attention on one rank: two batched products forward, four backward.

    forward    S_loc = kᵀ v               | all ranks' sum S  | o = scale · q S
    backward   D_loc = scale · qᵀ do      | all ranks' sum D  | dk = v Dᵀ, dv = k D        (dq = scale · do Sᵀ overlaps)

The transition is that of no decay at all, a logarithm of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.passes import Passes


class _UnmaskedForward:
    def __init__(self, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> None:
        if doc_ids is not None:
            raise ValueError(
                "doc_ids: an unmasked operator reads whole sequences; data.reset_state_at_document must be off"
            )
        query, key, value = operands
        check_inputs(query, key, value)
        self._query, self._scale, self._dtype = query, scale, value.dtype
        self.state = _by_head(key).mT @ _by_head(value)
        self.transition = self.state.new_zeros(self.state.shape[:3])
        self.saved: tuple[Tensor, ...] = ()

    def overlap(self) -> None:
        pass

    def outputs(self, incoming_state: Tensor) -> Tensor:
        return _by_token(_by_head(self._query) @ (self._scale * incoming_state), self._dtype)


class _UnmaskedBackward:
    def __init__(
        self,
        operands: Sequence[Tensor],
        do: Tensor,
        saved: Sequence[Tensor],
        incoming_state: Tensor | None,
        scale: float,
        doc_ids: Tensor | None,
    ) -> None:
        assert incoming_state is not None
        del saved, doc_ids  # none are saved, and the forward pass refuses documents
        self._operands, self._do = operands, _by_head(do)
        self._scaled_state, self._dq = scale * incoming_state, do
        self.state_grad = scale * (_by_head(operands[0]).mT @ self._do)

    def overlap(self) -> None:
        # The sum of the states is known from the forward pass, so dq need not wait for that of the gradients.
        self._dq = _by_token(self._do @ self._scaled_state.mT, self._operands[0].dtype)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        _, key, value = self._operands
        dk = _by_token(_by_head(value) @ incoming_grad.mT, key.dtype)
        return self._dq, dk, _by_token(_by_head(key) @ incoming_grad, value.dtype)


UNMASKED_PASSES = Passes(_UnmaskedForward, _UnmaskedBackward)


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check shapes and dtypes.

    Raises:
        ValueError: names the first tensor that does not fit.
    """
    if q.ndim != 4 or q.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"q must be [B, T, H, K] in bfloat16, float32 or float64, not {list(q.shape)} {q.dtype}")
    for name, x, shape in (("k", k, q.shape), ("v", v, (*q.shape[:3], *v.shape[3:]))):
        if x.ndim != 4 or x.shape != shape or (x.dtype, x.device) != (q.dtype, q.device):
            own, other = (f"{list(y.shape)} {y.dtype} on {y.device}" for y in (x, q))
            raise ValueError(f"{name} must fit q, {other}; got {own}")


def _by_head(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2)


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(1, 2)
