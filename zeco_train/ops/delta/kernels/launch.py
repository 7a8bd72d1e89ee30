"""Delta rules on CUDA: launches, their tiles and options, and the passes of one rank, for bf16 and fp32 tokens.

Forward                                                        Backward
  sums of g; by channel operands; scores P and systems F
  states and transitions of segments → S_loc, M                  by channel operands; gradients of segments → D_loc
  | scan over ranks                                              | scan over ranks ‖ true states again
  true states that segments start from; outputs                  true gradients at segments' ends, dv; dq, dk, dg, dβ

States at chunk boundaries are operands of products, in the dtype of the tokens; sums, decays, and states and
transitions passed between segments or ranks are fp32. The forward pass saves P and F, in the dtype of the tokens, 64
numbers each a token and head; the decays' sums in place of g, and by channel a byte a chunk, head and tile of keys; and
of each segment its transition and the true state before it, in place of R.

Options change only the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, next_power_of_2
from zeco_train.ops.delta.kernels.channel_grads import channel_grads_kernel
from zeco_train.ops.delta.kernels.grads import grads_kernel
from zeco_train.ops.delta.kernels.systems import operands_kernel, systems_kernel
from zeco_train.ops.delta.kernels.walks import forward_walk_kernel, join_kernel, reverse_walk_kernel
from zeco_train.ops.gla.kernels.launch import CHUNK, GROUP, MOST_HEADS, NARROWEST
from zeco_train.ops.kept import KeptOptions, Key, TileOptions
from zeco_train.ops.kernel_operands import dense, sum_heads, with_padded_heads
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state
from zeco_train.ops.scalar_decay.kernels.launch import decay_sums

# Largest K. A walk holds all K rows of its columns of the state, and as many of the tokens of a chunk.
LARGEST_HEAD_DIM = 256
# That share keys, and whose gradients one program sums.
HEADS = 2

_NARROW = TileOptions(32, 32, 4, 1)
_SMALL_WALK = TileOptions(LARGEST_HEAD_DIM, 64, 4, 3)
_SMALL_GRADS, _SMALL_JOIN = TileOptions(64, 64, 4, 2), TileOptions(32, 16, 8, 2)


@dataclass(frozen=True)
class DeltaTuning:
    """Options of each kernel, by its name, and of the layout in time."""

    systems: TileOptions = TileOptions(128, 64, 4, 1)
    # With decays by channel, as those whose names say so: of the forward pass, with the sums.
    channel_systems: TileOptions = TileOptions(64, 64, 4, 2)
    operands: TileOptions = TileOptions(128, 64, 8, 1, 128)
    # Of the walks: the segments', and all others; with decays by channel all.
    summaries: TileOptions = _SMALL_WALK
    walk: TileOptions = TileOptions(LARGEST_HEAD_DIM, 128, 8, 3)
    channel_walk: TileOptions = TileOptions(LARGEST_HEAD_DIM, 128, 8, 2)
    grads: TileOptions = TileOptions(128, 64, 8, 3)
    channel_grads: TileOptions = TileOptions(64, 64, 8, 2)
    join: TileOptions = TileOptions(128, 16, 8, 3)
    registers: int | None = None  # of the walk beside a scan; 224 leave 64 a thread to 4 warps of the scan's kernel
    programs: int = 132  # of a walk, that saturate the chip, all at once
    joining: float = 0.5  # chunks that all walks together take as long for as for joining one more segment, estimated


def _walks(walk: TileOptions) -> DeltaTuning:
    return DeltaTuning(summaries=walk, walk=walk, channel_walk=walk, grads=_SMALL_GRADS, join=_SMALL_JOIN)


def _narrow(walk: TileOptions) -> DeltaTuning:
    return DeltaTuning(_NARROW, _NARROW, _NARROW, walk, walk, walk, _NARROW, _NARROW, _SMALL_JOIN)


# Measured on an H100 with 16k tokens, bf16; the rest is by the compiler's counts of registers and shared memory. A walk
# with 8 warps is slow with fewer than 128 columns: each half of the warps computes all.
KEPT: dict[Key, DeltaTuning] = {
    ((9, 0), torch.bfloat16, 64): replace(_walks(_SMALL_WALK), grads=DeltaTuning.grads, join=DeltaTuning.join),
    ((9, 0), torch.bfloat16, 128): DeltaTuning(registers=224),
    ((9, 0), torch.bfloat16, 256): DeltaTuning(
        summaries=TileOptions(LARGEST_HEAD_DIM, 64, 4, 2),
        walk=TileOptions(LARGEST_HEAD_DIM, 128, 8, 2),
        channel_walk=TileOptions(LARGEST_HEAD_DIM, 128, 8, 1),
        join=TileOptions(64, 16, 8, 3),
    ),
    (None, torch.bfloat16, 128): _walks(TileOptions(LARGEST_HEAD_DIM, 64, 4, 1)),
    (None, torch.bfloat16, 256): _walks(TileOptions(LARGEST_HEAD_DIM, 64, 8, 1)),
    ((9, 0), torch.float32, 128): _narrow(TileOptions(LARGEST_HEAD_DIM, 32, 4, 1)),
    ((9, 0), torch.float32, 256): _narrow(TileOptions(LARGEST_HEAD_DIM, 32, 8, 1)),
}

_OPTIONS = KeptOptions("kernels of delta rules", KEPT)


def options_for(k: Tensor) -> DeltaTuning:
    """The options for keys [B, T, G, K] like these, of bf16 or fp32; all kernels go through V by tiles."""
    return _OPTIONS.options_for(k, k)


@dataclass(frozen=True)
class WalkOperands:
    """What the walks read, see `zeco_train.ops.delta.kernels.walks.forward_walk_kernel`."""

    keys: Tensor  # [B, T, G, K]; by channel [B, T, H, K], as the next two
    end_keys: Tensor
    queries: Tensor
    decays: Tensor  # [B, H, T] fp32; by channel [N, B, H, 3, K]
    inverses: Tensor  # [N, B, H, C, C]
    scores: Tensor  # [N, B, H, C, C]
    kinds: Tensor | None  # [N, B, H, tiles] int8, by channel


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
        self.flags: dict[str, Any] = {
            "C": CHUNK, "PRECISION": "tf32x3", "BY_CHANNEL": self.by_channel, "DOCUMENTS": doc_ids is not None
        }  # fmt: skip
        self.num_chunks = cdiv(self.T, CHUNK)
        # A walk is sequential: as many segments as fill the chip at once; a few programs more would take twice as long.
        self._walk = tuning.channel_walk if self.by_channel else tuning.walk
        _, columns = self._walk_tile(self._walk)
        segments = tuning.programs // (cdiv(self.V, columns) * self.BH)
        # Walks of N / J chunks and J joins, one after the other: the sum is least where both take as long.
        segments = max(1, min(segments, int(math.sqrt(self.num_chunks / tuning.joining)), self.num_chunks))
        self.segment_chunks = cdiv(self.num_chunks, segments)
        self.num_segments = cdiv(self.num_chunks, self.segment_chunks)
        self.tiles = cdiv(self.K, self._tile(tuning.operands)[0])
        # (N, B, H, tiles), (N, B, H, C, C), (N, B, H, V, K), (J, B, H, K, V) and (J, B, H, K, K).
        self.kinds_shape = self.num_chunks, self.B, self.H, self.tiles
        self.pairs_shape = self.num_chunks, self.B, self.H, CHUNK, CHUNK
        self.states_shape = self.num_chunks, self.B, self.H, self.V, self.K
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

    def _by_token(self, width: int, heads: int | None = None) -> Tensor:
        return self._new(self.B, self.T, heads or self.H, width, dtype=self.dtype)

    def systems(self, q: Tensor, g: Tensor | None) -> WalkOperands:
        """The operands of the walks, with P and F; by channel g, [B, T, H, K], whose sums are written, too."""
        pairs, selves = [self._new(*self.pairs_shape, dtype=self.dtype) for _ in range(2)], None
        if g is not None:
            pairs.append(self._new(*self.kinds_shape, dtype=torch.int8))
            selves = self._new(self.B, self.T, self.H, self.tiles)
        found = self.operands(q, pairs, g, selves)
        options = self.tuning.systems if g is None else self.tuning.channel_systems
        BK, _ = self._tile(options)
        for is_plain, chunks in ((True, 1), (False, GROUP))[: 1 if g is None else 2]:
            systems_kernel[(cdiv(self.num_chunks, chunks), self.BH)](
                q, self.k, self.sums, found.queries, found.keys, found.end_keys, selves, found.kinds, self.beta,
                self.doc_ids, found.scores, found.inverses, self.scale, self.T, self.H, self.G, self.K, self.BH,
                BK=BK, SOLVING=tl.float16 if self.dtype == torch.bfloat16 else tl.float32,
                TILES=self.tiles, PLAIN=is_plain, CHUNKS=chunks, **self.flags, **options.launch,
            )  # fmt: skip
        return found

    def operands(
        self, q: Tensor, pairs: Sequence[Tensor], g: Tensor | None = None, selves: Tensor | None = None
    ) -> WalkOperands:
        """The operands of the walks, of P, F and by channel kinds; with g its sums, kinds and selves are written."""
        scores, inverses, *kinds = pairs
        if not kinds:
            return WalkOperands(self.k, self.k, q, self.sums, inverses, scores, None)
        keys, end_keys, queries = (self._by_token(self.K) for _ in range(3))
        borders = self._new(self.num_chunks, self.B, self.H, 3, self.K)
        if g is not None:
            BK, _ = self._tile(self.tuning.operands)
            # three bf16 parts are exact; the interpreter, which takes fp32 tokens, has no bf16 products
            operands_kernel[(self.num_chunks * self.tiles, self.BH)](
                q, self.k, g, self.sums, keys, end_keys, queries, borders, selves, *kinds, self.scale, self.T, self.H,
                self.G, self.K, self.BH, C=CHUNK, BK=BK, PARTS=0 if triton.knobs.runtime.interpret else 3,
                **self.tuning.operands.launch,
            )  # fmt: skip
        return WalkOperands(keys, end_keys, queries, borders, inverses, scores, *kinds)

    def summaries(self, operands: WalkOperands) -> tuple[Tensor, Tensor]:
        """Of each segment its state from zero, `starts_shape`, and its transition, `transitions_shape`."""
        states, transitions = self._new(*self.starts_shape), self._new(*self.transitions_shape)
        options = self._walk if self.by_channel else self.tuning.summaries
        self._forward(options, operands, totals=states, transitions=transitions)
        return states, transitions

    def outputs(self, operands: WalkOperands, starts: Tensor) -> Tensor:
        """O, [B, T, H, V], from the true states that segments start from."""
        o = self._by_token(self.V)
        self._forward(self._walk, operands, starts=starts, o=o)
        return o

    def states(self, operands: WalkOperands, starts: Tensor) -> tuple[Tensor, Tensor]:
        """True states before the chunks [N, B, H, V, K], and new values [B, T, H, V], in the dtype of the tokens."""
        states, added = self._new(*self.states_shape, dtype=self.dtype), self._by_token(self.V)
        options = self._walk if self.by_channel else replace(self._walk, max_registers=self.tuning.registers)
        self._forward(options, operands, starts=starts, states=states, added=added)
        return states, added

    def _forward(
        self,
        options: TileOptions,
        operands: WalkOperands,
        *,
        starts: Tensor | None = None,
        totals: Tensor | None = None,
        transitions: Tensor | None = None,
        o: Tensor | None = None,
        states: Tensor | None = None,
        added: Tensor | None = None,
    ) -> None:
        BK, BV = self._walk_tile(options)
        # Without starts, of the values and then of the transition.
        tiles = cdiv(self.V, BV) + (cdiv(self.K, BV) if starts is None else 0)
        forward_walk_kernel[(tiles, self.BH, self.num_segments)](
            operands.keys, operands.end_keys, operands.queries, self.v, operands.decays, self.doc_ids, operands.kinds,
            operands.inverses, operands.scores, starts, totals, transitions, o, states, added, self.scale,
            self.T, self.H, operands.keys.shape[2], self.K, self.V, self.BH, self.num_chunks, self.segment_chunks,
            BK=BK, BV=BV, TILES=self.tiles, SUMMARIES=starts is None, OUTPUTS=o is not None,
            STATES=states is not None, **self.flags, **options.launch,
        )  # fmt: skip

    def local_grads(self, operands: WalkOperands, q: Tensor, do: Tensor) -> Tensor:
        """Gradients of the states before the segments, from 0 after them, `starts_shape`; by channel with operands."""
        totals = self._new(*self.starts_shape)
        self._reverse(operands, do, q=q, totals=totals)
        return totals

    def state_grads(self, operands: WalkOperands, do: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """True gradients of the states after the chunks [N, B, H, V, K], and dv [B, T, H, V].

        `ends` are those of the states after the segments.
        """
        grads, dv = self._new(*self.states_shape, dtype=self.dtype), self._by_token(self.V)
        self._reverse(operands, do, ends=ends, grads=grads, dv=dv)
        return grads, dv

    def _reverse(
        self,
        operands: WalkOperands,
        do: Tensor,
        *,
        q: Tensor | None = None,
        ends: Tensor | None = None,
        totals: Tensor | None = None,
        grads: Tensor | None = None,
        dv: Tensor | None = None,
    ) -> None:
        BK, BV = self._walk_tile(self._walk)
        # Copies are a pipeline's stages ahead, factors of states two chunks; a barrier is between them and the stores.
        ahead = max(2, self._walk.num_stages) + 1 if self.by_channel and q is not None else 0
        reverse_walk_kernel[(cdiv(self.V, BV), self.BH, self.num_segments)](
            q, self.k, self.sums, operands.keys, operands.end_keys, operands.queries, operands.decays, self.doc_ids,
            operands.kinds, operands.inverses, operands.scores, do, ends, totals, grads, dv, self.scale, self.T, self.H,
            operands.keys.shape[2], self.K, self.V, self.BH, self.num_chunks, self.segment_chunks, BK=BK, BV=BV,
            TILES=self.tiles, STATES=ends is not None, KEY_HEADS=self.G, AHEAD=ahead, **self.flags,
            **self._walk.launch,
        )  # fmt: skip

    def join(
        self, states: Tensor, transitions: Tensor, start: Tensor | None = None, *, reverse: bool = False
    ) -> Tensor:
        """States at the segments' borders: with `start` those before each, `starts_shape`; from 0 also after the last.

        The 0 itself is not written. With the transitions in place of states the transition of all, [B, H, K, K].
        """
        width, product = states.shape[-1], states is transitions
        if product or start is not None:
            found = borders = torch.empty_like(states[0] if product else states)
        else:
            borders = self._new(len(states) + 1, *states.shape[1:])
            found = borders[:-1] if reverse else borders[1:]
        options = self.tuning.join
        BN, BV = options.tile(self.K, width)
        if cdiv(width, BV) * self.BH > self.tuning.programs:
            BV *= 2  # all at once: 19 µs in place of 23 for five segments of 12 × 128 × 256, H100
        join_kernel[(cdiv(width, BV), self.BH)](
            start, states, transitions, found, self.K, width, self.BH, len(states), BN=BN,
            BK=max(BN, next_power_of_2(self.K)), BV=BV, STARTS=start is not None, REVERSE=reverse, PRODUCT=product,
            PRECISION="tf32x3", **options.launch,
        )  # fmt: skip
        return borders

    def input_grads(
        self, q: Tensor, do: Tensor, states: Tensor, grads: Tensor, added: Tensor, dv: Tensor, kinds: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """dq, dk, dg (None unless gated) and dβ."""
        heads = 1 if self.by_channel else math.gcd(self.H // self.G, HEADS)
        options = self.tuning.channel_grads if self.by_channel else self.tuning.grads
        BK, BV = self._tile(options)
        tiles = cdiv(self.K, BK)
        dq, dk = (self._by_token(self.K, self.H // heads) for _ in range(2))
        dbeta, dg = torch.empty_like(self.beta), None
        if self.gated:
            dg = torch.empty_like(self.sums) if self.by_channel else self._new(tiles, self.B, self.T, self.H)
        constants = {**self.flags, "BK": BK, "BV": BV, **options.launch}
        by_channel = constants.pop("BY_CHANNEL")
        operands = (
            q, self.k, self.sums, self.beta, do, self.doc_ids, states, grads, added, dv, dq, dk, dg, dbeta, self.scale,
            self.T, self.H, self.G, self.K, self.V, self.BH,
        )  # fmt: skip
        if by_channel:
            for is_plain, chunks in ((True, 1), (False, GROUP)):
                channel_grads_kernel[(cdiv(self.num_chunks, chunks) * tiles, self.BH)](
                    *operands, kinds, PLAIN=is_plain, CHUNKS=chunks, TILES=self.tiles, **constants
                )
        else:
            constants |= {"HEADS": heads, "GATED": self.gated}
            grads_kernel[(self.num_chunks * tiles, self.BH // heads)](*operands, **constants)
        if dg is not None and not self.by_channel:
            dg = dg[0] if tiles == 1 else dg.sum(0)
        return sum_heads(dq, self.G), sum_heads(dk, self.G), dg, dbeta


class _DeltaKernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        q, k, v, *g, beta = operands
        q, k, v, beta = (dense(x) for x in (q, k, v, beta))
        self._gated, of_channels = bool(g), None
        if g and g[0].dim() == 4:
            of_channels = dense(g[0])
            self._sums = torch.empty_like(of_channels)
        else:
            self._sums = decay_sums(dense(g[0]), CHUNK) if g else _no_decay(beta)
        self._launcher = DeltaKernels(k, v, self._sums, beta, self.doc_ids, self.scale, options_for(k), gated=bool(g))
        self._operands = self._launcher.systems(q, of_channels)
        self._states, self._transitions = self._launcher.summaries(self._operands)

    @cached_property
    def _borders(self) -> Tensor:
        return self._launcher.join(self._states, self._transitions)

    @property
    def state(self) -> Tensor:
        return self._borders[-1]

    @cached_property
    def transition(self) -> Tensor:
        return self._launcher.join(self._transitions, self._transitions)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self._states.shape[1:])
        if self.from_zero and "_borders" in vars(self):  # for other ranks already
            starts = self._borders[:-1]
            starts[0].zero_()
        else:
            starts = self._launcher.join(self._states, self._transitions, dense(incoming_state))
        of_chunks = self._operands.scores, self._operands.inverses, self._operands.kinds
        kept = starts, self._transitions, *(x for x in of_chunks if x is not None)
        self.saved = (_like_g(self._sums), *kept) if self._gated else kept
        return self._launcher.outputs(self._operands, starts)


class _DeltaKernelBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        # The fourth operand, g, has been replaced by its sums (`CUDA_GATED.replaced`).
        q, k, v, *sums, beta = operands
        self._q, k, v, beta, self._do = (dense(x) for x in (q, k, v, beta, self.do))
        self._starts, self._transitions, *pairs = self.saved
        of_decays = dense(_like_g(sums[0])) if sums else _no_decay(beta)
        self._launcher = DeltaKernels(k, v, of_decays, beta, self.doc_ids, self.scale, options_for(k), gated=bool(sums))
        self._operands = self._launcher.operands(self._q, pairs)
        self._local = self._launcher.local_grads(self._operands, self._q, self._do)

    @cached_property
    def _borders(self) -> Tensor:
        return self._launcher.join(self._local, self._transitions, reverse=True)

    @property
    def state_grad(self) -> Tensor:
        return self._borders[0]

    def overlap(self) -> None:
        # The true states again: they need no gradients of states.
        self._states, self._added = self._launcher.states(self._operands, self._starts)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self._local.shape[1:])
        if self.from_zero and "_borders" in vars(self):
            ends = self._borders[1:]
            ends[-1].zero_()
        else:
            ends = self._launcher.join(self._local, self._transitions, dense(incoming_grad), reverse=True)
        grads, dv = self._launcher.state_grads(self._operands, self._do, ends)
        of_tokens = self._states, grads, self._added, dv
        dq, dk, dg, dbeta = self._launcher.input_grads(self._q, self._do, *of_tokens, self._operands.kinds)
        return (dq, dk, dv, dbeta) if dg is None else (dq, dk, dv, dg, dbeta)


def _no_decay(beta: Tensor) -> Tensor:
    return beta.new_zeros(beta.mT.shape)


# Sums as the kernels read them in the shape of g, and back: [B, H, T] ↔ [B, T, H]; by channel as they are.
def _like_g(sums: Tensor) -> Tensor:
    return sums if sums.dim() == 4 else sums.mT


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, k, v, *g, beta = operands
    sums = torch.empty_like(g[0] if g and g[0].dim() == 4 else beta.mT, memory_format=torch.contiguous_format)
    # For the shapes only, which do not depend on documents or the scale.
    launcher = DeltaKernels(k, v, sums, beta, None, 1.0, options_for(k), gated=bool(g))
    pairs = [k.new_empty(launcher.pairs_shape) for _ in range(2)]
    if launcher.by_channel:
        pairs.append(beta.new_empty(launcher.kinds_shape, dtype=torch.int8))
    kept = beta.new_empty(launcher.starts_shape), beta.new_empty(launcher.transitions_shape), *pairs
    return (_like_g(sums), *kept) if g else kept


_PASSES = Passes(_DeltaKernelForward, _DeltaKernelBackward, _saved_like, needs_incoming=False)
CUDA_DELTA = with_padded_heads(_PASSES)
CUDA_GATED = with_padded_heads(_PASSES._replace(replaced=(3,)))
