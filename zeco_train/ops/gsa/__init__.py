"""The first pass of gated slot attention (Zhang et al., 2024, arXiv 2409.07146): tokens write their keys into slots.

    S_t = exp(g_t) ⊙_K S_{t-1} + s_t k_tᵀ,    o_t = scale · S_t q_t

q, k [B, T, H, V]; s, g, o [B, T, H, K], with K slots and V channels of a key; g is log-decays of the slots, fp32 or
fp64, finite and at most 0. The second pass is GLA's operator, whose queries are the softmax of o over the slots.

With keys s, values k and queries p, GLA has the same states, and its outputs are scale · S_tᵀ p_t. Hence

    Σ_t p_tᵀ o_t = Σ_t q_tᵀ (GLA's output)_t        for all p and q,

one number of q, k, s, g and p. Its gradients are those of both operators: o is GLA's dq for do = q; and for p = do, dq
here is GLA's output, and ds, dk and dg are its dk, dv and dg. So the passes are GLA's parts in other roles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.ops.chunks import matrices, to_chunks, to_tokens
from zeco_train.ops.gla import forward_flops
from zeco_train.ops.gla.chunked import CHUNKED, local_states
from zeco_train.ops.operator import KernelRule, Kind, Operator, OperatorTime
from zeco_train.ops.oracle import by_blocks
from zeco_train.ops.pairs import pair_grads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state


class _GsaForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._q, k, self._s, self._g = operands
        self._states = local_states(self._s, k, self._g, self.doc_ids)
        self.state, self.transition = self._states.state, self._states.log_decay

    def overlap(self) -> None:
        slots = to_chunks(self._s, self.state.dtype)
        self._queries = matrices(to_chunks(self._q, self.state.dtype))
        scores = torch.bmm(self._queries, self._states.values.mT).view(*slots.shape[:-1], -1)
        # The first argument is for the second result only, which is not wanted.
        self._o, _ = pair_grads(slots, slots, scores, self._g, self.doc_ids)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        # o_i = scale · (decay through i in its chunk ⊙ S[n] q_i + Σ_j (q_i · k_j) s_j ⊙ decay_ij), with the true S[n].
        check_state(incoming_state, "incoming_state", self.state.shape)
        states = self._states.boundaries.take_corrected(incoming_state)
        seen = torch.bmm(self._queries, matrices(states[:-1]).mT).view(self._o.shape)
        o = self._o.addcmul_(seen, self._states.decays.from_start).mul_(self.scale)
        return to_tokens(o, self._s.shape[1], self._s.dtype)


class _GsaBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, s, g = operands
        self._roles = self.do, s, k, g
        self._grads = CHUNKED.backward(self._roles, q, (), self.received, self.scale, self.doc_ids)
        self.state_grad = self._grads.state_grad

    def overlap(self) -> None:
        self._grads.overlap()
        self._outputs = CHUNKED.forward(self._roles, self.scale, self.doc_ids)
        self._outputs.overlap()

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        _, ds, dk, dg = self._grads.operand_grads(incoming_grad)
        return self._outputs.outputs(self.received), dk, ds, dg


def slot_step(q: Tensor, k: Tensor, s: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """`Operator.one_token`: q, k [B, 1, H, V] and s, g [B, 1, H, K] → o in the dtype of s."""
    heads = state.view(-1, *state.shape[-2:])
    query, key, slots, log_decay = (x.to(state.dtype).reshape(len(heads), 1, -1) for x in (q, k, s, g))
    heads.mul_(log_decay.exp().mT).baddbmm_(slots.mT, key)
    return torch.bmm(query * scale, heads.mT).view(s.shape).to(s.dtype)


def by_roles(
    q: Tensor, k: Tensor, s: Tensor, g: Tensor, *, scale: float | None, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """`Operator.oracle`: the gradient with respect to p of Σ_t q_tᵀ o_t, where o are GLA's exact outputs."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.enable_grad():
        p = torch.zeros_like(s, requires_grad=True)
        o, state = by_blocks(p, s, k, g, scale=scale, initial_state=initial_state)
        (grad,) = torch.autograd.grad((o * q).sum(), p, create_graph=True)
    return grad, state


class SlotAttention(Operator):
    """The operator; its outputs are as wide as the states are high."""

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, V): a row for each slot."""
        query, _, slots, _ = operands
        return slots.shape[0], slots.shape[2], slots.shape[3], query.shape[3]


GSA = SlotAttention(
    operands=("q", "k", "s", "g"),
    dims=("BTHV", "BTHV", "BTHK", "BTHK"),
    kind=Kind.diagonal,
    portable=Passes(_GsaForward, _GsaBackward),
    oracle=by_roles,
    one_token=slot_step,
    # The same products as GLA's, in other roles. dg is made of the outputs, which the backward pass computes again.
    forward_flops=forward_flops,
    recomputed_flops=forward_flops,
    about="The first pass of gated slot attention (Zhang et al. 2024, arXiv 2409.07146); its second pass is `gla`."
    "\n\n    S_t = exp(g_t) ⊙_K S_{t-1} + s_t k_tᵀ,    o_t = scale · S_t q_t",
    cuda="zeco_train.ops.gsa.kernels:CUDA",
    # A walk holds all slots. It may have more channels of keys, but the rule's limits are of either width.
    kernels=KernelRule(largest=(512, 512)),
    # 0.555 ms for 16,384 tokens and 4 heads on an H200; 0.31 of it forward, with GLA's pass 0.376 of 1.062 ms.
    time=OperatorTime("gsa", 8.47e-9, 0.31, 64, 512),
)
