"""Tiles and launch options of these kernels: they change only the order of sums.

Except `chunk` and `span`, which also change between which products bf16 rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeco_train.ops.kept import KeptOptions, Key, TileOptions

# Largest K and V: a kernel holds one of the state's two dims whole, in shared memory.
_DEPTH = 256
_SUMMARIES = TileOptions(_DEPTH, 64, 4, 3)
_WALK = TileOptions(_DEPTH, 64, 4, 2)


@dataclass(frozen=True)
class ScalarDecayTuning:
    """Options of each kernel, by its name, and of the layout in time.

    Attributes:
        outputs, query_grads, value_grads, key_grads: of the walks for o, dq, dv, dk.
        chunk: C, tokens of a chunk.
        span: chunks between two states that the walk of dq stores for dg. With bf16 tokens and weak decays dg's error
            is 3e-3 for 1, 4e-3 for 4, 7e-3 for 16 (K = V = 64, emulated).
        programs: number of programs of a walk that saturates the chip, all at once.
    """

    summaries: TileOptions = _SUMMARIES
    outputs: TileOptions = _WALK
    query_grads: TileOptions = _WALK
    value_grads: TileOptions = _WALK
    key_grads: TileOptions = _WALK
    join: TileOptions = TileOptions(64, 64, 4, 1)
    chunk: int = 64
    span: int = 4
    programs: int = 264


def _alike(summaries: TileOptions, walk: TileOptions, chunk: int = 64, programs: int = 264) -> ScalarDecayTuning:
    return ScalarDecayTuning(summaries, walk, walk, walk, walk, chunk=chunk, programs=programs)


_WIDE, _NARROW = TileOptions(_DEPTH, 64, 8, 2), TileOptions(_DEPTH, 32, 8, 1)
KEPT: dict[Key, ScalarDecayTuning] = {
    ((9, 0), torch.bfloat16, 128): ScalarDecayTuning(),
    ((9, 0), torch.bfloat16, 256): _alike(_WIDE, _WIDE, programs=132),
    (None, torch.bfloat16, 128): _alike(TileOptions(_DEPTH, 64, 4, 2), TileOptions(_DEPTH, 64, 4, 1)),
    ((9, 0), torch.float32, 128): _alike(TileOptions(_DEPTH, 32, 4, 2), TileOptions(_DEPTH, 32, 4, 1)),
    ((9, 0), torch.float32, 256): _alike(_NARROW, _NARROW, chunk=32, programs=132),
}

_OPTIONS = KeptOptions("kernels of scalar decays", KEPT)
options_for, find = _OPTIONS.options_for, _OPTIONS.find
