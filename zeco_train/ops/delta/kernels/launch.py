"""Launches of these kernels: shapes, grids and outputs, for one shape and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from zeco_train.ops.delta.kernels.grads import grads_kernel
from zeco_train.ops.delta.kernels.systems import channel_sums_kernel, operands_kernel, systems_kernel
from zeco_train.ops.delta.kernels.tuning import NARROWEST, DeltaTuning
from zeco_train.ops.delta.kernels.walks import forward_walk_kernel, reverse_walk_kernel
from zeco_train.ops.gla.kernels.launch import CHUNK, GROUP, MOST_HEADS
from zeco_train.ops.kept import TileOptions
from zeco_train.ops.kernel_operands import sum_heads
from zeco_train.ops.scalar_decay.kernels.launch import decay_sums


@dataclass(frozen=True)
class WalkOperands:
    """The operands of the walks, see `zeco_train.ops.delta.kernels.systems.operands_kernel`."""

    w: Tensor  # [B, T, H, K]
    u: Tensor  # [B, T, H, V]
    end_keys: Tensor  # [B, T, H, K]
    queries: Tensor  # [B, T, H, K]
    survival: Tensor  # [N, B, H, K] fp32


class DeltaKernels:
    """Kernel launches for tokens of one shape and dtype; all tensor arguments must be contiguous.

    `gated`: the gradient of the decays is wanted.
    """

    def __init__(
        self,
        k: Tensor,  # [B, T, G, K]
        v: Tensor,  # [B, T, H, V]
        sums: Tensor,  # [B, T, H, K] fp32, or [B, H, T], of `decay_sums_of`
        beta: Tensor,  # [B, T, H] fp32
        doc_ids: Tensor | None,  # [T] int32
        scale: float,
        tuning: DeltaTuning,
        *,
        gated: bool,
    ) -> None:
        self.k, self.v, self.sums, self.beta, self.doc_ids = k, v, sums, beta, doc_ids
        self.B, self.T, self.G, self.K = k.shape
        self.H, self.V = v.shape[2:]
        self.BH = self.B * self.H
        if self.BH > MOST_HEADS:
            raise ValueError(f"v: batch × heads = {self.BH}, a grid of CUDA has room for {MOST_HEADS}")
        self.device, self.dtype, self.scale, self.tuning, self.gated = k.device, k.dtype, scale, tuning, gated
        self.by_channel = sums.dim() == 4
        self.flags: dict[str, Any] = {"C": CHUNK, "PRECISION": "tf32x3"}
        self.pair_flags = {**self.flags, "BY_CHANNEL": self.by_channel, "DOCUMENTS": doc_ids is not None}
        self.num_chunks = triton.cdiv(self.T, CHUNK)
        # A walk is sequential: as many segments as fill the chip at once; a few programs more would take twice as long.
        _, columns = self._walk_tile(tuning.outputs)
        segments = tuning.programs // (triton.cdiv(self.V, columns) * self.BH)
        # Walks of N / J chunks and J joins, one after the other: the sum is least where both take as long.
        balanced = int(math.sqrt(self.num_chunks / tuning.joining))
        segments = max(1, min(segments, balanced, self.num_chunks))
        self.segment_chunks = triton.cdiv(self.num_chunks, segments)
        self.num_segments = triton.cdiv(self.num_chunks, self.segment_chunks)
        # (N, B, H, C, C), (N, B, H, K, V), (J, B, H, K, V) and (J, B, H, K, K).
        self.pairs_shape = self.num_chunks, self.B, self.H, CHUNK, CHUNK
        self.states_shape = self.num_chunks, self.B, self.H, self.K, self.V
        self.starts_shape = self.num_segments, self.B, self.H, self.K, self.V
        self.transitions_shape = self.num_segments, self.B, self.H, self.K, self.K

    def _tile(self, options: TileOptions) -> tuple[int, int]:
        return options.tile(self.K, self.V, NARROWEST[self.dtype])

    def _walk_tile(self, options: TileOptions) -> tuple[int, int]:
        BK, BV = self._tile(options)
        assert self.K <= BK
        return BK, BV

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _by_token(self, width: int) -> Tensor:
        return self._new(self.B, self.T, self.H, width, dtype=self.dtype)

    def systems(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Scores P, with the scale, and inverses T [N, B, H, C, C], in the dtype of the tokens; q [B, T, G, K]."""
        scores, inverses = (self._new(*self.pairs_shape, dtype=self.dtype) for _ in range(2))
        options = self.tuning.systems
        BK, _ = self._tile(options)
        systems_kernel[(self.num_chunks, self.BH)](
            q, self.k, self.sums, self.beta, self.doc_ids, scores, inverses, self.scale,
            self.T, self.H, self.G, self.K, self.BH, BK=BK, ONE_LAYOUT=BK == CHUNK,
            KEYS=triton.next_power_of_2(self.K), SOLVING="tf32" if self.dtype == torch.bfloat16 else "tf32x3",
            **self.pair_flags, **options.launch,
        )  # fmt: skip
        return scores, inverses

    def operands(self, q: Tensor, inverses: Tensor) -> WalkOperands:
        """The operands of the walks."""
        found = WalkOperands(
            w=self._by_token(self.K),
            u=self._by_token(self.V),
            end_keys=self._by_token(self.K),
            queries=self._by_token(self.K),
            survival=self._new(self.num_chunks, self.B, self.H, self.K),
        )
        options = self.tuning.operands
        BK, BV = self._tile(options)
        operands_kernel[(self.num_chunks, self.BH)](
            q, self.k, self.v, self.sums, self.beta, self.doc_ids, inverses,
            found.w, found.u, found.queries, found.end_keys, found.survival, self.scale,
            self.T, self.H, self.G, self.K, self.V, self.BH, BK=BK, BV=BV, **self.pair_flags, **options.launch,
        )  # fmt: skip
        return found

    def summaries(self, operands: WalkOperands) -> tuple[Tensor, Tensor]:
        """Of each segment its state from zero, `starts_shape`, and its transition, `transitions_shape`."""
        states, transitions = self._new(*self.starts_shape), self._new(*self.transitions_shape)
        self._forward(self.tuning.summaries, operands, totals=states, transitions=transitions)
        return states, transitions

    def outputs(self, operands: WalkOperands, scores: Tensor, starts: Tensor) -> Tensor:
        """O, [B, T, H, V], from the true states that segments start from."""
        o = self._by_token(self.V)
        self._forward(self.tuning.outputs, operands, scores=scores, starts=starts, o=o)
        return o

    def states(self, operands: WalkOperands, starts: Tensor) -> tuple[Tensor, Tensor]:
        """True states before the chunks [N, B, H, K, V], and new values [B, T, H, V], in the dtype of the tokens."""
        states, added = self._new(*self.states_shape, dtype=self.dtype), self._by_token(self.V)
        self._forward(self.tuning.states, operands, starts=starts, states=states, added=added)
        return states, added

    def _forward(
        self,
        options: TileOptions,
        operands: WalkOperands,
        *,
        scores: Tensor | None = None,
        starts: Tensor | None = None,
        totals: Tensor | None = None,
        transitions: Tensor | None = None,
        o: Tensor | None = None,
        states: Tensor | None = None,
        added: Tensor | None = None,
    ) -> None:
        BK, BV = self._walk_tile(options)
        # Without starts, of the values and then of the transition.
        tiles = triton.cdiv(self.V, BV) + (triton.cdiv(self.K, BV) if starts is None else 0)
        forward_walk_kernel[(tiles, self.BH, self.num_segments)](
            operands.w, operands.u, operands.end_keys, operands.survival, operands.queries, scores, starts,
            totals, transitions, o, states, added, self.T, self.H, self.K, self.V, self.BH, self.num_chunks,
            self.segment_chunks, BK=BK, BV=BV, SUMMARIES=starts is None, OUTPUTS=o is not None,
            STATES=states is not None, **self.flags, **options.launch,
        )  # fmt: skip

    def local_grads(self, operands: WalkOperands, scores: Tensor, do: Tensor) -> Tensor:
        """Gradients of the states before the segments, from 0 after them, `starts_shape`."""
        totals = self._new(*self.starts_shape)
        self._reverse(operands, scores, do, totals=totals)
        return totals

    def state_grads(self, operands: WalkOperands, scores: Tensor, do: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """True gradients of the states after the chunks [N, B, H, K, V], and of the new values [B, T, H, V].

        `ends` are those of the states after the segments.
        """
        grads, of_added = self._new(*self.states_shape, dtype=self.dtype), self._by_token(self.V)
        self._reverse(operands, scores, do, ends=ends, grads=grads, of_added=of_added)
        return grads, of_added

    def _reverse(
        self,
        operands: WalkOperands,
        scores: Tensor,
        do: Tensor,
        *,
        ends: Tensor | None = None,
        totals: Tensor | None = None,
        grads: Tensor | None = None,
        of_added: Tensor | None = None,
    ) -> None:
        options = self.tuning.reverse
        BK, BV = self._walk_tile(options)
        reverse_walk_kernel[(triton.cdiv(self.V, BV), self.BH, self.num_segments)](
            operands.w, operands.end_keys, operands.survival, operands.queries, scores, do, ends, totals, grads,
            of_added, self.T, self.H, self.K, self.V, self.BH, self.num_chunks, self.segment_chunks, BK=BK, BV=BV,
            STATES=ends is not None, **self.flags, **options.launch,
        )  # fmt: skip

    def input_grads(
        self,
        q: Tensor,
        do: Tensor,
        inverses: Tensor,
        states: Tensor,
        grads: Tensor,
        added: Tensor,
        of_added: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """dq, dk, dv, dg (None unless gated) and dβ."""
        options = self.tuning.grads
        BK, BV = self._tile(options)
        tiles = triton.cdiv(self.K, BK)
        dq, dk = (self._by_token(self.K) for _ in range(2))
        dv, dbeta = self._by_token(self.V), self._new(tiles, self.B, self.T, self.H)
        dg = None
        if self.gated:
            dg = torch.empty_like(self.sums) if self.by_channel else torch.empty_like(dbeta)
        for mild, chunks in ((True, 1), (False, GROUP)) if self.by_channel else ((True, 1),):
            grads_kernel[(triton.cdiv(self.num_chunks, chunks) * tiles, self.BH)](
                q, self.k, self.v, self.sums, self.beta, do, self.doc_ids, inverses, states, grads, added, of_added,
                dq, dk, dv, dg, dbeta, self.scale, self.T, self.B, self.H, self.G, self.K, self.V, self.BH,
                BK=BK, BV=BV, GATED=self.gated, ONE_LAYOUT=BK == CHUNK, MILD=mild, CHUNKS=chunks,
                KEYS=triton.next_power_of_2(self.K), **self.pair_flags, **options.launch,
            )  # fmt: skip
        if dg is not None and not self.by_channel:
            dg = dg.sum(0)
        return sum_heads(dq, self.G), sum_heads(dk, self.G), dv, dg, dbeta.sum(0)


def decay_sums_of(g: Tensor, tuning: DeltaTuning) -> Tensor:
    """Sums of g inside chunks, fp32: [B, T, H, K] → the same shape, [B, T, H] → [B, H, T]; g contiguous."""
    if g.dim() == 3:
        return decay_sums(g, CHUNK)
    B, T, H, K = g.shape
    sums, options = torch.empty_like(g), tuning.channel_sums
    BK, _ = options.tile(K, K)
    # three bf16 parts are exact; the interpreter, which takes fp32 tokens, has no bf16 products
    parts = 0 if triton.knobs.runtime.interpret else 3
    channel_sums_kernel[(triton.cdiv(T, CHUNK), B * H)](g, sums, T, H, K, C=CHUNK, BK=BK, PARTS=parts, **options.launch)
    return sums
