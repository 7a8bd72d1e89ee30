"""Tiles and launch options of the operator's kernels, by key dim: they change only the order of sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zeco_train.ops.kept import KeptOptions, Key, TileOptions


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
    ),
    ((9, 0), torch.bfloat16, 256): GlaTuning(),
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
options_for, find = _OPTIONS.options_for, _OPTIONS.find
