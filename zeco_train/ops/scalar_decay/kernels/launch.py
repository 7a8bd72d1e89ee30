"""One decay a head on CUDA: launches, their tiles and options, and the passes of one rank, for bf16 and fp32 tokens.

Forward                                                        Backward
  states after segments → S_loc, G_tot                           gradients of segments → D_loc
  | scan over ranks                                              | scan over ranks ‖ dq, and with it terms of dg
  true states that segments start from; outputs                  true gradients at segments' ends; dv, dk, dg

Scores and the states of chunks are kept nowhere: each walk over a segment computes its own, in registers. Or, where
that is faster and for keys of more than 256 channels, a walk writes the states to a buffer of this pass, and all
chunks, or their gradients alone, are computed at once from them (`ScalarDecayTuning.states`); the scan over ranks then
hides the states in place of dq, which one kernel computes with dk and dv. Of the forward pass the true states at
segments' starts are saved, in place of R, and the decays' sums inside chunks in place of g. The kernels also run on a
CPU under Triton's interpreter, in fp32.

Options change only the order of sums, but `chunk` and `span` also between which products bf16 rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.kernels import cdiv, next_power_of_2
from zeco_train.ops.gla.kernels.launch import NARROWEST, SegmentKernels, Segments
from zeco_train.ops.kept import KeptOptions, Key, TileOptions
from zeco_train.ops.kernel_operands import dense, sum_heads, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state
from zeco_train.ops.scalar_decay.kernels import chunks
from zeco_train.ops.scalar_decay.kernels.decays import decay_grads_kernel, decay_sums_kernel
from zeco_train.ops.scalar_decay.kernels.walk import states_kernel, walk_kernel

# The largest dim of a state that a walk holds whole, in shared memory.
_DEPTH = 256
_SUMMARIES = TileOptions(_DEPTH, 64, 4, 3)
_WALK = TileOptions(_DEPTH, 64, 4, 2)


@dataclass(frozen=True)
class ScalarDecayTuning:
    """Options of each kernel, by its name, and of the layout in time."""

    summaries: TileOptions = _SUMMARIES
    outputs: TileOptions = _WALK  # of the kernel of o, and of dq, dv, dk
    query_grads: TileOptions = _WALK
    value_grads: TileOptions = _WALK
    key_grads: TileOptions = _WALK
    # By chunks, of the kernel of dq, dk and dv; dv has a kernel of its own where K is beyond its tile.
    grads: TileOptions = TileOptions(128, 64, 8, 3)
    join: TileOptions = TileOptions(64, 64, 4, 1)
    chunk: int = 64  # C, tokens of a chunk
    # Chunks between two states that the walk of dq stores for dg. With bf16 tokens and weak decays dg's error is 3e-3
    # for 1, 4e-3 for 4, 7e-3 for 16 (K = V = 64, emulated).
    span: int = 4
    programs: int = 264  # that saturate the chip, all at once
    # Of the walk that writes the states at the boundaries of chunks, from which all chunks are then computed at once;
    # None: walks compute outputs and gradients, each with states of its own.
    states: TileOptions | None = None
    key_tiles: TileOptions | None = None  # of the kernel in place of `grads`, for fixed decays and values of one tile
    walks_forward: bool = False  # outputs are computed by walks all the same
    pairs: bool = False  # pairs, S and dS have a kernel each, with the options `grads`, whose tile holds K and V
    # Of the backward pass, if others, but for `programs`; as many tokens a span.
    backward: ScalarDecayTuning | None = None


def _alike(summaries: TileOptions, walk: TileOptions, chunk: int = 64, programs: int = 264) -> ScalarDecayTuning:
    return ScalarDecayTuning(summaries, walk, walk, walk, walk, chunk=chunk, programs=programs)


def _by_chunks(states: TileOptions, grads: TileOptions, outputs: TileOptions) -> ScalarDecayTuning:
    return ScalarDecayTuning(states, outputs, value_grads=outputs, grads=grads, states=states)


_WIDE, _NARROW = TileOptions(_DEPTH, 64, 8, 2), TileOptions(_DEPTH, 32, 8, 1)
_STATES, _WIDE_STATES, _GRADS = TileOptions(128, 64, 4, 3), TileOptions(128, 128, 8, 3), TileOptions(128, 64, 8, 3)
KEPT: dict[Key, ScalarDecayTuning] = {
    ((9, 0), torch.bfloat16, 128): ScalarDecayTuning(),
    ((9, 0), torch.bfloat16, 256): _alike(_WIDE, _WIDE, programs=132),
    ((9, 0), torch.bfloat16, 512): _by_chunks(_STATES, _GRADS, TileOptions(64, 128, 4, 2)),
    (None, torch.bfloat16, 128): _alike(TileOptions(_DEPTH, 64, 4, 2), TileOptions(_DEPTH, 64, 4, 1)),
    (None, torch.bfloat16, 512): _by_chunks(*(TileOptions(64, 64, 4, 1),) * 3),
    ((9, 0), torch.float32, 128): _alike(TileOptions(_DEPTH, 32, 4, 2), TileOptions(_DEPTH, 32, 4, 1)),
    ((9, 0), torch.float32, 256): _alike(_NARROW, _NARROW, chunk=32, programs=132),
}

_OPTIONS = KeptOptions("kernels of scalar decays", KEPT)
# Of V up to 64 as in Mamba-2, measured for K 128: 0.93 of the time with those above, but 1.4 times as long with V 128.
_FEW_VALUES = 64
_OF_FEW_VALUES = ScalarDecayTuning(
    outputs=TileOptions(_DEPTH, 64, 4, 1),
    query_grads=TileOptions(_DEPTH, 128, 4, 1),
    key_grads=TileOptions(_DEPTH, 128, 4, 1),
)
# Outputs by walks, gradients by chunks: of many heads that share keys, measured for K 128, V 64, as in Mamba-2, with
# groups of 16 and of 64, and of fixed decays, for K 128, V 256 and, with chunks of 128 tokens, K 256, V 512, in 0.90 of
# the time with 64. All by chunks: K 256, V 64, as in Bamba, with a group of 128, in half of the time of walks; there o
# with chunks of 128 takes 0.82 of the time with 64, pairs apart 0.77 of the time of `grads` (with K 128 1.2 times).
# Gradients by tiles of K: fixed decays, K 273, V 64, as in Based, in 0.61 of the time of `grads` and chunks of 64.
_MANY_HEADS = 16
_GRADS_BY_CHUNKS = replace(KEPT[(9, 0), torch.bfloat16, 512], outputs=TileOptions(_DEPTH, 64, 4, 1), walks_forward=True)
_OF_FIXED = replace(_GRADS_BY_CHUNKS, summaries=_WIDE_STATES, states=_WIDE_STATES, programs=132)
_LONG_CHUNKS = replace(
    _by_chunks(TileOptions(128, 64, 4, 2), TileOptions(64, 64, 8, 3), TileOptions(64, 128, 8, 2)),
    outputs=TileOptions(_DEPTH, 64, 8, 1),
    chunk=128,
    walks_forward=True,
)
_BY_KEYS = replace(
    _LONG_CHUNKS, outputs=TileOptions(64, 64, 8, 3), key_tiles=TileOptions(64, 64, 8, 2), walks_forward=False
)
_OF_WIDE_SHARED_KEYS = replace(
    _by_chunks(TileOptions(128, 64, 4, 2), _GRADS, TileOptions(256, 64, 8, 2)),
    chunk=128,
    span=2,
    backward=replace(_by_chunks(_STATES, TileOptions(256, 64, 4, 2), _GRADS), pairs=True),
)


def options_for(k: Tensor, v: Tensor, fixed: bool) -> ScalarDecayTuning:
    """The options for such keys and values."""
    found = _OPTIONS.options_for(k, v)
    few, shared = int(v.shape[-1]) <= _FEW_VALUES, v.shape[2] >= _MANY_HEADS * k.shape[2]
    if found is KEPT[(9, 0), torch.bfloat16, 128] and few:
        return _GRADS_BY_CHUNKS if shared and int(k.shape[-1]) > _FEW_VALUES and not fixed else _OF_FEW_VALUES
    wide = KEPT[(9, 0), torch.bfloat16, 512]
    if found is wide or found is KEPT[(9, 0), torch.bfloat16, 256]:
        keys = int(k.shape[-1])
        if shared and few and keys <= _DEPTH and not fixed:
            return _OF_WIDE_SHARED_KEYS
        if fixed:
            return _BY_KEYS if few else wide if keys > _DEPTH else _LONG_CHUNKS if keys > 128 else _OF_FIXED
    return found


_HEADS_OF_SUMS, _HEADS_OF_GRADS = 16, 8
# Heads of a program that computes the products of queries and keys once for all of them.
_SHARING = 8
# A chunk's decay that dg neglects, of the size of the operands' rounding: there what passes over the chunk is less than
# the error of the difference that it is computed as. With a decay of 2^-9 a chunk, emulated, 2^-12 has twice the error.
_NEGLIGIBLE = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}


class DecayTerms(NamedTuple):
    """What dq leaves for dg (`zeco_train.ops.scalar_decay.kernels.walk`), or dk; the last two only of dk.

    By chunks `sums` of dq are q · dq − k · dk of pairs in a chunk (with `pairs` and q · dq from S), and those of dk are
    k · dk from the state.
    """

    # S in the dtype of the tokens, [N / span, B, H, V, K], which the walk of dq writes for that of dk; not by chunks
    borders: Tensor | None
    sums: Tensor  # [tiles, B, H, T] fp32, q · dq or k · dk
    state_sums: Tensor | None = None  # [tiles, B, H, T] fp32, k · dk from the state
    boundary_terms: Tensor | None = None  # [tiles, N / span, B, H] fp32, <S, dS>


class ScalarDecayKernels(SegmentKernels):
    """The launches of scalar and fixed decays.

    Args:
        k: [B, T, G, K]. v: [B, T, H, V].
        decays: [B, H, T] fp32, of `decay_sums`; or [H] fp32, the log-decays, if they are `fixed`.
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
        super().__init__(k, v, doc_ids, scale, tuning.join)
        self.decays, self.tuning, self.fixed = decays, tuning, fixed
        self.flags |= {"C": tuning.chunk, "FIXED": fixed}
        self.num_chunks = cdiv(self.T, tuning.chunk)
        # As many segments as fill the chip at once; a few programs more would take twice as long.
        if tuning.states is None:
            columns = cdiv(self.V, self._tile(tuning.outputs, self.K, self.V)[1])
        else:
            columns = self._state_tiles(*self._tile(tuning.states, self.K, self.V))
        segments = max(1, tuning.programs // (columns * self.BH))
        self.num_spans = cdiv(self.num_chunks, tuning.span)
        self.segment_chunks = cdiv(self.num_spans, min(segments, self.num_spans)) * tuning.span
        self.num_segments = cdiv(self.num_chunks, self.segment_chunks)

    def _tile(self, options: TileOptions, depth: int, width: int) -> tuple[int, int]:
        return options.tile(depth, width, NARROWEST[self.dtype])

    def summaries(self, keys: Tensor, values: Tensor, *, reverse: bool) -> Segments:
        """Walk each segment from zero, then join the segments: of k and v, or in reverse of q and do."""
        found, segment_decays = self._new_segments()
        self._states(self.tuning.summaries, keys, values, found.starts, segment_decays, reverse=reverse)
        self._join(found, segment_decays, reverse)
        return found

    def true_starts(self, segments: Callable[[], Segments], incoming: Tensor, name: str) -> Tensor:
        """[J, B, H, K, V] fp32, the true states that segments start from: of one segment the incoming one, alone."""
        check_state(incoming, name, torch.Size(self.starts_shape[1:]))
        if self.num_segments == 1:
            return self._new(*self.starts_shape).copy_(incoming)
        self.correct(found := segments(), incoming, name)
        return found.starts

    def true_states(
        self, keys: Tensor, values: Tensor, starts: Tensor, *, reverse: bool, others: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """By chunks, of the true states that segments start from, those at all boundaries, in reverse their gradients.

        [N + 1, B, H, K, V] in the dtype of the tokens; with `others`, the states, also [tiles, N / span, B, H] fp32,
        <S, dS>.
        """
        options = self.tuning.states
        assert options is not None
        terms, states = None, self._new(self.num_chunks + 1, *starts.shape[1:], dtype=self.dtype)
        if others is not None:
            tiles = self._state_tiles(*self._tile(options, self.K, self.V))
            terms = self._new(tiles, self.num_spans, self.B, self.H)
        self._states(options, keys, values, starts, None, states, others, terms, reverse=reverse)
        return states, terms

    def _states(
        self,
        options: TileOptions,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        segment_decays: Tensor | None,
        states: Tensor | None = None,
        others: Tensor | None = None,
        terms: Tensor | None = None,
        *,
        reverse: bool,
    ) -> None:
        BK, BV = self._tile(options, self.K, self.V)
        states_kernel[(self._state_tiles(BK, BV), self.BH, self.num_segments)](
            keys, values, self.decays, self.doc_ids, starts, segment_decays, states, others, terms, self.scale,
            self.T, self.H, self.G, self.K, self.V, self.BH, self.num_chunks, self.segment_chunks,
            BK=BK, BV=BV, SPAN=self.tuning.span, REVERSE=reverse, BOUNDARIES=states is not None,
            TERMS=terms is not None, **self.flags, **options.launch,
        )  # fmt: skip

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        """o, [B, T, H, V], from the true states that segments start from."""
        options = self.tuning.outputs
        if self.tuning.states is None or self.tuning.walks_forward:
            return self._walk(options, q, k, v, starts, reverse=False)
        states, _ = self.true_states(k, v, starts, reverse=False)
        return self._chunks(options, q, k, v, states, reverse=False)

    def value_grads(self, q: Tensor, k: Tensor, do: Tensor, starts: Tensor) -> Tensor:
        """By walks: dv, [B, T, H, V]."""
        return self._walk(self.tuning.value_grads, k, q, do, starts, reverse=True)

    def query_grads(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor
    ) -> tuple[Tensor, DecayTerms | None]:
        """By walks: dq, [B, T, G, K]; unless decays are fixed also the terms of dg that it yields."""
        options, terms = self.tuning.query_grads, None
        if not self.fixed:
            borders = self._new(self.num_spans, self.B, self.H, self.V, self.K, dtype=self.dtype)
            terms = DecayTerms(borders, self._row_sums(options))
        dq = self._walk(options, do, v, k, starts, reverse=False, turned=True, extra=q, terms=terms)
        return sum_heads(dq, self.G), terms

    def key_grads(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor, terms: DecayTerms | None
    ) -> tuple[Tensor, Tensor | None]:
        """By walks: dk, [B, T, G, K]; unless decays are fixed also dg, [B, T, H]."""
        options, own = self.tuning.key_grads, None
        if terms is not None:
            sums, state_sums = (self._row_sums(options) for _ in range(2))
            own = DecayTerms(terms.borders, sums, state_sums, self._new(sums.shape[0], self.num_spans, self.B, self.H))
        dk = self._walk(options, v, do, q, starts, reverse=True, turned=True, extra=k, terms=own)
        return sum_heads(dk, self.G), None if terms is None or own is None else self._decay_grads(terms, own)

    def grads(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, states: Tensor, starts: Tensor, unpadded: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """By chunks: dq, dk, dv and, unless decays are fixed, dg, of the `true_states` and the gradients' `starts`.

        dq and dk may have the first `unpadded` columns only.
        """
        grads, boundary_terms = self.true_states(q, do, starts, reverse=True, others=None if self.fixed else states)
        if (options := self.tuning.key_tiles) is not None:
            BK, BV = options.keys, self._tile(options, self.K, self.V)[1]
            width = self.K if unpadded is None else unpadded
            dq, dk = (self._new(self.B, self.T, self.H, width, dtype=self.dtype) for _ in range(2))
            dv = torch.empty_like(v)
            chunks.key_tiles_kernel[(self.num_chunks, self.BH)](
                q, k, v, do, self.decays, self.doc_ids, states, grads, dq, dk, dv, self.scale, self.T, self.H, self.G,
                self.K, width, self.V, self.BH, BK=BK, BV=BV, **self.flags, **options.launch,
            )  # fmt: skip
            return sum_heads(dq, self.G), sum_heads(dk, self.G), dv, None
        options = self.tuning.grads
        BK, BV = self._tile(options, self.K, self.V)
        tiles = cdiv(self.K, BK)
        heads = self._heads(2 * self.num_chunks * tiles, self.H)  # of eight warps, one a multiprocessor, or of four
        grid = self.num_chunks * tiles, self.BH // heads
        dq, dk = (self._new(self.B, self.T, self.H // heads, self.K, dtype=self.dtype) for _ in range(2))
        dv = torch.empty_like(v) if tiles == 1 else self._chunks(self.tuning.value_grads, k, q, do, grads, reverse=True)
        # Apart, since kernels want what begins at 16 bytes; with `pairs` there are 16 heads or more.
        sums = None if self.fixed or not self.tuning.pairs else self._new(3, self.B, self.H, self.T)
        of_pairs, of_state = (None, None) if sums is None else (sums[:2], sums[2:])
        if not self.fixed and sums is None:
            of_pairs, of_state = (self._new(tiles, self.B, self.H, self.T) for _ in range(2))
        where, sizes = (self.decays, self.doc_ids), (self.scale, self.T, self.H, self.G, self.K, self.V, self.BH)
        shared = {"BK": BK, "BV": BV, "HEADS": heads, "TERMS": not self.fixed, **self.flags, **options.launch}
        if self.tuning.pairs:
            assert tiles == 1
            assert self.V <= BV
            pair_grads = self._new(*grid, self.tuning.chunk, self.tuning.chunk, dtype=self.dtype)
            chunks.pairs_kernel[grid](q, k, v, do, *where, dv, pair_grads, sums, *sizes, **shared)
            for reverse, of_tokens in enumerate(((q, k, do, states, dq), (k, q, v, grads, dk))):
                chunks.state_grads_kernel[grid](
                    *of_tokens, *where, dv, pair_grads, sums, *sizes, REVERSE=reverse > 0, **shared
                )
        else:
            chunks.grads_kernel[grid](
                q, k, v, do, *where, states, grads, dq, dk, dv, of_pairs, of_state, *sizes, **shared
            )
        dq, dk = sum_heads(dq, self.G), sum_heads(dk, self.G)
        if of_pairs is None or of_state is None:
            return dq, dk, dv, None
        terms = DecayTerms(None, of_pairs), DecayTerms(None, of_state, of_state, boundary_terms)
        return dq, dk, dv, self._decay_grads(*terms)

    def _decay_grads(self, of_queries: DecayTerms, of_keys: DecayTerms) -> Tensor:
        assert of_keys.boundary_terms is not None
        dg = self._new(self.B, self.T, self.H)
        heads = min(_HEADS_OF_GRADS, next_power_of_2(self.H))
        decay_grads_kernel[(self.num_spans, self.B, cdiv(self.H, heads))](
            of_queries.sums, of_keys.sums, of_keys.state_sums, of_keys.boundary_terms, self.decays, self.doc_ids, dg,
            self.T, self.H, self.BH, self.num_spans, C=self.tuning.chunk, SPAN=self.tuning.span,
            QUERY_TILES=of_queries.sums.shape[0], KEY_TILES=of_keys.sums.shape[0],
            BORDER_TILES=of_keys.boundary_terms.shape[0], HEADS=heads,
            NEGLIGIBLE=_NEGLIGIBLE[self.dtype], DOCUMENTS=self.doc_ids is not None, num_warps=4,
        )  # fmt: skip
        return dg

    def _row_sums(self, options: TileOptions) -> Tensor:
        return self._new(cdiv(self.K, self._tile(options, self.V, self.K)[1]), self.B, self.H, self.T)

    def _walk(
        self,
        options: TileOptions,
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
        """[B, T, H, W]."""
        (query_heads, depth), (value_heads, width) = queries.shape[2:], values.shape[2:]
        BD, BW = self._tile(options, depth, width)
        outputs = self._new(self.B, self.T, self.H, width, dtype=self.dtype)
        walk_kernel[(cdiv(width, BW), self.BH, self.num_segments)](
            queries, keys, values, extra, self.decays, self.doc_ids, starts, outputs, *(terms or (None,) * 4),
            self.scale, self.T, self.H, query_heads, value_heads, depth, width, self.BH, self.num_chunks,
            self.segment_chunks, BD=BD, BW=BW, SPAN=self.tuning.span, TURNED=turned, REVERSE=reverse,
            TERMS=terms is not None, **self.flags, **options.launch,
        )  # fmt: skip
        return outputs

    def _chunks(
        self, options: TileOptions, queries: Tensor, keys: Tensor, values: Tensor, states: Tensor, *, reverse: bool
    ) -> Tensor:
        """[B, T, H, V]."""
        BD, BW = self._tile(options, self.K, self.V)
        blocks = cdiv(self.V, BW) * self.num_chunks
        heads = self._heads(blocks, _SHARING) if self.K <= BD else 1
        outputs = torch.empty_like(values)
        chunks.chunks_kernel[(blocks, self.BH // heads)](
            queries, keys, values, self.decays, self.doc_ids, states, outputs, self.scale, self.T, self.H, self.G,
            self.K, self.V, self.BH, BD=BD, BW=BW, HEADS=heads, REVERSE=reverse, **self.flags,
            **options.launch,
        )  # fmt: skip
        return outputs

    def _heads(self, blocks: int, most: int) -> int:
        """Heads of a group that one program computes: as many as leave enough programs."""
        group = self.H // self.G
        counts = (n for n in range(min(group, most), 1, -1) if group % n == 0)
        return next((n for n in counts if blocks * self.BH // n >= self.tuning.programs), 1)


def decay_sums(g: Tensor, chunk: int) -> Tensor:
    """[B, H, T] fp32: sums of g [B, T, H], contiguous, inside chunks."""
    B, T, H = g.shape
    sums = torch.empty((B, H, T), dtype=torch.float32, device=g.device)
    heads = min(_HEADS_OF_SUMS, next_power_of_2(H))
    decay_sums_kernel[(cdiv(T, chunk), B, cdiv(H, heads))](g, sums, T, H, C=chunk, HEADS=heads)
    return sums


@dataclass(eq=False)
class _KernelForward(ForwardBase):
    fixed: bool = False

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, v, decays = operands
        self._q, self._k, self._v = (dense(x) for x in (q, k, v))
        tuning, where = options_for(k, v, self.fixed), (self.doc_ids, self.scale)
        decays = dense(decays)
        self._decays = decays if self.fixed else decay_sums(decays, tuning.chunk)
        self._launcher = ScalarDecayKernels(k, v, self._decays, *where, tuning, fixed=self.fixed)
        self.lazy = self._launcher.num_segments == 1
        if tuning.backward is not None and not self.fixed:
            self._decays = decay_sums(decays, tuning.backward.chunk)

    @cached_property
    def _segments(self) -> Segments:
        return self._launcher.summaries(self._k, self._v, reverse=False)

    @property
    def state(self) -> Tensor:
        return self._segments.state

    @property
    def transition(self) -> Tensor:
        return self._segments.log_decay

    def outputs(self, incoming_state: Tensor) -> Tensor:
        starts = self._launcher.true_starts(lambda: self._segments, incoming_state, "incoming_state")
        self.saved = (starts,) if self.fixed else (self._decays.transpose(1, 2), starts)
        # Scores are computed with the outputs: nothing overlaps the scan.
        return self._launcher.outputs(self._q, self._k, self._v, starts)


@dataclass(eq=False)
class _KernelBackward(BackwardBase):
    fixed: bool = False

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # Unless decays are fixed, the fourth operand, g, has been replaced by its sums (`CUDA_SCALAR.replaced`).
        q, k, v, self._log_decays = operands
        self._q, self._k, self._v, self._do = (dense(x) for x in (q, k, v, self.do))
        (self._starts,) = self.saved
        decays, where = self._log_decays, (self.doc_ids, self.scale)
        decays = dense(decays if self.fixed else decays.transpose(1, 2))
        tuning = options_for(k, v, self.fixed)
        if tuning.backward is not None:
            tuning = replace(tuning.backward, programs=tuning.programs)
        self._launcher = ScalarDecayKernels(k, v, decays, *where, tuning, fixed=self.fixed)
        assert self._starts.shape == torch.Size(self._launcher.starts_shape), "both passes have the same segments"
        self._by_chunks, self.lazy = tuning.states is not None, self._launcher.num_segments == 1

    @cached_property
    def _segments(self) -> Segments:
        return self._launcher.summaries(self._q, self._do, reverse=True)

    @property
    def state_grad(self) -> Tensor:
        return self._segments.state

    def overlap(self) -> None:
        # Neither the states nor dq need gradients of states.
        q, k, v, do = self._q, self._k, self._v, self._do
        if self._by_chunks:
            self._states, _ = self._launcher.true_states(k, v, self._starts, reverse=False)
        else:
            self._dq, self._terms = self._launcher.query_grads(q, k, v, do, self._starts)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, do = self._q, self._k, self._v, self._do
        starts = self._launcher.true_starts(lambda: self._segments, incoming_grad, "incoming_grad")
        if self._by_chunks:
            dq, dk, dv, dg = self._launcher.grads(q, k, v, do, self._states, starts, self.unpadded)
        else:
            dk, dg = self._launcher.key_grads(q, k, v, do, starts, self._terms)
            dq, dv = self._dq, self._launcher.value_grads(q, k, do, starts)
        return dq, dk, dv, torch.zeros_like(self._log_decays) if dg is None else dg


def _saved_like(operands: Sequence[Tensor], *, fixed: bool) -> tuple[Tensor, ...]:
    _, k, v, decays = operands
    # For the shapes only, which do not depend on documents or the scale.
    launcher = ScalarDecayKernels(k, v, decays, None, 1.0, options_for(k, v, fixed), fixed=fixed)
    starts = decays.new_empty(launcher.starts_shape)
    return (starts,) if fixed else (decays.new_empty(decays.mT.shape).mT, starts)


def _passes(*, fixed: bool, replaced: tuple[int, ...]) -> Passes:
    forward, backward = partial(_KernelForward, fixed=fixed), partial(_KernelBackward, fixed=fixed)
    passes = Passes(forward, backward, partial(_saved_like, fixed=fixed), replaced, needs_incoming=False)
    return with_padded_heads(passes)


CUDA_SCALAR, CUDA_FIXED = _passes(fixed=False, replaced=(3,)), _passes(fixed=True, replaced=())
