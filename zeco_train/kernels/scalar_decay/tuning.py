"""Tiles and launch options of these kernels, stored as those of gated linear attention: no autotuning at run time.

Entries are keyed by architecture, dtype and the largest head dim; the choice is logged. Options change only the order
of sums, except `chunk` and `span`, which also change between which products bf16 rounds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
import triton

logger = logging.getLogger(__name__)

# No tile is narrower than this: see the note on miscompiled tiles of 32 keys in kernels/gla/launch.py.
NARROWEST = {torch.bfloat16: 64, torch.float32: 32}


@dataclass(frozen=True)
class Options:
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
class Tuning:
    """Options of each kernel, by its name, and of the layout in time.

    Attributes:
        outputs, query_grads, value_grads, key_grads: of the walks for o, dq, dv, dk.
        chunk: C, tokens of a chunk.
        span: chunks between two states that the walk of dq stores for dg. With bf16 tokens and weak decays dg's error
            is 3e-3 for 1, 4e-3 for 4, 7e-3 for 16 (K = V = 64, emulated).
        programs: number of programs of a walk that saturates the chip, all at once.
    """

    summaries: Options = Options(64, 4, 3)
    outputs: Options = Options(64, 4, 2)
    query_grads: Options = Options(64, 4, 2)
    value_grads: Options = Options(64, 4, 2)
    key_grads: Options = Options(64, 4, 2)
    join: Options = Options(64, 4, 1)
    chunk: int = 64
    span: int = 4
    programs: int = 264


def _alike(summaries: Options, walk: Options, chunk: int = 64, programs: int = 264) -> Tuning:
    """The same options for all walks."""
    return Tuning(summaries, walk, walk, walk, walk, chunk=chunk, programs=programs)


# By (architecture or None, dtype, largest head dim of the entry), in the order of head dims. None: any other GPU, with
# less shared memory.
Key = tuple[tuple[int, int] | None, torch.dtype, int]
KEPT: dict[Key, Tuning] = {
    ((9, 0), torch.bfloat16, 128): Tuning(),
    ((9, 0), torch.bfloat16, 256): _alike(Options(64, 8, 2), Options(64, 8, 2), programs=132),
    (None, torch.bfloat16, 128): _alike(Options(64, 4, 2), Options(64, 4, 1)),
    ((9, 0), torch.float32, 128): _alike(Options(32, 4, 2), Options(32, 4, 1)),
    ((9, 0), torch.float32, 256): _alike(Options(32, 8, 1), Options(32, 8, 1), chunk=32, programs=132),
}


def options_for(k: torch.Tensor, v: torch.Tensor) -> Tuning:
    """The options for keys [B, T, G, K] and values [B, T, H, V] like these, of bf16 or fp32."""
    return _find_on(k.device, k.dtype, max(k.shape[-1], v.shape[-1]))


@cache
def _find_on(device: torch.device, dtype: torch.dtype, largest: int) -> Tuning:
    # under Triton's interpreter the device is a CPU, and only the tile sizes matter
    architecture = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    found = _nearest(architecture, dtype, largest)
    logger.info(
        "kernels of scalar decays: %s, head dims up to %d on sm_%d%d take the kept options of %s, up to %d",
        str(dtype).removeprefix("torch."),
        largest,
        *architecture,
        "other GPUs" if found[0] is None else "sm_{}{}".format(*found[0]),
        found[2],
    )
    return KEPT[found]


def find(architecture: tuple[int, int], dtype: torch.dtype, largest: int) -> Tuning:
    """The options for head dims up to `largest` on GPUs of that compute capability."""
    return KEPT[_nearest(architecture, dtype, largest)]


def _nearest(architecture: tuple[int, int], dtype: torch.dtype, largest: int) -> Key:
    # An entry for larger dims is correct for smaller ones; one for smaller dims may not fit into shared memory.
    entries = [key for key in KEPT if key[1] == dtype]
    return min(
        entries, key=lambda key: (key[2] < largest, key[0] != architecture, key[0] is not None, abs(key[2] - largest))
    )
