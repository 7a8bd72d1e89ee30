"""Gated linear attention on CUDA: launches, their tiles and options, and the passes of one rank, for bf16 and fp32.

Forward                                                        Backward
  local states, by segments → S_loc, G_tot                       local state gradients, by segments → D_loc
  | scan over ranks ‖ scores inside chunks                       | scan over ranks ‖ dq, part of dk
  true states that segments start from; outputs                  true gradients at segments' ends; dv, dk, dg

States at chunk boundaries are kept in the dtype of the inputs, as operands of matrix products; sums, decays and states
passed between segments or ranks are fp32. Saved for the backward pass are b, the sums of g inside chunks, in place of
g, and in the dtype of the inputs the scores and the states at chunk boundaries: 64 and K·V/64 numbers per token and
head. The kernels also run on a CPU under Triton's interpreter, in fp32.

Options change only the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeco_train.kernels import cdiv, next_power_of_2
from zeco_train.ops.gla.kernels.input_grads import input_grads_kernel
from zeco_train.ops.gla.kernels.intra import intra_grads_kernel, scores_kernel
from zeco_train.ops.gla.kernels.outputs import outputs_kernel
from zeco_train.ops.gla.kernels.states import chunk_states_kernel, correct_starts_kernel, join_segments_kernel
from zeco_train.ops.kept import KeptOptions, Key, TileOptions
from zeco_train.ops.kernel_operands import dense, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state


@dataclass(frozen=True)
class GlaTuning:
    """Options of each kernel, by its name.

    Attributes:
        fused: `input_grads_kernel` is fused if possible.
        programs: number of programs that saturates the chip in the walks over chunks.
    """

    local_states: TileOptions = TileOptions(32, 128, 4, 3)
    scores: TileOptions = TileOptions(64, 64, 4, 1, 168)
    intra_grads: TileOptions = TileOptions(64, 64, 8, 1)
    mild_grads: TileOptions = TileOptions(64, 64, 8, 1)
    outputs: TileOptions = TileOptions(32, 128, 4, 2, 168)
    input_grads: TileOptions = TileOptions(64, 64, 4, 1)
    join: TileOptions = TileOptions(64, 64, 4, 1)
    fused: bool = True
    programs: int = 264


_UP_TO_64 = GlaTuning(
    local_states=TileOptions(64, 128, 4, 2),
    intra_grads=TileOptions(64, 64, 4, 1),
    mild_grads=TileOptions(64, 128, 4, 1),
    input_grads=TileOptions(64, 128, 4, 1),
)

# In the order of key dims. Measured per kernel on an H200 at 16k tokens: K64 V128 H16 and K128 V128 H16; without mild
# chunks also K256 V512 H4, and scores K32 V64 H32. The rest is by analogy, with as many values per thread, and by the
# compiler's register counts.
KEPT: dict[Key, GlaTuning] = {
    ((9, 0), torch.bfloat16, 32): replace(_UP_TO_64, scores=TileOptions(32, 64, 4, 1, 128)),
    ((9, 0), torch.bfloat16, 64): _UP_TO_64,
    ((9, 0), torch.bfloat16, 128): GlaTuning(
        scores=TileOptions(64, 64, 4, 1),
        intra_grads=TileOptions(128, 64, 8, 1),
        mild_grads=TileOptions(128, 64, 8, 2),
        input_grads=TileOptions(128, 64, 8, 1),
        programs=256,
    ),
    ((9, 0), torch.bfloat16, 256): GlaTuning(programs=256),
    # GPUs without an entry. If products take their operands from registers (sm_8x, sm_12x), the fused loop needs three
    # times the available registers, according to the compiler; this entry spills almost nothing. Never measured.
    (None, torch.bfloat16, 256): GlaTuning(input_grads=TileOptions(64, 64, 8, 1), fused=False),
    # fp32 tiles are twice as large, and a product in three tf32 parts holds more of them at once
    ((9, 0), torch.float32, 256): GlaTuning(
        local_states=TileOptions(32, 32, 4, 2),
        scores=TileOptions(32, 32, 4, 1),
        intra_grads=TileOptions(32, 32, 4, 1),
        mild_grads=TileOptions(32, 32, 4, 1),
        outputs=TileOptions(32, 64, 4, 1),
        input_grads=TileOptions(32, 32, 4, 1),
    ),
}

_OPTIONS = KeptOptions("kernels of gla", KEPT)
options_for = _OPTIONS.options_for

CHUNK = 64
# CUDA's limit on the second and third dimension of a grid.
MOST_HEADS = 65_535
# Tiles of the gradient kernels, and of `scores_kernel` along K, have a verified minimum width; columns beyond K are
# zeros. In bf16, tiles of 32 keys make Triton 3.6 compile intra_grads_kernel to wrong gradients (K 32) or illegal
# memory accesses (K 64), whether joined or not; scores_kernel was correct with them when not joined, and
# input_grads_kernel was not tried with them.
NARROWEST = {torch.bfloat16: 64, torch.float32: 32}
NARROWEST_SCORES = 32
NARROWEST_JOINED = 64
# Chunks of a program for those that are not mild; without any, it ends after one check.
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


class LocalStates(NamedTuple):
    """States before the chunks, or in reverse gradients after them, from the zero start (end) of their segment."""

    states: Tensor  # [N, B, H, K, V] in the dtype of the inputs
    log_decays: Tensor  # [N, B, H, K] fp32, from the segment's start to each boundary
    segments: Segments


class GlaKernels(SegmentKernels):
    """The launches of gated linear attention, see `SegmentKernels`."""

    def __init__(self, k: Tensor, v: Tensor, doc_ids: Tensor | None, scale: float, tuning: GlaTuning) -> None:
        super().__init__(k, v, doc_ids, scale, tuning.join)
        self.tuning = tuning
        self.flags["C"] = CHUNK
        self.num_chunks = cdiv(self.T, CHUNK)
        tiles = self._state_tiles(*tuning.local_states.tile(self.K, self.V))
        segments = max(1, min(self.num_chunks, cdiv(tuning.programs, tiles * self.BH)))
        self.segment_chunks = cdiv(self.num_chunks, segments)
        self.num_segments = cdiv(self.num_chunks, self.segment_chunks)

    def local_states(self, x: Tensor, y: Tensor, g: Tensor, *, b: Tensor | None, reverse: bool) -> LocalStates:
        """Walk each segment from zero, then join the segments: of k and v, or in reverse of q and do.

        `b` is the output for the cumulative sums of g inside chunks; None: g already holds those sums.
        """
        segments, segment_decays = self._new_segments()
        states = self._new(*self.states_shape, dtype=self.dtype)
        log_decays = self._new(self.num_chunks, self.B, self.H, self.K)
        options = self.tuning.local_states
        BK, BV = options.tile(self.K, self.V)
        chunk_states_kernel[(self._state_tiles(BK, BV), self.num_segments, self.BH)](
            x, y, g, b, self.doc_ids, states, log_decays, segments.starts, segment_decays, self.scale,
            self.T, self.H, self.K, self.V, self.BH, self.num_chunks, self.segment_chunks,
            BK=BK, BV=BV, REVERSE=reverse, CUMULATED=b is None, **self.flags, **options.launch,
        )  # fmt: skip
        self._join(segments, segment_decays, reverse)
        return LocalStates(states, log_decays, segments)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(N, B, H, C, C)."""
        return self.num_chunks, self.B, self.H, CHUNK, CHUNK

    @property
    def states_shape(self) -> tuple[int, ...]:
        """(N, B, H, K, V)."""
        return self.num_chunks, self.B, self.H, self.K, self.V

    @property
    def _keys(self) -> int:
        return next_power_of_2(self.K)

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
        outputs_kernel[(self.num_chunks * cdiv(self.V, BV), self.BH)](
            q, v, b, self.doc_ids, scores, local.states, local.log_decays, local.segments.starts, o, self.scale,
            self.T, self.H, self.K, self.V, self.BH, self.segment_chunks, BK=BK, BV=BV, **self.flags, **options.launch,
        )  # fmt: skip
        return o

    def intra_grads(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, do: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq; intra-chunk dk; q ⊙ dq − k ⊙ dk of that dk."""
        dq, dk, terms = torch.empty_like(q), torch.empty_like(k), torch.empty_like(b)
        for mild, options, chunks in ((True, self.tuning.mild_grads, 1), (False, self.tuning.intra_grads, GROUP)):
            BK, BV = options.tile(self.K, self.V, narrowest=NARROWEST[self.dtype])
            intra_grads_kernel[(cdiv(self.num_chunks, chunks), self.BH)](
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
        BK, BV = options.tile(self.K, self.V, narrowest=NARROWEST[self.dtype])
        input_grads_kernel[(self.num_chunks, self.BH)](
            k, v, b, do, self.doc_ids, scores, states, local.states, local.log_decays,
            local.segments.starts, terms, dk, dv, dg,
            self.T, self.H, self.K, self.V, self.BH, self.segment_chunks, BK=BK, BV=BV,
            FUSED=self.tuning.fused and self.K <= BK, **self.flags, **options.launch,
        )  # fmt: skip
        return dv, dg


class _GlaKernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, v, g = operands
        self._q, self._k, self._v = (dense(x) for x in (q, k, v))
        self._launcher = GlaKernels(k, v, self.doc_ids, self.scale, options_for(k))
        self._b = torch.empty_like(g, memory_format=torch.contiguous_format)
        self._local = self._launcher.local_states(self._k, self._v, dense(g), b=self._b, reverse=False)
        self.state, self.transition = self._local.segments.state, self._local.segments.log_decay

    def overlap(self) -> None:
        self._scores = self._launcher.scores(self._q, self._k, self._b)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self._launcher.correct(self._local.segments, incoming_state, "incoming_state")
        # Not g too: in fp32 it is as large as bf16 q and k together. The true states serve in place of R.
        self.saved = self._b, self._local.states, self._scores
        return self._launcher.outputs(self._q, self._v, self._b, self._scores, self._local)


class _GlaKernelBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # The fourth operand, g, has been replaced by b (`CUDA.replaced`).
        q, k, v, self._b = operands
        self._q, self._k, self._v, self._do = (dense(x) for x in (q, k, v, self.do))
        self._states, self._scores = self.saved
        self._launcher = GlaKernels(k, v, self.doc_ids, self.scale, options_for(k))
        self._local = self._launcher.local_states(self._q, self._do, self._b, b=None, reverse=True)
        self.state_grad = self._local.segments.state

    def overlap(self) -> None:
        inputs = self._q, self._k, self._v, self._b, self._do, self._states
        self._dq, self._dk, self._terms = self._launcher.intra_grads(*inputs)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        self._launcher.correct(self._local.segments, incoming_grad, "incoming_grad")
        dv, dg = self._launcher.input_grads(
            self._k, self._v, self._b, self._do, self._scores, self._states, self._local, self._terms, self._dk
        )
        return self._dq, self._dk, dv, dg


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, k, v, g = operands
    # For the shapes only, which do not depend on documents or the scale.
    launcher = GlaKernels(k, v, None, 1.0, options_for(k))
    b = torch.empty_like(g, memory_format=torch.contiguous_format)
    return b, k.new_empty(launcher.states_shape), k.new_empty(launcher.scores_shape)


CUDA = with_padded_heads(
    Passes(_GlaKernelForward, _GlaKernelBackward, _saved_like, replaced=(3,), needs_incoming=False)
)
