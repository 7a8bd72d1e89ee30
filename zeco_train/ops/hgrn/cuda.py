"""The elementwise recurrence on CUDA: the phases of one rank on Triton kernels, for bf16 and fp32 inputs.

Forward                                                        Backward
  runs of tokens from zero → S_loc, G_tot                        runs of tokens from a zero end → D_loc
  | scan over ranks                                              | scan over ranks
  true states that runs start from; h                            true gradients that runs end with; dx, dg

The time is that of memory: x (do) and g are read twice, outputs are written once. Of the forward pass the true state
before every 16th token is saved, in fp32, in place of R: from it the backward pass computes h again, in registers. Sums
are fp32. The kernels also run on a CPU under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops.hgrn.kernels import launch_grads, launch_outputs, launch_summaries, states_shape
from zeco_train.ops.kernel_operands import dense
from zeco_train.ops.passes import Passes, check_state


class _KernelForward:
    def __init__(self, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> None:
        x, g = operands
        self._x, self._g, self._doc_ids = dense(x), dense(g), doc_ids
        self._summaries = launch_summaries(self._x, self._g, doc_ids, reverse=False)
        self.state, self.transition = self._summaries.state, self._summaries.log_decay

    def overlap(self) -> None:
        pass  # all before the scan is needed for it

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self.state.shape)
        o, self._states = launch_outputs(self._x, self._g, self._doc_ids, self._summaries, incoming_state)
        return o

    @property
    def saved(self) -> tuple[Tensor, ...]:
        return (self._states,)


class _KernelBackward:
    def __init__(
        self,
        operands: Sequence[Tensor],
        do: Tensor,
        saved: Sequence[Tensor],
        incoming_state: Tensor | None,
        scale: float,
        doc_ids: Tensor | None,
    ) -> None:
        x, g = operands
        self._x, self._g, self._do, self._doc_ids = dense(x), dense(g), dense(do), doc_ids
        (self._states,) = saved
        self._summaries = launch_summaries(self._do, self._g, doc_ids, reverse=True)
        self.state_grad = self._summaries.state

    def overlap(self) -> None:
        pass  # all before the scan is needed for it

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        inputs = self._x, self._g, self._do, self._doc_ids
        return launch_grads(*inputs, self._states, self._summaries, incoming_grad)


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (operands[0].new_empty(states_shape(operands[0]), dtype=torch.float32),)


CUDA = Passes(_KernelForward, _KernelBackward, _saved_like, needs_incoming=False)
