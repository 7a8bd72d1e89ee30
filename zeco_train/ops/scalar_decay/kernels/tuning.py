"""Tiles and launch options of these kernels, stored as those of gated linear attention: no autotuning at run time.

Options change only the order of sums, except `chunk` and `span`, which also change between which products
bf16 rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from zeco_train.ops.kept import KeptOptions, Key

# No tile is narrower than this: see the note on miscompiled tiles of 32 keys in ops/gla/kernels/launch.py.
NARROWEST = {torch.bfloat16: 64, torch.float32: 32}


@dataclass(frozen=True)
class ScalarDecayOptions:
    """Options of one kernel.

    Attributes:
        columns: maximum width of a program's part of the state; its other dimension is whole.
        num_warps, num_stages: Triton's launch options.
        max_registers: per thread; None: no limit.
    """

    columns: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def tile(self, depth: int, width: int, narrowest: int) -> tuple[int, int]:
        """The tile of a state [depth, width]."""
        columns = min(self.columns, triton.next_power_of_2(width))
        return max(narrowest, triton.next_power_of_2(depth)), max(narrowest, columns)

    @property
    def launch(self) -> dict[str, int | None]:
        """Keyword arguments of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


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

    summaries: ScalarDecayOptions = ScalarDecayOptions(64, 4, 3)
    outputs: ScalarDecayOptions = ScalarDecayOptions(64, 4, 2)
    query_grads: ScalarDecayOptions = ScalarDecayOptions(64, 4, 2)
    value_grads: ScalarDecayOptions = ScalarDecayOptions(64, 4, 2)
    key_grads: ScalarDecayOptions = ScalarDecayOptions(64, 4, 2)
    join: ScalarDecayOptions = ScalarDecayOptions(64, 4, 1)
    chunk: int = 64
    span: int = 4
    programs: int = 264


def _alike(
    summaries: ScalarDecayOptions, walk: ScalarDecayOptions, chunk: int = 64, programs: int = 264
) -> ScalarDecayTuning:
    return ScalarDecayTuning(summaries, walk, walk, walk, walk, chunk=chunk, programs=programs)


KEPT: dict[Key, ScalarDecayTuning] = {
    ((9, 0), torch.bfloat16, 128): ScalarDecayTuning(),
    ((9, 0), torch.bfloat16, 256): _alike(ScalarDecayOptions(64, 8, 2), ScalarDecayOptions(64, 8, 2), programs=132),
    (None, torch.bfloat16, 128): _alike(ScalarDecayOptions(64, 4, 2), ScalarDecayOptions(64, 4, 1)),
    ((9, 0), torch.float32, 128): _alike(ScalarDecayOptions(32, 4, 2), ScalarDecayOptions(32, 4, 1)),
    ((9, 0), torch.float32, 256): _alike(
        ScalarDecayOptions(32, 8, 1), ScalarDecayOptions(32, 8, 1), chunk=32, programs=132
    ),
}

_OPTIONS = KeptOptions("kernels of scalar decays", KEPT)
options_for, find = _OPTIONS.options_for, _OPTIONS.find
