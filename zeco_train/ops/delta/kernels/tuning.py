"""Tiles and launch options of these kernels, stored as those of gated linear attention: no autotuning at run time.

Options change only the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeco_train.ops.kept import KeptOptions, Key, TileOptions

# Largest K and V. A walk holds all K rows of its columns of the state, and as many of the tokens of a chunk.
LARGEST_HEAD_DIM = 256
# No tile is narrower than this: see the note on miscompiled tiles of 32 keys in ops/gla/kernels/launch.py.
NARROWEST = {torch.bfloat16: 64, torch.float32: 32}

_SUMS = TileOptions(64, 64, 4, 1)
_OPERANDS = TileOptions(64, 64, 8, 1)
_SYSTEMS = TileOptions(64, 64, 4, 1)
_SUMMARIES = TileOptions(LARGEST_HEAD_DIM, 64, 4, 2)
_WALK = TileOptions(LARGEST_HEAD_DIM, 64, 4, 3)
_GRADS = TileOptions(64, 64, 8, 3)
_NARROW = TileOptions(32, 32, 4, 1)


@dataclass(frozen=True)
class DeltaTuning:
    """Options of each kernel, by its name, and of the layout in time."""

    channel_sums: TileOptions = _SUMS
    systems: TileOptions = _SYSTEMS
    operands: TileOptions = _OPERANDS
    # Of the walks forward: the segments', of o, and of the backward pass; and of both walks in reverse.
    summaries: TileOptions = _SUMMARIES
    outputs: TileOptions = _WALK
    states: TileOptions = _WALK
    reverse: TileOptions = _WALK
    grads: TileOptions = _GRADS
    programs: int = 132  # of a walk, that saturate the chip, all at once
    joining: float = 6.0  # chunks that all walks together take as long for as for joining one more segment, estimated


def _narrow(walk: TileOptions) -> DeltaTuning:
    return DeltaTuning(_NARROW, _NARROW, _NARROW, walk, walk, walk, walk, _NARROW)


def _walks(walk: TileOptions) -> DeltaTuning:
    return DeltaTuning(summaries=walk, outputs=walk, states=walk, reverse=walk)


# Measured on an H200 with 16k tokens of 16 heads, K = V = 128, bf16; the rest is by the compiler's counts of registers
# and shared memory.
KEPT: dict[Key, DeltaTuning] = {
    ((9, 0), torch.bfloat16, 128): DeltaTuning(),
    ((9, 0), torch.bfloat16, 256): _walks(TileOptions(LARGEST_HEAD_DIM, 64, 8, 1)),
    (None, torch.bfloat16, 128): _walks(TileOptions(LARGEST_HEAD_DIM, 64, 4, 1)),
    ((9, 0), torch.float32, 128): _narrow(TileOptions(LARGEST_HEAD_DIM, 32, 4, 1)),
    ((9, 0), torch.float32, 256): _narrow(TileOptions(LARGEST_HEAD_DIM, 32, 8, 1)),
}

_OPTIONS = KeptOptions("kernels of delta rules", KEPT)


def options_for(k: torch.Tensor) -> DeltaTuning:
    """The options for keys [B, T, G, K] like these, of bf16 or fp32; all kernels go through V by tiles."""
    return _OPTIONS.options_for(k, k)


find = _OPTIONS.find
