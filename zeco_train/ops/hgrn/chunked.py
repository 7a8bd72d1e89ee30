"""The elementwise recurrence by chunks in PyTorch: the passes of one rank (docs/mathematics.md).

    forward     states inside chunks from a zero start, and before chunks → scan | R → h
    backward    gradients inside chunks from a zero end → scan | h again | D_in → dx, dg

With f_t = exp(g_t), or 0 at a restart, and dh_t the gradient with respect to h_t from all outputs:

    dh_t = do_t + f_{t+1} ⊙ dh_{t+1},    dx_t = dh_t,    dg_t = f_t ⊙ h_{t-1} ⊙ dh_t

The true h and dh contain what other chunks and ranks add, so dg needs no boundary term. Arithmetic and states are fp64
if x is, else fp32. Tokens by chunks are [N, B, H, C, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.chunks import (
    ChunkDecays,
    accumulate_in_chunks,
    block_sizes,
    chunk_log_decays,
    fold_chunks,
    halves,
    merge_blocks,
    to_chunks,
    to_tokens,
    token_decays,
)
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state


class _Local(NamedTuple):
    """Chunks from a zero start, or in reverse from a zero end."""

    inside: Tensor  # [N, B, H, C, K], h or dh from zero at the own chunk's start or end
    decays: Tensor  # [N, B, H, C, K], by which a token sees what its chunk starts, or ends, with
    others: Tensor  # [N, B, H, K], what each chunk starts, or ends, with: of this rank's other chunks alone
    log_decays: Tensor  # [N, B, H, K], of those other chunks together
    state: Tensor  # [B, H, K, 1], S_loc or D_loc
    transition: Tensor  # [B, H, K], of all chunks

    def corrected(self, incoming: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The true h or dh, in place of `inside`, and the true starts or ends of chunks, given R or D_in."""
        check_state(incoming, name, self.state.shape)
        ends = torch.addcmul(self.others, self.log_decays.exp(), incoming.squeeze(-1).to(self.others.dtype))
        return self.inside.addcmul_(self.decays, ends[..., None, :]), ends


def _local_states(x: Tensor, g: Tensor, doc_ids: Tensor | None) -> _Local:
    dtype = accumulation_dtype(x.dtype)
    from_start = token_decays(g, doc_ids, dtype)
    inside = to_chunks(x, dtype).clone(memory_format=torch.contiguous_format)
    accumulate_in_chunks(inside, from_start)
    log_decays = chunk_log_decays(g, doc_ids, dtype)
    before, state = fold_chunks(inside[..., -1, :], from_start[..., -1, :])
    prefix, transition = _sums(log_decays)
    return _Local(inside, from_start, before, prefix, state.unsqueeze(-1), transition)


def _local_grads(do: Tensor, g: Tensor, doc_ids: Tensor | None) -> _Local:
    dtype = accumulation_dtype(do.dtype)
    from_start = token_decays(g, doc_ids, dtype)
    decays = ChunkDecays(from_start, torch.ones_like(from_start))
    inside = to_chunks(do, dtype).clone(memory_format=torch.contiguous_format)
    for block in block_sizes(inside.shape[-2]):
        earlier, later = halves(inside, block)
        # The decay of the later block's first token, by which the state before it enters.
        first = halves(from_start, block)[1][..., :1, :]
        earlier.addcmul_(halves(decays.to_end, block)[0], first * later[..., :1, :])
        merge_blocks(decays, block)
    log_decays = chunk_log_decays(g, doc_ids, dtype)
    # Each chunk's gradient with respect to the state before it.
    to_starts = from_start[..., 0, :] * inside[..., 0, :]
    after, state = fold_chunks(to_starts.flip(0), decays.total.flip(0))
    suffix, transition = _sums(log_decays.flip(0))
    return _Local(inside, decays.to_end, after.flip(0), suffix.flip(0), state.unsqueeze(-1), transition)


def _sums(log_decays: Tensor) -> tuple[Tensor, Tensor]:
    """[N, B, H, K] → of the chunks before each one, [N, B, H, K], and of all, [B, H, K]."""
    sums = log_decays.cumsum(0)
    return torch.cat([torch.zeros_like(sums[:1]), sums[:-1]]), sums[-1].clone()


# All before the scan is needed for it: nothing overlaps it in the forward pass.
class _HgrnForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, g = operands
        self._local = _local_states(self._x, g, self.doc_ids)
        self.state, self.transition = self._local.state, self._local.transition

    def outputs(self, incoming_state: Tensor) -> Tensor:
        h, _ = self._local.corrected(incoming_state, "incoming_state")
        return to_tokens(h, self._x.shape[1], self._x.dtype)


class _HgrnBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, self._g = operands
        self._local = _local_grads(self.do, self._g, self.doc_ids)
        self.state_grad = self._local.state

    def overlap(self) -> None:
        h, starts = _local_states(self._x, self._g, self.doc_ids).corrected(self.received, "incoming_state")
        before = torch.cat([starts[..., None, :], h[..., :-1, :]], dim=-2)
        # f_t ⊙ h_{t-1}
        self._decayed = before.mul_(token_decays(self._g, self.doc_ids, h.dtype))

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        dh, _ = self._local.corrected(incoming_grad, "incoming_grad")
        dg, num_tokens = self._decayed.mul_(dh), self._x.shape[1]
        return to_tokens(dh, num_tokens, self._x.dtype), to_tokens(dg, num_tokens, self._g.dtype)


CHUNKED = Passes(_HgrnForward, _HgrnBackward)
