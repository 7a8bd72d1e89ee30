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
from zeco_train.ops.passes import Passes
from zeco_train.ops.scalar_decay.kernels.launch import ScalarDecayKernels, decay_sums, options_for


class _KernelForward:
    def __init__(self, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None, *, fixed: bool) -> None:
        q, k, v, decays = operands
        self._q, self._k, self._v = (dense(x) for x in (q, k, v))
        tuning, self._fixed = options_for(k, v), fixed
        self._decays = dense(decays) if fixed else decay_sums(dense(decays), tuning.chunk)
        self._launcher = ScalarDecayKernels(k, v, self._decays, doc_ids, scale, tuning, fixed=fixed)
        self._segments = self._launcher.summaries(self._k, self._v, reverse=False)
        self.state, self.transition = self._segments.state, self._segments.log_decay

    def overlap(self) -> None:
        pass  # the walk that computes the outputs computes its scores too

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self._launcher.correct(self._segments, incoming_state, "incoming_state")
        return self._launcher.outputs(self._q, self._k, self._v, self._segments.starts)

    @property
    def saved(self) -> tuple[Tensor, ...]:
        return (self._segments.starts,) if self._fixed else (self._decays.transpose(1, 2), self._segments.starts)


class _KernelBackward:
    def __init__(
        self,
        operands: Sequence[Tensor],
        do: Tensor,
        saved: Sequence[Tensor],
        incoming_state: Tensor | None,
        scale: float,
        doc_ids: Tensor | None,
        *,
        fixed: bool,
    ) -> None:
        # Without `fixed` the fourth operand, g, has been replaced by its sums (`CUDA_SCALAR.replaced`).
        q, k, v, self._log_decays = operands
        self._q, self._k, self._v, self._do = (dense(x) for x in (q, k, v, do))
        (self._starts,) = saved
        decays = dense(self._log_decays if fixed else self._log_decays.transpose(1, 2))
        self._launcher = ScalarDecayKernels(k, v, decays, doc_ids, scale, options_for(k, v), fixed=fixed)
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


def _saved_like(operands: Sequence[Tensor], *, fixed: bool) -> tuple[Tensor, ...]:
    _, k, v, decays = operands
    # For the shapes only, which do not depend on documents or the scale.
    launcher = ScalarDecayKernels(k, v, decays, None, 1.0, options_for(k, v), fixed=fixed)
    starts = decays.new_empty(launcher.starts_shape)
    return (starts,) if fixed else (decays.new_empty(decays.mT.shape).mT, starts)


def _passes(fixed: bool) -> Passes:
    passes = Passes(
        partial(_KernelForward, fixed=fixed),
        partial(_KernelBackward, fixed=fixed),
        partial(_saved_like, fixed=fixed),
        replaced=() if fixed else (3,),
        needs_incoming=False,
    )
    return with_padded_heads(passes)


CUDA_SCALAR, CUDA_FIXED = _passes(fixed=False), _passes(fixed=True)
