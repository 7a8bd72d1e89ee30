"""The first pass of gated slot attention on CUDA: GLA's launches in the roles of `zeco_train.ops.gsa`.

Of its own it has the kernel of the outputs. They are sums over the channels of keys, which a walk over chunks has in
different programs, so it reads the states before the chunks from memory. Saved for the backward pass are the true
states that segments start from; it makes everything else again, and has dq of the walk that finds the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit
from zeco_train.ops.gla.kernels.grads import load_states
from zeco_train.ops.gla.kernels.intra import decayed
from zeco_train.ops.gla.kernels.launch import CHUNK, NARROWEST, GlaKernelBackward, GlaKernels, options_for
from zeco_train.ops.gla.kernels.tiles import decay, head_offset, load_doc_ids, load_tile, split_pairs, store_tile
from zeco_train.ops.kept import TileOptions
from zeco_train.ops.kernel_operands import dense, with_padded_heads
from zeco_train.ops.passes import ForwardBase, Passes

# Tiles along K and V.
_OPTIONS = {torch.bfloat16: TileOptions(64, 64, 8, 3), torch.float32: TileOptions(32, 32, 4, 1)}


@jit
def outputs_kernel(
    q,  # [B, T, H, V]
    k,  # [B, T, H, V]
    s,  # [B, T, H, K]
    slots,  # [B, T, H, K]: k* of `operands_kernel` for the keys s, as the next two
    b,  # [B, T, H, K] fp32, sums of g inside chunks
    kinds,  # [N, B, H] int32
    doc_ids,  # [T] int32, read with DOCUMENTS
    states,  # [N, B, H, V, K]: X of the walk
    o,  # [B, T, H, K], written
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes BK columns of the outputs of one chunk of one head: dq of `grads` for do = q and v = k."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    first_key = (tl.program_id(0) % tiles) * BK
    chunk = tl.program_id(0) // tiles
    batch_head = tl.program_id(1)
    index = chunk.to(tl.int64) * BH + batch_head
    start = chunk * C
    rows = tl.arange(0, C)
    q += head_offset(batch_head, T, H, V)
    k += head_offset(batch_head, T, H, V)
    s += head_offset(batch_head, T, H, K)
    slots += head_offset(batch_head, T, H, K)
    b += head_offset(batch_head, T, H, K)
    o += head_offset(batch_head, T, H, K)
    pairs = tl.zeros([C, C], tl.float32)
    seen = tl.zeros([C, BK], tl.float32)
    for first_value in range(0, V, BV):
        queries = load_tile(q, start, T, H, V, first_value, C, BV)
        keys = load_tile(k, start, T, H, V, first_value, C, BV)
        state = load_states(states, index, K, V, first_key, first_value, BK, BV)
        seen = tl.dot(queries, state, seen, input_precision=PRECISION)
        pairs = tl.dot(queries, tl.trans(keys), pairs, input_precision=PRECISION)
    pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
    sums = load_tile(b, start, T, H, K, first_key, C, BK)
    kind = tl.load(kinds + index)
    if kind > 0:
        own = load_tile(slots, start, T, H, K, first_key, C, BK)
        seen = tl.dot(pairs.to(own.dtype), own, seen, input_precision=PRECISION)
        middle = tl.minimum(start + C // 2, T) - 1
        columns = first_key + tl.arange(0, BK)
        reference = tl.load(b + middle.to(tl.int64) * H * K + columns, mask=columns < K, other=0.0)
        seen *= decay(sums - reference[None, :])
    else:
        from_start = decay(sums)
        if DOCUMENTS:
            ids, before, _ = load_doc_ids(doc_ids, start, T, C)
            from_start = tl.where((ids == before)[:, None], from_start, 0.0)
            pairs = tl.where(ids[:, None] == ids[None, :], pairs, 0.0)
        own = load_tile(s, start, T, H, K, first_key, C, BK)
        self = tl.sum(tl.where(rows[:, None] == rows[None, :], pairs, 0.0), axis=1)
        seen = seen * from_start + self[:, None] * own.to(tl.float32)
        # log₂ C sizes of blocks, see `intra`; only pairs below the diagonal are left, so queries lie in later blocks
        for shift in range(tl.where(kind < 0, 0, 6)):
            is_query, factor, tokens = decayed(
                b, sums, own, own, own, shift, start, T, H, K, first_key, C, BK, JOINED=False
            )
            split = tl.where(split_pairs(shift, C), pairs, 0.0).to(tokens.dtype)
            products = tl.dot(split, tokens, input_precision=PRECISION)
            seen += tl.where(is_query[:, None], factor * products, 0.0)
    store_tile(o, seen * scale, start, T, H, K, first_key, C, BK)


class _GsaKernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._q, self._k, self._s, g = (dense(x) for x in operands)
        self._launcher = GlaKernels(self._s, self._k, self.doc_ids, self.scale, options_for(self._s))
        self._b = torch.empty_like(g)
        # Of the slots in place of queries, too: only k* is read.
        self._operands = self._launcher.operands(self._s, self._s, g, self._b)
        self._segments = self._launcher.segments(self._operands, self._k, reverse=False)
        self.state, self.transition = self._segments.state, self._segments.log_decay

    def outputs(self, incoming_state: Tensor) -> Tensor:
        launcher, options = self._launcher, _OPTIONS[self._s.dtype]
        launcher.correct(self._segments, incoming_state, "incoming_state")
        self.saved = (self._segments.starts,)
        states, o = launcher.states(self._operands, self._k, self._segments), torch.empty_like(self._s)
        BK, BV = options.tile(launcher.K, launcher.V, narrowest=NARROWEST[self._s.dtype])
        outputs_kernel[(launcher.num_chunks * cdiv(launcher.K, BK), launcher.BH)](
            self._q, self._k, self._s, self._operands.keys, self._b, self._operands.kinds, self.doc_ids, states, o,
            self.scale, launcher.T, launcher.H, launcher.K, launcher.V, launcher.BH, C=CHUNK, BK=BK, BV=BV,
            **launcher.flags, **options.launch,
        )  # fmt: skip
        return o


class _GsaKernelBackward(GlaKernelBackward):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # By GLA's names: its queries are the gradients here, and its gradients the queries.
        self._do, self._v, self._k, g = (dense(x) for x in operands)
        self._q, (self._starts,) = dense(self.do), self.saved
        self._launcher = GlaKernels(self._k, self._v, self.doc_ids, self.scale, options_for(self._k))
        self._b = torch.empty_like(g)
        self._operands = self._launcher.operands(self._q, self._k, g, self._b)
        self._segments = self._launcher.segments(self._operands, self._do, reverse=True)
        self.state_grad = self._segments.state

    def overlap(self) -> None:
        self._scores = self._launcher.scores(self._q, self._k, self._b, self._operands)
        self._states, segments = self._launcher.new_states(), replace(self._segments, starts=self._starts)
        self._dq = self._launcher.outputs(self._operands, self._v, self._scores, segments, states=self._states)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        _, ds, dk, dg = super().operand_grads(incoming_grad)
        return self._dq, dk, ds, dg


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, k, s, _ = operands
    launcher = GlaKernels(s, k, None, 1.0, options_for(s))
    return (s.new_empty(launcher.starts_shape, dtype=torch.float32),)


CUDA = with_padded_heads(
    Passes(_GsaKernelForward, _GsaKernelBackward, _saved_like, needs_incoming=False), values=(0, 1)
)
