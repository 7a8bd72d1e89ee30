"""Launches of the operator's kernels: shapes, grids and outputs, for one shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from zeco_train.ops.gla.kernels.input_grads import input_grads_kernel
from zeco_train.ops.gla.kernels.intra import intra_grads_kernel, scores_kernel
from zeco_train.ops.gla.kernels.outputs import outputs_kernel
from zeco_train.ops.gla.kernels.states import chunk_states_kernel, correct_starts_kernel, join_segments_kernel
from zeco_train.ops.gla.kernels.tuning import GlaTuning

CHUNK = 64
# CUDA's limit on the second and third dimension of a grid.
MOST_HEADS = 65_535
# Tiles of the gradient kernels, and of `scores_kernel` along K, have a verified minimum width; columns beyond K are
# zeros. In bf16, tiles of 32 keys make Triton 3.6 compile intra_grads_kernel to wrong gradients (K 32) or illegal
# memory accesses (K 64), whether joined or not; scores_kernel was correct with them when not joined, and
# input_grads_kernel was not tried with them.
NARROWEST_GRADS = {torch.bfloat16: 64, torch.float32: 32}
NARROWEST_SCORES = 32
NARROWEST_JOINED = 64
# Chunks of a program for those that are not mild; without any, it ends after one check.
GROUP = 4


@dataclass(frozen=True)
class LocalStates:
    """States at chunk boundaries, each from the zero start of its segment, and the quantities that join segments.

    In reverse: gradients with respect to the states after the chunks, from the zero end of the segment.

    Attributes:
        states: [N, B, H, K, V] in the dtype of the inputs.
        log_decays: [N, B, H, K] fp32, log-decay from the segment's start to each boundary.
        starts: [J, B, H, K, V] fp32, states at segment starts: from a zero start of the rank, until
            `GlaKernels.correct` replaces them by the true ones.
        start_decays: [J, B, H, K] fp32, log-decay from the rank's start to each segment's.
        state: [B, H, K, V] fp32, S_loc, or D_loc. log_decay: [B, H, K] fp32, G_tot.
    """

    states: Tensor
    log_decays: Tensor
    starts: Tensor
    start_decays: Tensor
    state: Tensor
    log_decay: Tensor


class GlaKernels:
    """Kernel launches for tokens of one shape and dtype; all tensor arguments must be contiguous.

    Args:
        k: [B, T, H, K]. v: [B, T, H, V].
        doc_ids: [T] int32, restarts through each token; None without documents.
        scale: factor of the outputs.
        tuning: tiles and launch options.
    """

    def __init__(self, k: Tensor, v: Tensor, doc_ids: Tensor | None, scale: float, tuning: GlaTuning) -> None:
        self.B, self.T, self.H, self.K = k.shape
        self.V = v.shape[-1]
        self.BH = self.B * self.H
        if self.BH > MOST_HEADS:
            raise ValueError(f"q: batch × heads = {self.BH}, a grid of CUDA has room for {MOST_HEADS}")
        self.num_chunks = triton.cdiv(self.T, CHUNK)
        self.device, self.dtype, self.scale = k.device, k.dtype, scale
        self.tuning, self.doc_ids = tuning, doc_ids
        # bf16 products are exact in any mode; tf32 alone would lose 3e-4 of fp32 inputs
        self.flags: dict[str, Any] = {"C": CHUNK, "DOCUMENTS": doc_ids is not None, "PRECISION": "tf32x3"}
        # A walk is sequential: as many segments as it takes to fill the chip.
        tiles = self._state_tiles(*self.tuning.local_states.tile(self.K, self.V))
        segments = max(1, min(self.num_chunks, triton.cdiv(self.tuning.programs, tiles * self.BH)))
        self.segment_chunks = triton.cdiv(self.num_chunks, segments)
        self.num_segments = triton.cdiv(self.num_chunks, self.segment_chunks)

    def _state_tiles(self, BK: int, BV: int) -> int:
        return triton.cdiv(self.K, BK) * triton.cdiv(self.V, BV)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def local_states(self, x: Tensor, y: Tensor, g: Tensor, *, b: Tensor | None, reverse: bool) -> LocalStates:
        """Walk each segment from zero, then join the segments.

        Args:
            x: k, or q in reverse.
            y: v, or do in reverse.
            g: log-decays.
            b: output for their cumulative sums inside chunks; None: g already holds those sums.
            reverse: from the last chunk to the first, for gradients.
        """
        heads = (self.B, self.H)
        local = LocalStates(
            states=self._new(*self.states_shape, dtype=self.dtype),
            log_decays=self._new(self.num_chunks, *heads, self.K),
            starts=self._new(*self.starts_shape),
            start_decays=self._new(self.num_segments, *heads, self.K),
            state=self._new(*heads, self.K, self.V),
            log_decay=self._new(*heads, self.K),
        )
        segment_decays = torch.empty_like(local.start_decays)
        options = self.tuning.local_states
        BK, BV = options.tile(self.K, self.V)
        chunk_states_kernel[(self._state_tiles(BK, BV), self.num_segments, self.BH)](
            x, y, g, b, self.doc_ids, local.states, local.log_decays, local.starts, segment_decays, self.scale,
            self.T, self.H, self.K, self.V, self.BH, self.num_chunks, self.segment_chunks,
            BK=BK, BV=BV, REVERSE=reverse, CUMULATED=b is None, **self.flags, **options.launch,
        )  # fmt: skip
        options = self.tuning.join
        BK, BV = options.tile(self.K, self.V)
        join_segments_kernel[(self._state_tiles(BK, BV), self.BH)](
            local.starts, segment_decays, local.start_decays, local.state, local.log_decay,
            self.K, self.V, self.BH, self.num_segments, BK=BK, BV=BV, REVERSE=reverse, **options.launch,
        )  # fmt: skip
        return local

    def correct(self, local: LocalStates, incoming: Tensor) -> None:
        """Update the states at segment starts to the true ones, given the rank's incoming state, or D_in."""
        options = self.tuning.join
        BK, BV = options.tile(self.K, self.V)
        correct_starts_kernel[(self._state_tiles(BK, BV), self.BH, self.num_segments)](
            local.starts, local.start_decays, incoming.contiguous(), self.K, self.V, self.BH, BK=BK, BV=BV,
            **options.launch,
        )  # fmt: skip

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(N, B, H, C, C)."""
        return self.num_chunks, self.B, self.H, CHUNK, CHUNK

    @property
    def states_shape(self) -> tuple[int, ...]:
        """(N, B, H, K, V)."""
        return self.num_chunks, self.B, self.H, self.K, self.V

    @property
    def starts_shape(self) -> tuple[int, ...]:
        """(J, B, H, K, V)."""
        return self.num_segments, self.B, self.H, self.K, self.V

    @property
    def _keys(self) -> int:
        return triton.next_power_of_2(self.K)

    def _joined(self, BK: int) -> bool:
        return self.dtype == torch.bfloat16 and BK >= NARROWEST_JOINED

    def scores(self, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
        """[N, B, H, C, C]; undefined above the diagonal."""
        scores, options = self._new(*self.scores_shape, dtype=self.dtype), self.tuning.scores
        BK, _ = options.tile(self.K, self.V, narrowest=NARROWEST_SCORES)
        scores_kernel[(self.num_chunks, self.BH)](
            q, k, b, self.doc_ids, scores, self.scale, self.T, self.H, self.K, self.BH, BK=BK, JOINED=self._joined(BK),
            KEYS=self._keys, **self.flags, **options.launch,
        )  # fmt: skip
        return scores

    def outputs(self, q: Tensor, v: Tensor, b: Tensor, scores: Tensor, local: LocalStates) -> Tensor:
        """o, [B, T, H, V]; replaces the states at chunk boundaries by the true ones."""
        o, options = torch.empty_like(v), self.tuning.outputs
        BK, BV = options.tile(self.K, self.V)
        outputs_kernel[(self.num_chunks * triton.cdiv(self.V, BV), self.BH)](
            q, v, b, self.doc_ids, scores, local.states, local.log_decays, local.starts, o, self.scale,
            self.T, self.H, self.K, self.V, self.BH, self.segment_chunks, BK=BK, BV=BV, **self.flags, **options.launch,
        )  # fmt: skip
        return o

    def intra_grads(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, do: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq; intra-chunk dk; q ⊙ dq − k ⊙ dk of that dk."""
        dq, dk, terms = torch.empty_like(q), torch.empty_like(k), torch.empty_like(b)
        for mild, options, chunks in ((True, self.tuning.mild_grads, 1), (False, self.tuning.intra_grads, GROUP)):
            BK, BV = options.tile(self.K, self.V, narrowest=NARROWEST_GRADS[self.dtype])
            intra_grads_kernel[(triton.cdiv(self.num_chunks, chunks), self.BH)](
                q, k, v, b, do, self.doc_ids, states, dq, dk, terms,
                self.scale, self.T, self.H, self.K, self.V, self.BH, BK=BK, BV=BV,
                JOINED=self._joined(BK), ONE_TILE=self.K <= BK, MILD=mild, CHUNKS=chunks, KEYS=self._keys,
                **self.flags, **options.launch,
            )  # fmt: skip
        return dq, dk, terms

    def input_grads(
        self,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        do: Tensor,
        scores: Tensor,
        states: Tensor,
        local: LocalStates,
        terms: Tensor,
        dk: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """dv; dg; completes dk."""
        dv, dg, options = torch.empty_like(v), torch.empty_like(b), self.tuning.input_grads
        BK, BV = options.tile(self.K, self.V, narrowest=NARROWEST_GRADS[self.dtype])
        input_grads_kernel[(self.num_chunks, self.BH)](
            k, v, b, do, self.doc_ids, scores, states, local.states, local.log_decays, local.starts, terms, dk, dv, dg,
            self.T, self.H, self.K, self.V, self.BH, self.segment_chunks, BK=BK, BV=BV,
            FUSED=self.tuning.fused and self.K <= BK, **self.flags, **options.launch,
        )  # fmt: skip
        return dv, dg
