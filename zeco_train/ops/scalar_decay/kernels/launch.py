"""Launches of these kernels: shapes, grids and outputs, for one shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from zeco_train.ops.gla.kernels.launch import MOST_HEADS
from zeco_train.ops.gla.kernels.states import correct_starts_kernel, join_segments_kernel
from zeco_train.ops.kernel_operands import sum_heads
from zeco_train.ops.scalar_decay.kernels.decays import decay_grads_kernel, decay_sums_kernel
from zeco_train.ops.scalar_decay.kernels.tuning import NARROWEST, ScalarDecayOptions, ScalarDecayTuning
from zeco_train.ops.scalar_decay.kernels.walk import summaries_kernel, walk_kernel

_HEADS_OF_SUMS = 16
# A chunk's decay that dg neglects, of the size of the operands' rounding: there what passes over the chunk is less than
# the error of the difference that it is computed as. With a decay of 2^-9 a chunk, emulated, 2^-12 has twice the error.
_NEGLIGIBLE = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class ScalarDecaySummaries:
    """The segments of a rank, joined.

    Attributes:
        starts: [J, B, H, K, V] fp32, states at segment starts (in reverse: gradients at their ends) from a zero start
            of the rank, until `ScalarDecayKernels.correct` replaces them by the true ones.
        start_decays: [J, B, H, K] fp32, log-decay from the rank's start to each segment's.
        state: [B, H, K, V] fp32, S_loc, or D_loc. log_decay: [B, H, K] fp32, G_tot.
    """

    starts: Tensor
    start_decays: Tensor
    state: Tensor
    log_decay: Tensor


@dataclass(frozen=True)
class DecayTerms:
    """What a walk leaves for dg, see `zeco_train.ops.scalar_decay.kernels.walk`.

    Attributes:
        borders: [N / span, B, H, V, K] in the dtype of the tokens, S, which the walk of dq writes and that of dk reads.
        sums: [tiles, B, H, T] fp32, q · dq or k · dk.
        state_sums: [tiles, B, H, T] fp32, k · dk from the state. boundary_terms: [tiles, N / span, B, H] fp32, <S, dS>.
            Only of the walk of dk.
    """

    borders: Tensor
    sums: Tensor
    state_sums: Tensor | None = None
    boundary_terms: Tensor | None = None


class ScalarDecayKernels:
    """Kernel launches for tokens of one shape and dtype; all tensor arguments must be contiguous.

    Args:
        k: [B, T, G, K]. v: [B, T, H, V].
        decays: [B, H, T] fp32, of `decay_sums`; or [H] fp32, the log-decays, if they are `fixed`.
        doc_ids: [T] int32, restarts through each token; None without documents.
        scale: factor of the outputs.
        tuning: tiles and launch options.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        decays: Tensor,
        doc_ids: Tensor | None,
        scale: float,
        tuning: ScalarDecayTuning,
        *,
        fixed: bool,
    ) -> None:
        self.B, self.T, self.G, self.K = k.shape
        self.H, self.V = v.shape[2:]
        self.BH = self.B * self.H
        if self.BH > MOST_HEADS:
            raise ValueError(f"v: batch × heads = {self.BH}, a grid of CUDA has room for {MOST_HEADS}")
        self.device, self.dtype, self.scale = k.device, k.dtype, scale
        self.decays, self.doc_ids, self.tuning, self.fixed = decays, doc_ids, tuning, fixed
        self.flags: dict[str, Any] = {
            "C": tuning.chunk, "FIXED": fixed, "DOCUMENTS": doc_ids is not None, "PRECISION": "tf32x3"
        }  # fmt: skip
        self.num_chunks = triton.cdiv(self.T, tuning.chunk)
        # A walk is sequential: as many segments as fill the chip at once; a few programs more would take twice as long.
        _, columns = self._tile(tuning.outputs, self.K, self.V)
        segments = max(1, tuning.programs // (triton.cdiv(self.V, columns) * self.BH))
        spans = triton.cdiv(self.num_chunks, tuning.span)
        self.segment_chunks = triton.cdiv(spans, min(segments, spans)) * tuning.span
        self.num_segments = triton.cdiv(self.num_chunks, self.segment_chunks)

    def _tile(self, options: ScalarDecayOptions, depth: int, width: int) -> tuple[int, int]:
        return options.tile(depth, width, NARROWEST[self.dtype])

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def starts_shape(self) -> tuple[int, ...]:
        """(J, B, H, K, V)."""
        return self.num_segments, self.B, self.H, self.K, self.V

    def summaries(self, keys: Tensor, values: Tensor, *, reverse: bool) -> ScalarDecaySummaries:
        """Walk each segment from zero, then join the segments: of k and v, or in reverse of q and do."""
        heads = self.B, self.H
        found = ScalarDecaySummaries(
            starts=self._new(*self.starts_shape),
            start_decays=self._new(self.num_segments, *heads, self.K),
            state=self._new(*heads, self.K, self.V),
            log_decay=self._new(*heads, self.K),
        )
        segment_decays, options = torch.empty_like(found.start_decays), self.tuning.summaries
        BK, BV = self._tile(options, self.K, self.V)
        summaries_kernel[(triton.cdiv(self.V, BV), self.BH, self.num_segments)](
            keys, values, self.decays, self.doc_ids, found.starts, segment_decays, self.scale,
            self.T, self.H, self.G, self.K, self.V, self.BH, self.num_chunks, self.segment_chunks,
            BK=BK, BV=BV, REVERSE=reverse, **self.flags, **options.launch,
        )  # fmt: skip
        tiles, BK, BV = self._join_tiles()
        join_segments_kernel[(tiles, self.BH)](
            found.starts, segment_decays, found.start_decays, found.state, found.log_decay,
            self.K, self.V, self.BH, self.num_segments, BK=BK, BV=BV, REVERSE=reverse, **self.tuning.join.launch,
        )  # fmt: skip
        return found

    def correct(self, found: ScalarDecaySummaries, incoming: Tensor) -> None:
        """Update the states at segment starts to the true ones, given the rank's incoming state, or D_in."""
        tiles, BK, BV = self._join_tiles()
        correct_starts_kernel[(tiles, self.BH, self.num_segments)](
            found.starts, found.start_decays, incoming.contiguous(), self.K, self.V, self.BH, BK=BK, BV=BV,
            **self.tuning.join.launch,
        )  # fmt: skip

    def _join_tiles(self) -> tuple[int, int, int]:
        widest = self.tuning.join.columns
        BK, BV = (min(widest, triton.next_power_of_2(dim)) for dim in (self.K, self.V))
        return triton.cdiv(self.K, BK) * triton.cdiv(self.V, BV), BK, BV

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        """o, [B, T, H, V], from the true states that segments start from."""
        return self._walk(self.tuning.outputs, q, k, v, starts, reverse=False)

    def value_grads(self, q: Tensor, k: Tensor, do: Tensor, grads: Tensor) -> Tensor:
        """dv, [B, T, H, V], from the true gradients at the segments' ends."""
        return self._walk(self.tuning.value_grads, k, q, do, grads, reverse=True)

    def query_grads(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor
    ) -> tuple[Tensor, DecayTerms | None]:
        """dq, [B, T, G, K]; unless decays are fixed also the terms of dg that it yields."""
        terms = None
        if not self.fixed:
            terms = DecayTerms(
                self._new(self._num_spans, self.B, self.H, self.V, self.K, dtype=self.dtype),
                self._row_sums(self.tuning.query_grads),
            )
        walked = self.tuning.query_grads, do, v, k, starts
        dq = self._walk(*walked, reverse=False, turned=True, extra=q, terms=terms)
        return sum_heads(dq, self.G), terms

    def key_grads(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, grads: Tensor, terms: DecayTerms | None
    ) -> tuple[Tensor, Tensor | None]:
        """dk, [B, T, G, K]; unless decays are fixed also dg, [B, T, H]."""
        walked = self.tuning.key_grads, v, do, q, grads
        if terms is None:
            return sum_heads(self._walk(*walked, reverse=True, turned=True), self.G), None
        sums, state_sums = (self._row_sums(self.tuning.key_grads) for _ in range(2))
        own = DecayTerms(terms.borders, sums, state_sums, self._new(sums.shape[0], self._num_spans, self.B, self.H))
        dk = self._walk(*walked, reverse=True, turned=True, extra=k, terms=own)
        return sum_heads(dk, self.G), self._decay_grads(terms, own)

    def _decay_grads(self, of_queries: DecayTerms, of_keys: DecayTerms) -> Tensor:
        dg = self._new(self.B, self.T, self.H)
        decay_grads_kernel[(self._num_spans, self.BH)](
            of_queries.sums, of_keys.sums, of_keys.state_sums, of_keys.boundary_terms, self.decays, self.doc_ids, dg,
            self.T, self.H, self.BH, self._num_spans, C=self.tuning.chunk, SPAN=self.tuning.span,
            QUERY_TILES=of_queries.sums.shape[0], KEY_TILES=of_keys.sums.shape[0],
            NEGLIGIBLE=_NEGLIGIBLE[self.dtype], DOCUMENTS=self.doc_ids is not None, num_warps=4,
        )  # fmt: skip
        return dg

    @property
    def _num_spans(self) -> int:
        return triton.cdiv(self.num_chunks, self.tuning.span)

    def _row_sums(self, options: ScalarDecayOptions) -> Tensor:
        return self._new(triton.cdiv(self.K, self._tile(options, self.V, self.K)[1]), self.B, self.H, self.T)

    def _walk(
        self,
        options: ScalarDecayOptions,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        *,
        reverse: bool,
        turned: bool = False,
        extra: Tensor | None = None,
        terms: DecayTerms | None = None,
    ) -> Tensor:
        (query_heads, depth), (value_heads, width) = queries.shape[2:], values.shape[2:]
        outputs = self._new(self.B, self.T, self.H, width, dtype=self.dtype)
        BD, BW = self._tile(options, depth, width)
        written = (None,) * 4 if terms is None else (terms.borders, terms.sums, terms.state_sums, terms.boundary_terms)
        walk_kernel[(triton.cdiv(width, BW), self.BH, self.num_segments)](
            queries, keys, values, extra, self.decays, self.doc_ids, starts, outputs, *written,
            self.scale, self.T, self.H, query_heads, value_heads, depth, width, self.BH,
            self.num_chunks, self.segment_chunks, BD=BD, BW=BW, SPAN=self.tuning.span,
            TURNED=turned, REVERSE=reverse, TERMS=terms is not None,
            **self.flags, **options.launch,
        )  # fmt: skip
        return outputs


def decay_sums(g: Tensor, chunk: int) -> Tensor:
    """[B, H, T] fp32: sums of g [B, T, H], contiguous, inside chunks."""
    B, T, H = g.shape
    sums = torch.empty((B, H, T), dtype=torch.float32, device=g.device)
    heads = min(_HEADS_OF_SUMS, triton.next_power_of_2(H))
    decay_sums_kernel[(triton.cdiv(T, chunk), B, triton.cdiv(H, heads))](g, sums, T, H, C=chunk, HEADS=heads)
    return sums
