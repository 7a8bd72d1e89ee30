"""Tiles and launch options of the operator's kernels, measured once and kept: nothing is tuned when a run starts.

An entry is found by architecture and head dims; the nearest one stands in for what was never measured, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """Attributes:
    keys, values: most columns of a tile along K and V, powers of 2.
    num_warps, num_stages: Triton's launch options.
    max_registers: of a thread; fewer than the compiler would take let more programs share a multiprocessor. None: as
        it likes.
    """

    keys: int
    values: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def tile(self, K: int, V: int) -> tuple[int, int]:
        """(BK, BV) for these head dims: no wider than they are, and no narrower than a matrix product takes."""
        most = (self.keys, K), (self.values, V)
        keys, values = (max(16, min(limit, triton.next_power_of_2(dim))) for limit, dim in most)
        return keys, values

    @property
    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class Tuning:
    """Options of each kernel, and how many programs keep the chip busy in the walks over chunks."""

    local_states: Options = Options(32, 128, 4, 3)
    true_states: Options = Options(64, 128, 4, 2)
    scores: Options = Options(32, 64, 1, 2)
    intra_grads: Options = Options(32, 128, 2, 1, 168)
    outputs: Options = Options(32, 128, 4, 2, 128)
    input_grads: Options = Options(32, 64, 4, 1, 128)
    join: Options = Options(64, 64, 4, 1)
    programs: int = 264


HALF = Tuning()
# fp32 tiles are twice as large, and a product in three tf32 parts holds more of them at once
SINGLE = Tuning(
    local_states=Options(32, 32, 4, 2),
    true_states=Options(32, 32, 4, 2),
    scores=Options(32, 32, 2, 1),
    intra_grads=Options(32, 32, 4, 1),
    outputs=Options(32, 64, 4, 1),
    input_grads=Options(32, 32, 4, 1),
)


def options_for(k: Tensor, v: Tensor) -> Tuning:
    """The options for inputs like these."""
    return HALF if k.element_size() == 2 else SINGLE
