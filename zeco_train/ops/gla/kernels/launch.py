"""Gated linear attention on CUDA: launches, their tiles and options, and the passes of one rank, for bf16 and fp32.

Forward                                                        Backward
  decayed q and k; states of segments → S_loc, G_tot             gradients of segments → D_loc
  | scan over ranks ‖ scores inside chunks                       | scan over ranks ‖ states at chunks
  true states that segments start from; outputs                  true gradients at segments' ends, dv; dq, dk, dg

States at chunk boundaries are kept in the dtype of the inputs, as operands of matrix products; sums, decays and states
passed between segments or ranks are fp32. Saved for the backward pass are b, the sums of g inside chunks, in place of
g; in the dtype of the inputs the decayed q and k, and the scores, 64 numbers per token and head; and the true states
that segments start from. The kernels also run on a CPU under Triton's interpreter, in fp32.

Options change only the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeco_train.kernels import cdiv
from zeco_train.ops.gla.kernels.grads import other_grads_kernel, plain_grads_kernel
from zeco_train.ops.gla.kernels.intra import scores_kernel
from zeco_train.ops.gla.kernels.states import correct_starts_kernel, join_segments_kernel, operands_kernel, walk_kernel
from zeco_train.ops.kept import KeptOptions, Key, TileOptions
from zeco_train.ops.kernel_operands import dense, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state, keeps_states

# Largest K. A walk that computes outputs holds all K rows of its columns of the state.
LARGEST_HEAD_DIM = 512


@dataclass(frozen=True)
class GlaTuning:
    """Options of each kernel, by its name.

    Attributes:
        sums, walk, states: of the walks for the segments' sums, for o and dv, and for the states alone.
        programs: of a walk for o, at most, if there are segments: those that one wave has room for.
    """

    operands: TileOptions = TileOptions(64, 64, 4, 1)
    sums: TileOptions = TileOptions(64, 64, 4, 3)
    scores: TileOptions = TileOptions(64, 64, 4, 3)
    walk: TileOptions = TileOptions(LARGEST_HEAD_DIM, 64, 4, 2)
    states: TileOptions = TileOptions(64, 64, 4, 3)
    plain_grads: TileOptions = TileOptions(64, 64, 4, 3)
    other_grads: TileOptions = TileOptions(64, 64, 8, 3)
    join: TileOptions = TileOptions(64, 64, 4, 1)
    programs: int = 264


KEPT: dict[Key, GlaTuning] = {
    ((9, 0), torch.bfloat16, 64): GlaTuning(
        operands=TileOptions(32, 64, 4, 1, 128),
        scores=TileOptions(64, 64, 4, 1, 168),
        walk=TileOptions(LARGEST_HEAD_DIM, 128, 4, 2),
        programs=256,
    ),
    ((9, 0), torch.bfloat16, 128): GlaTuning(
        sums=TileOptions(64, 128, 4, 3),
        scores=TileOptions(128, 64, 4, 1),
        walk=TileOptions(LARGEST_HEAD_DIM, 128, 8, 3),
        programs=128,
    ),
    ((9, 0), torch.bfloat16, 256): GlaTuning(walk=TileOptions(LARGEST_HEAD_DIM, 128, 8, 2), programs=128),
    ((9, 0), torch.bfloat16, 512): GlaTuning(walk=TileOptions(LARGEST_HEAD_DIM, 64, 8, 1), programs=132),
    (None, torch.bfloat16, 128): GlaTuning(walk=TileOptions(LARGEST_HEAD_DIM, 64, 4, 1)),
    (None, torch.bfloat16, 256): GlaTuning(walk=TileOptions(LARGEST_HEAD_DIM, 32, 4, 1)),
    (None, torch.bfloat16, 512): GlaTuning(walk=TileOptions(LARGEST_HEAD_DIM, 16, 8, 1)),
    # fp32 tiles are twice as large, and a product in three tf32 parts holds more of them at once
    ((9, 0), torch.float32, 512): GlaTuning(
        operands=TileOptions(32, 32, 4, 1),
        sums=TileOptions(32, 32, 4, 2),
        scores=TileOptions(32, 32, 4, 1),
        walk=TileOptions(LARGEST_HEAD_DIM, 16, 8, 1),
        states=TileOptions(32, 32, 4, 2),
        plain_grads=TileOptions(32, 32, 4, 1),
        other_grads=TileOptions(32, 32, 4, 1),
    ),
}

_OPTIONS = KeptOptions("kernels of gla", KEPT)
options_for = _OPTIONS.options_for

CHUNK = 64
# CUDA's limit on the second and third dimension of a grid.
MOST_HEADS = 65_535
# Tiles of the gradient kernels, and of `scores_kernel` along K, have a verified minimum width; columns beyond K are
# zeros. In bf16, tiles of 32 keys made Triton 3.6 compile the products of an earlier gradient kernel to wrong gradients
# (K 32) or illegal memory accesses (K 64), whether joined or not; scores_kernel was correct with them when not joined.
NARROWEST = {torch.bfloat16: 64, torch.float32: 32}
NARROWEST_SCORES = 32
NARROWEST_JOINED = 64
# Chunks of a program for those that are not plain; without any, it ends after their checks.
GROUP = 4


@dataclass(frozen=True)
class Segments:
    """A rank's chunks in segments that are walked in parallel, joined; in reverse gradients. All fp32.

    `starts` are states at segment starts, or gradients at their ends: from a zero start of the rank, until
    `SegmentKernels.correct` replaces them by the true ones.
    """

    starts: Tensor  # [J, B, H, K, V]
    start_decays: Tensor  # [J, B, H, K], log-decay from the rank's start to each segment's
    state: Tensor  # [B, H, K, V], S_loc, or D_loc
    log_decay: Tensor  # [B, H, K], G_tot


class SegmentKernels:
    """What the launches of operators with a diagonal transition share, for tokens of one shape and dtype.

    All tensor arguments must be contiguous. A walk over chunks is sequential, so a rank has as many segments as it
    takes to fill the chip: `num_segments`, which the subclass sets.

    Args:
        k: [B, T, G, K]. v: [B, T, H, V].
        doc_ids: [T] int32, restarts through each token; None without documents.
        scale: factor of the outputs.
        join: tiles and launch options of joining segments.
    """

    num_segments: int

    def __init__(self, k: Tensor, v: Tensor, doc_ids: Tensor | None, scale: float, join: TileOptions) -> None:
        (self.B, self.T, self.G, self.K), (self.H, self.V) = k.shape, v.shape[2:]
        self.BH = self.B * self.H
        if self.BH > MOST_HEADS:
            raise ValueError(f"v: batch × heads = {self.BH}, a grid of CUDA has room for {MOST_HEADS}")
        self.device, self.dtype, self.scale, self.doc_ids = k.device, k.dtype, scale, doc_ids
        # bf16 products are exact in any mode; tf32 alone would lose 3e-4 of fp32 inputs
        self.flags: dict[str, Any] = {"DOCUMENTS": doc_ids is not None, "PRECISION": "tf32x3"}
        BK, BV = join.tile(self.K, self.V)
        self._join_tiles, self._join_options = self._state_tiles(BK, BV), {"BK": BK, "BV": BV, **join.launch}

    def _state_tiles(self, BK: int, BV: int) -> int:
        return cdiv(self.K, BK) * cdiv(self.V, BV)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def starts_shape(self) -> tuple[int, ...]:
        """(J, B, H, K, V)."""
        return self.num_segments, self.B, self.H, self.K, self.V

    def _new_segments(self) -> tuple[Segments, Tensor]:
        """Not yet written; and for the walk over each segment its own log-decay, [J, B, H, K]."""
        heads = self.B, self.H
        starts, start_decays = self._new(*self.starts_shape), self._new(self.num_segments, *heads, self.K)
        found = Segments(starts, start_decays, self._new(*heads, self.K, self.V), self._new(*heads, self.K))
        return found, torch.empty_like(start_decays)

    def _join(self, found: Segments, segment_decays: Tensor, reverse: bool) -> None:
        """`starts` has the segments' own states on entry."""
        join_segments_kernel[(self._join_tiles, self.BH)](
            found.starts, segment_decays, found.start_decays, found.state, found.log_decay,
            self.K, self.V, self.BH, self.num_segments, REVERSE=reverse, **self._join_options,
        )  # fmt: skip

    def correct(self, segments: Segments, incoming: Tensor, name: str) -> None:
        """Update the states at segment starts to the true ones, given the rank's incoming state, or D_in.

        Raises:
            ValueError: naming it, a state of another shape.
        """
        check_state(incoming, name, segments.state.shape)
        correct_starts_kernel[(self._join_tiles, self.BH, self.num_segments)](
            segments.starts, segments.start_decays, incoming.contiguous(), self.K, self.V, self.BH,
            **self._join_options,
        )  # fmt: skip


