"""Gated linear attention on CUDA: the phases of one rank on Triton kernels, for bf16 and fp32 inputs.

Forward                                                        Backward
  local states, by segments → S_loc, G_tot                       local state gradients, by segments → D_loc
  | scan over ranks ‖ scores inside chunks                       | scan over ranks ‖ dq, part of dk
  true states that segments start from; outputs                  true gradients at segments' ends; dv, dk, dg

States at chunk boundaries are kept in the dtype of the inputs, as operands of matrix products; sums, decays and states
passed between segments or ranks are fp32. Saved for the backward pass are b, the sums of g inside chunks, in place of
g, and in the dtype of the inputs the scores and the states at chunk boundaries: 64 and K·V/64 numbers per token and
head. The kernels also run on a CPU under Triton's interpreter, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops.gla.kernels.launch import GlaKernels, options_for
from zeco_train.ops.kernel_operands import dense, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes


class _KernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, v, g = operands
        self._q, self._k, self._v = (dense(x) for x in (q, k, v))
        self._launcher = GlaKernels(k, v, self.doc_ids, self.scale, options_for(k))
        self._b = torch.empty_like(g, memory_format=torch.contiguous_format)
        self._local = self._launcher.local_states(self._k, self._v, dense(g), b=self._b, reverse=False)
        self.state, self.transition = self._local.segments.state, self._local.segments.log_decay

    def overlap(self) -> None:
        self._scores = self._launcher.scores(self._q, self._k, self._b)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self._launcher.correct(self._local.segments, incoming_state, "incoming_state")
        # Not g too: in fp32 it is as large as bf16 q and k together. The true states serve in place of R.
        self.saved = self._b, self._local.states, self._scores
        return self._launcher.outputs(self._q, self._v, self._b, self._scores, self._local)


class _KernelBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # The fourth operand, g, has been replaced by b (`CUDA.replaced`).
        q, k, v, self._b = operands
        self._q, self._k, self._v, self._do = (dense(x) for x in (q, k, v, self.do))
        self._states, self._scores = self.saved
        self._launcher = GlaKernels(k, v, self.doc_ids, self.scale, options_for(k))
        self._local = self._launcher.local_states(self._q, self._do, self._b, b=None, reverse=True)
        self.state_grad = self._local.segments.state

    def overlap(self) -> None:
        inputs = self._q, self._k, self._v, self._b, self._do, self._states
        self._dq, self._dk, self._terms = self._launcher.intra_grads(*inputs)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        self._launcher.correct(self._local.segments, incoming_grad, "incoming_grad")
        dv, dg = self._launcher.input_grads(
            self._k, self._v, self._b, self._do, self._scores, self._states, self._local, self._terms, self._dk
        )
        return self._dq, self._dk, dv, dg


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, k, v, g = operands
    # For the shapes only, which do not depend on documents or the scale.
    launcher = GlaKernels(k, v, None, 1.0, options_for(k))
    b = torch.empty_like(g, memory_format=torch.contiguous_format)
    return b, k.new_empty(launcher.states_shape), k.new_empty(launcher.scores_shape)


CUDA = with_padded_heads(Passes(_KernelForward, _KernelBackward, _saved_like, replaced=(3,), needs_incoming=False))
