"""Shared by chunked operators in PyTorch: chunk layout, decays without division, and states at chunks' boundaries.

Tokens [B, T, H, D] are processed as chunks [N, B, H, C, D]: one step of the state recurrence touches contiguous memory,
and the C tokens of one head are contiguous, as matrix products want them.

Decays are products of `exp(g)`, all of them at most 1, without divisions or differences of sums, so a decay of e^-50 a
token is as exact as none at all. Blocks of 1, 2, 4, … tokens are merged in pairs, and the decay between a token of the
later block and one of the earlier block is

    (decay from the start of the later block through the later token) · (decay after the earlier token to that start)

where both factors grow with the blocks by one multiplication. Across a restart every product is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import CHUNK
from zeco_train.ops.position import find_restarts

# Minimum tokens per chunk.
_SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class ChunkDecays:
    """Decays inside the chunks, [N, B, H, C, K] each, in the dtype of the states."""

    from_start: Tensor  # from the chunk's first token through this one: decay of the state before, as a token sees it
    to_end: Tensor  # after this token through the chunk's last: of a token's contribution to the state after the chunk

    @property
    def total(self) -> Tensor:
        """[N, B, H, K], the decay of a state over the whole chunk."""
        return self.from_start[..., -1, :]


def chunk_size(num_tokens: int) -> int:
    """Tokens per chunk, a power of two; less than `CHUNK` only for short inputs, to save padding."""
    return min(CHUNK, max(_SMALLEST_CHUNK, 1 << (num_tokens - 1).bit_length()))


def block_sizes(chunk: int) -> list[int]:
    """Sizes of the blocks that are merged in pairs, 1, 2, 4, …, up to half a chunk."""
    return [1 << power for power in range(chunk.bit_length() - 1)]


def to_chunks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """View tokens as chunks, [B, T, H, D] → [N, B, H, C, D], zeros after the last token. Copies only to pad or cast."""
    x, chunk = x.to(dtype), chunk_size(x.shape[1])
    padding = -x.shape[1] % chunk
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


def to_tokens(x: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_chunks`, contiguous, [N, B, H, C, D] → [B, T, H, D]."""
    tokens = x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens]
    return tokens.to(dtype).contiguous()


def matrices(x: Tensor) -> Tensor:
    """[N, B, H, I, J] → [N·B·H, I, J], contiguous, for batched products."""
    return x.reshape(-1, x.shape[-2], x.shape[-1])


def halves(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Split the tokens of each pair of blocks, [..., C, D] → earlier and later, [..., C / (2·block), block, D] each."""
    earlier, later = x.unflatten(-2, (-1, 2, block)).unbind(-3)
    return earlier, later


def token_decays(g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The decay of each token, exp(g) or 0 at a restart, [B, T, H, K] → [N, B, H, C, K], contiguous."""
    decay = g.to(dtype).exp()
    if doc_ids is not None:
        decay.masked_fill_(find_restarts(doc_ids)[:, None, None], 0.0)
    padding = -g.shape[1] % chunk_size(g.shape[1])
    # A decay of 1: the state after the last chunk is then the state after the last token.
    if padding:
        decay = F.pad(decay, (0, 0, 0, 0, 0, padding), value=1.0)
    return to_chunks(decay, dtype).contiguous()


def merge_blocks(decays: ChunkDecays, block: int) -> None:
    """Merge pairs of blocks, in place: decays inside blocks of `block` tokens become those inside twice as large."""
    # in this order: the last decay of the later block must be that block's own when the earlier block takes it
    halves(decays.to_end, block)[0].mul_(halves(decays.from_start, block)[1][..., -1:, :])
    merge_from_start(decays.from_start, block)


def merge_from_start(from_start: Tensor, block: int) -> None:
    """`merge_blocks` for `from_start` only."""
    earlier, later = halves(from_start, block)
    later.mul_(earlier[..., -1:, :])


def accumulate_in_chunks(states: Tensor, from_start: Tensor) -> None:
    """Elementwise states of tokens [..., C, K], in place: each plus the decayed ones of the tokens before it.

    `from_start` is the decays of tokens, [..., C, K], overwritten by those from the chunk's first token through each.
    """
    for block in block_sizes(states.shape[-2]):
        earlier, later = halves(states, block)
        later.addcmul_(halves(from_start, block)[1], earlier[..., -1:, :])
        merge_from_start(from_start, block)


def fold_chunks(own: Tensor, decays: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Elementwise states before each chunk, [N, ...], and after all, [...], from what each leaves, and its decay.

    They start from zero, or from `start`.
    """
    before, state = torch.empty_like(own), torch.zeros_like(own[0]) if start is None else start
    for n, (decay, x) in enumerate(zip(decays.unbind(0), own.unbind(0), strict=True)):
        before[n] = state
        state = torch.addcmul(x, decay, state)
    return before, state


def chunk_decays(g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> ChunkDecays:
    """The decays inside whole chunks, from g [B, T, H, K]."""
    from_start = token_decays(g, doc_ids, dtype)
    decays = ChunkDecays(from_start, torch.ones_like(from_start))
    for block in block_sizes(from_start.shape[-2]):
        merge_blocks(decays, block)
    return decays


def chunk_decays_from_start(g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`chunk_decays` for `from_start` only."""
    from_start = token_decays(g, doc_ids, dtype)
    for block in block_sizes(from_start.shape[-2]):
        merge_from_start(from_start, block)
    return from_start


def chunk_log_decays(g: Tensor, doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, B, H, K], summed log-decay of each chunk; −inf if it contains a restart."""
    log_decays = to_chunks(g, dtype).sum(-2)
    if doc_ids is not None:
        restarts = find_restarts(doc_ids)
        chunk = chunk_size(restarts.numel())
        restarts = F.pad(restarts, (0, -restarts.numel() % chunk)).view(-1, chunk).any(-1)
        log_decays.masked_fill_(restarts[:, None, None, None], float("-inf"))
    return log_decays


def add_later_tokens(x: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Reversed cumulative sum over the tokens of each chunk, [N, B, H, C, D], in place, not past a restart."""
    if doc_ids is not None:
        # Contributions from past a restart add up to 0, but only within the rounding of another document's numbers.
        chunk = chunk_size(doc_ids.numel())
        # Padding belongs to the last document, so that the chunk's boundary term, in its last row, reaches it.
        padding = doc_ids[-1:].expand(-doc_ids.numel() % chunk)
        doc_ids = torch.cat([doc_ids, padding]).view(-1, 1, 1, chunk, 1)
    for block in block_sizes(x.shape[-2]):
        earlier, later = halves(x, block)
        # The first token of the later block already has the sum over its block.
        sums = later[..., :1, :]
        if doc_ids is not None:
            earlier_ids, later_ids = halves(doc_ids, block)
            sums = sums * (earlier_ids == later_ids[..., :1, :])
        earlier.add_(sums)
    return x


# States at the boundaries of chunks, or their gradients: what operators with a diagonal transition compute first. A
# boundary is the place before a chunk or after the last one: N chunks have N + 1 boundaries, n = 0 … N.


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
