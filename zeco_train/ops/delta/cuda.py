"""Delta rules on CUDA: the phases of one rank on Triton kernels, for bf16 and fp32 tokens.

Forward                                                        Backward
  sums of g; scores P and inverses T; W, U, k̃, q̄                 W, U, k̃, q̄ again
  states and transitions of segments → S_loc, M                  gradients of segments → D_loc
  | scan over ranks                                              | scan over ranks ‖ true states again
  true states that segments start from; outputs                  true gradients at segments' ends; dq, dk, dv, dg, dβ

States at chunk boundaries are operands of products, in the dtype of the tokens; sums, decays, and states and
transitions passed between segments or ranks are fp32. The forward pass saves P and T, in the dtype of the tokens, 64
numbers each a token and head; the decays' sums in place of g; and of each segment its transition and the true state
before it, in place of R.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from zeco_train.ops.delta.kernels.launch import DeltaKernels, decay_sums_of
from zeco_train.ops.delta.kernels.tuning import options_for
from zeco_train.ops.kernel_operands import dense, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state
from zeco_train.ops.seam import fold


class _KernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, v, *g, beta = operands
        q, k, v, beta = (dense(x) for x in (q, k, v, beta))
        tuning, self._gated = options_for(k), bool(g)
        self._sums = decay_sums_of(dense(g[0]), tuning) if g else _no_decay(beta)
        self._launcher = DeltaKernels(k, v, self._sums, beta, self.doc_ids, self.scale, tuning, gated=self._gated)
        self._scores, self._inverses = self._launcher.systems(q)
        self._operands = self._launcher.operands(q, self._inverses)
        self._states, self._transitions = self._launcher.summaries(self._operands)
        # A copy, since the segments' states are read again.
        self.state = _fold_all(self._states[0].clone(), self._states[1:], self._transitions[1:])[-1]

    @cached_property
    def transition(self) -> Tensor:
        # A copy, since the segments' transitions are saved, too.
        joined = self._transitions[0].clone()
        for later in self._transitions[1:]:
            joined = later @ joined
        return joined

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self.state.shape)
        # The state after the last segment is not needed.
        starts = torch.stack(_fold_all(incoming_state, self._states[:-1], self._transitions[:-1]))
        kept = self._scores, self._inverses, starts, self._transitions
        self.saved = (_like_g(self._sums), *kept) if self._gated else kept
        return self._launcher.outputs(self._operands, self._scores, starts)


class _KernelBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # The fourth operand, g, has been replaced by its sums (`CUDA_GATED.replaced`).
        q, k, v, *sums, beta = operands
        self._q, k, v, beta, self._do = (dense(x) for x in (q, k, v, beta, self.do))
        self._scores, self._inverses, self._starts, self._transitions = self.saved
        of_decays = dense(_like_g(sums[0])) if sums else _no_decay(beta)
        where, gated = (self.doc_ids, self.scale), bool(sums)
        self._launcher = DeltaKernels(k, v, of_decays, beta, *where, options_for(k), gated=gated)
        self._operands = self._launcher.operands(self._q, self._inverses)
        self._local = self._launcher.local_grads(self._operands, self._scores, self._do)
        *earlier, last = self._local
        self.state_grad = _fold_all(last, earlier[::-1], self._transitions[:-1].mT.unbind()[::-1])[-1]

    def overlap(self) -> None:
        # The true states again: they need no gradients of states.
        self._states, self._added = self._launcher.states(self._operands, self._starts)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        later = self._local[1:].unbind()[::-1], self._transitions[1:].mT.unbind()[::-1]
        ends = torch.stack(_fold_all(incoming_grad, *later)[::-1])
        grads, of_added = self._launcher.state_grads(self._operands, self._scores, self._do, ends)
        dq, dk, dv, dg, dbeta = self._launcher.input_grads(
            self._q, self._do, self._inverses, self._states, grads, self._added, of_added
        )
        return (dq, dk, dv, dbeta) if dg is None else (dq, dk, dv, dg, dbeta)


# The states [B, H, K, V] before and after each segment, the first of which is `start`.
def _fold_all(start: Tensor, states: Iterable[Tensor], transitions: Iterable[Tensor]) -> list[Tensor]:
    found = [start]
    for state, transition in zip(states, transitions, strict=True):
        found.append(fold(state, transition, found[-1]))
    return found


def _no_decay(beta: Tensor) -> Tensor:
    return beta.new_zeros(beta.mT.shape)


# Sums as the kernels read them in the shape of g, and back: [B, H, T] ↔ [B, T, H]; by channel as they are.
def _like_g(sums: Tensor) -> Tensor:
    return sums if sums.dim() == 4 else sums.mT


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, k, v, *g, beta = operands
    sums = torch.empty_like(g[0], memory_format=torch.contiguous_format) if g and g[0].dim() == 4 else beta.mT
    sums = sums if sums.dim() == 4 else sums.new_empty(sums.shape)
    # For the shapes only, which do not depend on documents or the scale.
    launcher = DeltaKernels(k, v, sums, beta, None, 1.0, options_for(k), gated=bool(g))
    pairs = (k.new_empty(launcher.pairs_shape) for _ in range(2))
    kept = *pairs, beta.new_empty(launcher.starts_shape), beta.new_empty(launcher.transitions_shape)
    return (_like_g(sums), *kept) if g else kept


_PASSES = Passes(_KernelForward, _KernelBackward, _saved_like, needs_incoming=False)
CUDA_DELTA = with_padded_heads(_PASSES)
CUDA_GATED = with_padded_heads(_PASSES._replace(replaced=(3,)))