class WalkOperands(NamedTuple):
    """See `zeco_train.ops.gla.kernels.states.operands_kernel`."""

    queries: Tensor  # [B, T, H, K] in the dtype of the inputs
    keys: Tensor  # [B, T, H, K]
    factors: Tensor  # [N, B, H, 4, K] fp32
    kinds: Tensor  # [N, B, H] int32


class GlaKernels(SegmentKernels):
    """The launches of gated linear attention, see `SegmentKernels`."""

    def __init__(self, k: Tensor, v: Tensor, doc_ids: Tensor | None, scale: float, tuning: GlaTuning) -> None:
        super().__init__(k, v, doc_ids, scale, tuning.join)
        self.tuning = tuning
        self._documents, self._precision = ({name: self.flags[name]} for name in ("DOCUMENTS", "PRECISION"))
        self.num_chunks = cdiv(self.T, CHUNK)
        tiles = self._state_tiles(*tuning.walk.tile(self.K, self.V))
        segments = max(1, min(self.num_chunks, tuning.programs // (tiles * self.BH)))
        self.segment_chunks = cdiv(self.num_chunks, segments)
        self.num_segments = cdiv(self.num_chunks, self.segment_chunks)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(N, B, H, C, C)."""
        return self.num_chunks, self.B, self.H, CHUNK, CHUNK

    def operands_like(self, k: Tensor) -> WalkOperands:
        """Not yet written."""
        chunks = self.num_chunks, self.B, self.H
        return WalkOperands(
            torch.empty_like(k, memory_format=torch.contiguous_format),
            torch.empty_like(k, memory_format=torch.contiguous_format),
            self._new(*chunks, 4, self.K), self._new(*chunks, dtype=torch.int32),
        )  # fmt: skip

    def operands(self, q: Tensor, k: Tensor, g: Tensor, b: Tensor) -> WalkOperands:
        """Of the walks; `b` is written, the cumulative sums of g inside chunks."""
        found, options = self.operands_like(k), self.tuning.operands
        BK, _ = options.tile(self.K, self.V)
        operands_kernel[(self.num_chunks, self.BH)](
            q, k, g, self.doc_ids, b, *found, self.scale, self.T, self.H, self.K, self.BH, C=CHUNK, BK=BK,
            **self._documents, **options.launch,
        )  # fmt: skip
        return found

    def segments(self, operands: WalkOperands, y: Tensor, *, reverse: bool) -> Segments:
        """Walk each segment from zero, then join the segments: of k* and v, or in reverse of q* and do."""
        segments, segment_decays = self._new_segments()
        self._walk(operands, y, segments, self.tuning.sums, segment_decays, reverse=reverse)
        self._join(segments, segment_decays, reverse)
        return segments

    def outputs(
        self,
        operands: WalkOperands,
        y: Tensor,
        scores: Tensor,
        segments: Segments,
        *,
        states: Tensor | None = None,
        reverse: bool = False,
    ) -> Tensor:
        """o, [B, T, H, V], from the true states that segments start from; in reverse dv. Writes X of the chunks."""
        o = torch.empty_like(y)
        self._walk(operands, y, segments, self.tuning.walk, scores=scores, o=o, states=states, reverse=reverse)
        return o

    def states(self, operands: WalkOperands, v: Tensor, segments: Segments) -> Tensor:
        """X of the chunks, from the true states that segments start from."""
        states = self.new_states()
        self._walk(operands, v, segments, self.tuning.states, states=states, reverse=False)
        return states

    def new_states(self) -> Tensor:
        """[N, B, H, V, K] in the dtype of the inputs, not yet written."""
        return self._new(self.num_chunks, self.B, self.H, self.V, self.K, dtype=self.dtype)

    def _walk(
        self,
        operands: WalkOperands,
        y: Tensor,
        segments: Segments,
        options: TileOptions,
        segment_decays: Tensor | None = None,
        *,
        reverse: bool,
        scores: Tensor | None = None,
        o: Tensor | None = None,
        states: Tensor | None = None,
    ) -> None:
        BK, BV = options.tile(self.K, self.V)
        pair = operands.queries, operands.keys
        walk_kernel[(self._state_tiles(BK, BV), self.BH, self.num_segments)](
            *(pair[::-1] if reverse else pair), y, scores, operands.factors, segments.starts, segment_decays, o, states,
            self.T, self.H, self.K, self.V, self.BH, self.num_chunks, self.segment_chunks, C=CHUNK, BK=BK, BV=BV,
            REVERSE=reverse, SUMS=segment_decays is not None, OUTPUTS=o is not None, STATES=states is not None,
            **self._precision, **options.launch,
        )  # fmt: skip

    def scores(self, q: Tensor, k: Tensor, b: Tensor, operands: WalkOperands) -> Tensor:
        """[N, B, H, C, C], 0 above the diagonal."""
        scores, options = self._new(*self.scores_shape, dtype=self.dtype), self.tuning.scores
        BK, _ = options.tile(self.K, self.V, narrowest=NARROWEST_SCORES)
        scores_kernel[(self.num_chunks, self.BH)](
            q, k, b, operands.queries, operands.keys, operands.kinds, self.doc_ids, scores, self.scale,
            self.T, self.H, self.K, self.BH, C=CHUNK, BK=BK, **self.flags, **options.launch,
            JOINED=self.dtype == torch.bfloat16 and BK >= NARROWEST_JOINED,
        )  # fmt: skip
        return scores

    def grads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        do: Tensor,
        operands: WalkOperands,
        states: Tensor,
        state_grads: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dg."""
        dq, dk, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(b)
        found = states, state_grads, dq, dk, dg, self.scale, self.T, self.H, self.K, self.V, self.BH
        options = self.tuning.plain_grads
        BK, BV = options.tile(self.K, self.V, narrowest=NARROWEST[self.dtype])
        plain_grads_kernel[(self.num_chunks * cdiv(self.K, BK), self.BH)](
            operands.queries, operands.keys, v, b, do, operands.kinds, *found, C=CHUNK, BK=BK, BV=BV,
            SUMMED=options.num_stages == 1, **self._precision, **options.launch,
        )  # fmt: skip
        options = self.tuning.other_grads
        BK, BV = options.tile(self.K, self.V, narrowest=NARROWEST[self.dtype])
        other_grads_kernel[(cdiv(self.num_chunks, GROUP) * cdiv(self.K, BK), self.BH)](
            q, k, v, b, do, self.doc_ids, operands.kinds, operands.factors, *found, C=CHUNK, BK=BK, BV=BV, CHUNKS=GROUP,
            SUMMED=options.num_stages == 1, JOINED=self.dtype == torch.bfloat16, **self.flags, **options.launch,
        )  # fmt: skip
        return dq, dk, dg


class _GlaKernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._q, self._k, self._v, g = (dense(x) for x in operands)
        self._launcher = GlaKernels(self._k, self._v, self.doc_ids, self.scale, options_for(self._k))
        self._b = torch.empty_like(g)
        self._operands = self._launcher.operands(self._q, self._k, g, self._b)
        self._segments = self._launcher.segments(self._operands, self._v, reverse=False)
        self.state, self.transition = self._segments.state, self._segments.log_decay

    def overlap(self) -> None:
        self._scores = self._launcher.scores(self._q, self._k, self._b, self._operands)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self._launcher.correct(self._segments, incoming_state, "incoming_state")
        # Not g too: in fp32 it is as large as bf16 q and k together. True states serve in place of R.
        kept = (self._launcher.new_states(),) if keeps_states() else ()
        self.saved = self._b, *self._operands, self._scores, self._segments.starts, *kept
        states = kept[0] if kept else None
        return self._launcher.outputs(self._operands, self._v, self._scores, self._segments, states=states)


class GlaKernelBackward(BackwardBase):
    """The backward pass; its parts are in order also where the operands have other roles."""

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # The fourth operand, g, has been replaced by b (`CUDA.replaced`).
        self._q, self._k, self._v, self._b, self._do = (dense(x) for x in (*operands, self.do))
        count = len(WalkOperands._fields)
        self._operands = WalkOperands(*self.saved[:count])
        self._scores, self._starts, *self._kept = self.saved[count:]
        self._launcher = GlaKernels(self._k, self._v, self.doc_ids, self.scale, options_for(self._k))
        self._segments = self._launcher.segments(self._operands, self._do, reverse=True)
        self.state_grad = self._segments.state

    def overlap(self) -> None:
        segments = replace(self._segments, starts=self._starts)
        self._states = self._kept[0] if self._kept else self._launcher.states(self._operands, self._v, segments)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        self._launcher.correct(self._segments, incoming_grad, "incoming_grad")
        grads = self._launcher.new_states()
        dv = self._launcher.outputs(self._operands, self._do, self._scores, self._segments, states=grads, reverse=True)
        dq, dk, dg = self._launcher.grads(
            self._q, self._k, self._v, self._b, self._do, self._operands, self._states, grads
        )
        return dq, dk, dv, dg


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, k, v, g = operands
    # For the shapes only, which do not depend on documents or the scale.
    launcher = GlaKernels(k, v, None, 1.0, options_for(k))
    b = torch.empty_like(g, memory_format=torch.contiguous_format)
    starts = k.new_empty(launcher.starts_shape, dtype=torch.float32)
    kept = (launcher.new_states(),) if keeps_states() else ()
    return b, *launcher.operands_like(k), k.new_empty(launcher.scores_shape), starts, *kept


CUDA = with_padded_heads(Passes(_GlaKernelForward, GlaKernelBackward, _saved_like, replaced=(3,), needs_incoming=False))
