"""The selective scan by chunks in PyTorch: the passes of one rank.

    forward     states after chunks from zero → scan | R → states before chunks → h, y
    backward    gradients before chunks from zero, states before chunks again → scan | D_in → h and dh, gradients

With a_t = exp(Δ_t A), or 0 at a restart, and dh_t the gradient with respect to h_t from all outputs:

    dh_t = C_t do_t + a_{t+1} ⊙ dh_{t+1}        dC_t = Σ_h h_t do_t        dB_t = Σ_h dh_t Δ_t x_t
    dx_t = Δ_t Σ_k B_t dh_t + D do_t            dg_t = a_t ⊙ h_{t−1} ⊙ dh_t, with respect to g_t = Δ_t A
    dΔ_t = x_t Σ_k B_t dh_t + Σ_k A dg_t        dA = Σ_t Δ_t dg_t          dD = Σ_t x_t do_t

The true h and dh contain what other chunks and ranks add, so dg needs no boundary term. The decay from a token to a
chunk's end is the exponential of A times the sum of just those time steps: nothing is divided by a decay, and no sums
are subtracted. States of tokens, [B, T, H, K], are never in memory all at once: chunks are computed a few at a time.
Arithmetic and states are fp64 if x is, else fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import accumulate_in_chunks, chunk_size, fold_chunks, to_chunks, to_tokens
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state
from zeco_train.ops.position import find_restarts

# Most numbers of the states of tokens that are in memory at once, unless those of one chunk are more.
_MOST = 1 << 21


def _chunked(x: Tensor, dtype: torch.dtype) -> Tensor:
    # [B, T, D] → [N, B, C, D], zeros after the last token
    return to_chunks(x.unsqueeze(2), dtype).squeeze(2)


# Of sums from each token to the end along a dimension, those without the token itself.
def _later(sums: Tensor, dim: int) -> Tensor:
    return torch.cat([sums.narrow(dim, 1, sums.shape[dim] - 1), torch.zeros_like(sums.narrow(dim, 0, 1))], dim)


class _Chunks:
    """The operands by chunks of C tokens: x and time steps [N, B, C, H], B and C [N, B, C, K]."""

    def __init__(self, operands: Sequence[Tensor], doc_ids: Tensor | None) -> None:
        x, dt, A_log, B, C, D, dt_bias = operands
        self.dtype = accumulation_dtype(x.dtype)
        self.A, self.D = -A_log.to(self.dtype).exp(), D.to(self.dtype)
        self.logits = dt.to(self.dtype) + dt_bias.to(self.dtype)
        # Padded tokens have the time step 0: they write nothing, and nothing decays.
        self.x, self.steps, self.B, self.C = (_chunked(y, self.dtype) for y in (x, F.softplus(self.logits), B, C))
        self.restarts = None
        if doc_ids is not None:
            restarts = F.pad(find_restarts(doc_ids), (0, -x.shape[1] % chunk_size(x.shape[1])))
            self.restarts = restarts.view(-1, 1, self.x.shape[2])  # [N, 1, C]

    def groups(self) -> Iterator[slice]:
        """Ranges of chunks whose states of tokens fit into memory together."""
        count = max(1, _MOST // (self.x[0].numel() * self.B.shape[-1]))
        return (slice(n, n + count) for n in range(0, len(self.x), count))

    def decays(self, sums: Tensor, cut: Tensor | None) -> Tensor:
        """exp(A ⊙ sums of time steps [..., H]), 0 where `cut`: [..., H·K]."""
        found = (sums.unsqueeze(-1) * self.A).exp_().flatten(-2)
        return found if cut is None else found.masked_fill_(cut.unsqueeze(-1), 0.0)

    def of_tokens(self, n: slice) -> Tensor:
        """The decay of each token, [n, B, C, H·K]."""
        return self.decays(self.steps[n], None if self.restarts is None else self.restarts[n])

    def totals(self) -> Tensor:
        """Of whole chunks, [N, B, H·K]."""
        return self.decays(self.steps.sum(-2), None if self.restarts is None else self.restarts.any(-1))

    def log_decay(self) -> Tensor:
        """The shard's transition, [B, H, K]."""
        found = self.steps.sum((0, 2)).unsqueeze(-1) * self.A
        return found if self.restarts is None else found.masked_fill_(self.restarts.any(), float("-inf"))

    def own_states(self) -> Tensor:
        """What each chunk leaves from zero, [N, B, H·K]."""
        later = _later(self.steps.flip(2).cumsum(2).flip(2), 2)
        cut = None
        if self.restarts is not None:
            cut = _later(self.restarts.flip(-1).cumsum(-1).flip(-1), -1) > 0
        return self._sums(later, cut, self.steps * self.x, self.B)

    def own_grads(self, do: Tensor) -> Tensor:
        """The gradient of the state before each chunk from its own outputs, [N, B, H·K]; do [N, B, C, H]."""
        cut = None if self.restarts is None else self.restarts.cumsum(-1) > 0
        return self._sums(self.steps.cumsum(2), cut, do, self.C)

    def _sums(self, sums: Tensor, cut: Tensor | None, values: Tensor, weights: Tensor) -> Tensor:
        found = []
        for n in self.groups():
            decays = self.decays(sums[n], None if cut is None else cut[n]).unflatten(-1, self.A.shape)
            terms = decays.mul_(values[n].unsqueeze(-1)).mul_(weights[n].unsqueeze(-2))
            found.append(terms.sum(2).flatten(-2))
        return torch.cat(found)

    def states(self, n: slice, decays: Tensor, before: Tensor) -> Tensor:
        """Return h of each token, [n, B, C, H·K], from the states before the chunks, [n, B, H·K]."""
        h = ((self.steps[n] * self.x[n]).unsqueeze(-1) * self.B[n].unsqueeze(-2)).flatten(-2)
        h[:, :, 0].addcmul_(decays[:, :, 0], before)
        accumulate_in_chunks(h, decays.clone())
        return h

    def state_grads(self, n: slice, decays: Tensor, after: Tensor, do: Tensor) -> Tensor:
        """Return dh of each token, [n, B, C, H·K], from the gradients of the states after the chunks, [n, B, H·K]."""
        dh = (do.unsqueeze(-1) * self.C[n].unsqueeze(-2)).flatten(-2)
        dh[:, :, -1] += after
        # In reverse a token has the decay of the one after it.
        dh, next_decays = dh.flip(2), torch.cat([decays[:, :, :1], decays[:, :, 1:].flip(2)], 2)
        accumulate_in_chunks(dh, next_decays)
        return dh.flip(2)

    def by_state(self, x: Tensor) -> Tensor:
        """[..., H·K] → [..., H, K]."""
        return x.unflatten(-1, self.A.shape)


