"""States at the boundaries of chunks, or their gradients: what operators with a diagonal transition compute first.

A boundary is the place before a chunk or after the last one: N chunks have N + 1 boundaries, n = 0 … N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops.chunks import matrices


@dataclass(frozen=True)
class BoundaryStates:
    """States at all boundaries from a zero start, or their gradients from a zero end."""

    states: Tensor  # [N + 1, B, H, K, …, V], in the accumulation dtype
    # [N + 1, …], to be broadcast to the states: summed g between the zero start (or end) and each boundary, −inf past a
    # restart. Summed from that side: a difference would lose digits, and is NaN at a restart.
    log_decays: Tensor

    def take_corrected(self, incoming: Tensor) -> Tensor:
        """The true states, S[n] + exp(log_decays[n]) ⊙ incoming, [B, H, K, …, V].

        They overwrite `states`, the largest tensor of the operator.
        """
        return self.states.addcmul_(self.log_decays.exp(), incoming.to(self.states.dtype))


def accumulate_states(
    keys: Tensor, values: Tensor, decays: Tensor, log_decays: Tensor, *, reverse: bool
) -> BoundaryStates:
    """The states at all boundaries: the only loop over chunks.

        S[0] = 0,    S[n+1] = decays[n] ⊙ S[n] + Σ_j k_j v_jᵀ over chunk n
        S[N] = 0,    S[n] = decays[n] ⊙ S[n+1] + Σ_j k_j v_jᵀ over chunk n                       (reverse)

    Args:
        keys: [N, B, H, C, K], queries for gradients.
        values: [N, B, H, C, …, V]. Keys or values are decayed already to the end of their chunk (reverse: its start).
        decays: [N, …], of a state over the whole chunk, to be broadcast to [N, B, H, K, …, V].
        log_decays: the logarithms of `decays`, −inf for 0.
        reverse: from the end.
    """
    num_chunks, *outer, _, key_dim = keys.shape
    states = keys.new_empty(num_chunks + 1, *outer, key_dim, *values.shape[4:])
    filled = states[:-1] if reverse else states[1:]
    # `matrices` of contiguous states is a view, so this writes into them.
    torch.bmm(matrices(keys).mT, matrices(values.flatten(4)), out=matrices(filled.flatten(4)))
    states[-1 if reverse else 0].zero_()
    zero = torch.zeros_like(log_decays[:1])
    if reverse:
        for n in reversed(range(num_chunks)):
            states[n].addcmul_(decays[n], states[n + 1])
        return BoundaryStates(states, torch.cat([log_decays.flip(0).cumsum(0).flip(0), zero]))
    for n, decay in enumerate(decays.unbind(0)):
        states[n + 1].addcmul_(decay, states[n])
    return BoundaryStates(states, torch.cat([zero, log_decays.cumsum(0)]))
