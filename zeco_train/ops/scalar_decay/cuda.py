"""Linear attention with one decay per head on CUDA: one rank's phases on Triton kernels, for bf16 and fp32 tokens.

Forward                                                        Backward
  states after segments → S_loc, G_tot                           gradients of segments → D_loc
  | scan over ranks                                              | scan over ranks ‖ dq, and with it terms of dg
  true states that segments start from; outputs                  true gradients at segments' ends; dv, dk, dg

Scores and the states of chunks are kept nowhere: each walk over a segment computes its own, in registers. Of the
forward pass the true states at segments' starts are saved, in place of R, and the decays' sums inside chunks in place
of g. The kernels also run on a CPU under Triton's interpreter, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from zeco_train.ops.kernel_operands import dense, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes
from zeco_train.ops.scalar_decay.kernels.launch import ScalarDecayKernels, decay_sums, options_for


class _KernelForward(ForwardBase):
    fixed = False

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, v, decays = operands
        self._q, self._k, self._v = (dense(x) for x in (q, k, v))
        tuning, where = options_for(k, v), (self.doc_ids, self.scale)
        self._decays = dense(decays) if self.fixed else decay_sums(dense(decays), tuning.chunk)
        self._launcher = ScalarDecayKernels(k, v, self._decays, *where, tuning, fixed=self.fixed)
        self._segments = self._launcher.summaries(self._k, self._v, reverse=False)
        self.state, self.transition = self._segments.state, self._segments.log_decay

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self._launcher.correct(self._segments, incoming_state, "incoming_state")
        starts = self._segments.starts
        self.saved = (starts,) if self.fixed else (self._decays.transpose(1, 2), starts)
        # The walk computes its scores, too: nothing overlaps the scan.
        return self._launcher.outputs(self._q, self._k, self._v, starts)


class _FixedForward(_KernelForward):
    fixed = True


class _KernelBackward(BackwardBase):
    fixed = False

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # Unless decays are fixed, the fourth operand, g, has been replaced by its sums (`CUDA_SCALAR.replaced`).
        q, k, v, self._log_decays = operands
        self._q, self._k, self._v, self._do = (dense(x) for x in (q, k, v, self.do))
        (self._starts,) = self.saved
        decays, where = self._log_decays, (self.doc_ids, self.scale)
        decays = dense(decays if self.fixed else decays.transpose(1, 2))
        self._launcher = ScalarDecayKernels(k, v, decays, *where, options_for(k, v), fixed=self.fixed)
        self._segments = self._launcher.summaries(self._q, self._do, reverse=True)
        self.state_grad = self._segments.state

    def overlap(self) -> None:
        # dq needs no gradients of states.
        self._dq, self._terms = self._launcher.query_grads(self._q, self._k, self._v, self._do, self._starts)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        self._launcher.correct(self._segments, incoming_grad, "incoming_grad")
        grads = self._segments.starts
        dk, dg = self._launcher.key_grads(self._q, self._k, self._v, self._do, grads, self._terms)
        dv = self._launcher.value_grads(self._q, self._k, self._do, grads)
        return self._dq, dk, dv, torch.zeros_like(self._log_decays) if dg is None else dg


class _FixedBackward(_KernelBackward):
    fixed = True


def _saved_like(operands: Sequence[Tensor], *, fixed: bool) -> tuple[Tensor, ...]:
    _, k, v, decays = operands
    # For the shapes only, which do not depend on documents or the scale.
    launcher = ScalarDecayKernels(k, v, decays, None, 1.0, options_for(k, v), fixed=fixed)
    starts = decays.new_empty(launcher.starts_shape)
    return (starts,) if fixed else (decays.new_empty(decays.mT.shape).mT, starts)


_SAVED = partial(_saved_like, fixed=False), partial(_saved_like, fixed=True)
_SCALAR = Passes(_KernelForward, _KernelBackward, _SAVED[0], replaced=(3,), needs_incoming=False)
_FIXED = Passes(_FixedForward, _FixedBackward, _SAVED[1], needs_incoming=False)
CUDA_SCALAR, CUDA_FIXED = with_padded_heads(_SCALAR), with_padded_heads(_FIXED)