class _Forward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, self._chunks = operands[0], _Chunks(operands, self.doc_ids)
        self._own, self._totals = self._chunks.own_states(), self._chunks.totals()
        _, state = fold_chunks(self._own, self._totals)
        self.state, self.transition = self._chunks.by_state(state).unsqueeze(-1), self._chunks.log_decay()

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self.state.shape)
        chunks = self._chunks
        before, _ = fold_chunks(self._own, self._totals, incoming_state.flatten(1).to(chunks.dtype))
        y = chunks.D * chunks.x
        for n in chunks.groups():
            h = chunks.by_state(chunks.states(n, chunks.of_tokens(n), before[n]))
            y[n] += (h @ chunks.C[n].unsqueeze(-1)).squeeze(-1)
        return _to_tokens(y, self._x)


class _Backward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._operands, self._chunks = operands, _Chunks(operands, self.doc_ids)
        self._do, self._totals = _chunked(self.do, self._chunks.dtype), self._chunks.totals()
        self._own = self._chunks.own_grads(self._do)
        _, grad = fold_chunks(self._own.flip(0), self._totals.flip(0))
        self.state_grad = self._chunks.by_state(grad).unsqueeze(-1)

    def overlap(self) -> None:
        start = self.received.flatten(1).to(self._chunks.dtype)
        self._before, _ = fold_chunks(self._chunks.own_states(), self._totals, start)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        chunks, do = self._chunks, self._do
        end = incoming_grad.flatten(1).to(chunks.dtype)
        after = fold_chunks(self._own.flip(0), self._totals.flip(0), end)[0].flip(0)
        dx, dsteps, dA = chunks.D * do, torch.empty_like(do), torch.zeros_like(chunks.A)
        dB, dC = torch.empty_like(chunks.B), torch.empty_like(chunks.C)
        for n in chunks.groups():
            decays, x, steps = chunks.of_tokens(n), chunks.x[n], chunks.steps[n]
            h = chunks.states(n, decays, self._before[n])
            dh = chunks.state_grads(n, decays, after[n], do[n])
            dg = torch.cat([self._before[n].unsqueeze(2), h[:, :, :-1]], 2).mul_(decays).mul_(dh)
            h, dh, dg = map(chunks.by_state, (h, dh, dg))
            written = (dh @ chunks.B[n].unsqueeze(-1)).squeeze(-1)
            dx[n] += steps * written
            dsteps[n] = x * written + (dg * chunks.A).sum(-1)
            dA += (dg * steps.unsqueeze(-1)).sum((0, 1, 2))
            dB[n] = ((steps * x).unsqueeze(-2) @ dh).squeeze(-2)
            dC[n] = (do[n].unsqueeze(-2) @ h).squeeze(-2)
        x, dt, A_log, B, C, D, dt_bias = self._operands
        dlogits = torch.ops.aten.softplus_backward(_to_tokens(dsteps, chunks.logits), chunks.logits, 1, 20)
        of_all = dA * chunks.A, (chunks.x * do).sum((0, 1, 2)), dlogits.sum((0, 1))
        dA_log, dD, dbias = (grad.to(like.dtype) for grad, like in zip(of_all, (A_log, D, dt_bias), strict=True))
        return _to_tokens(dx, x), dlogits.to(dt.dtype), dA_log, _to_tokens(dB, B), _to_tokens(dC, C), dD, dbias


def _to_tokens(x: Tensor, like: Tensor) -> Tensor:
    # The inverse of `_chunked`.
    return to_tokens(x.unsqueeze(2), like.shape[1], like.dtype).squeeze(2)


CHUNKED = Passes(_Forward, _Backward)
