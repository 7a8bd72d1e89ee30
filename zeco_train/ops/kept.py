"""Options of the operators' kernels, measured once and stored: no autotuning at run time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch

from zeco_train.kernels import cdiv, next_power_of_2
from zeco_train.ops.operator import Target

logger = logging.getLogger(__name__)

# (architecture or None, dtype, largest head dim of the entry). None: any other GPU, with less shared memory.
Key = tuple[tuple[int, int] | None, torch.dtype, int]
Tuning = TypeVar("Tuning")


@dataclass(frozen=True)
class TileOptions:
    """Tile sizes and launch options of one kernel."""

    keys: int  # maximum tile width along K, or the depth of a state; a power of 2, as is the next
    values: int  # along V, or the width
    num_warps: int  # as of Triton, as is the next
    num_stages: int
    # Per thread; a limit below the compiler's choice lets more programs share a multiprocessor. None: no limit.
    max_registers: int | None = None

    def tile(self, K: int, V: int, narrowest: int = 16) -> tuple[int, int]:
        """(BK, BV) for these head dims: no wider than they are, but at least `narrowest`, as a product needs."""
        keys, values = min(self.keys, next_power_of_2(K)), min(self.values, next_power_of_2(V))
        return max(narrowest, keys), max(narrowest, values)

    @cached_property
    def launch(self) -> dict[str, int | None]:
        """Keyword arguments of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


class RunOptions(NamedTuple):
    """How a kernel that walks over runs of tokens, with a few channels a program, is divided."""

    rows: int  # tokens whose loads are issued together
    channels: int  # of a program, which is one warp
    programs: int  # about as many: one wave on a large GPU; the same on every device, so that the sums are
    shortest: int  # tokens of a program, at least

    def run(self, batch: int, tokens: int, channels: int) -> int:
        """Tokens of a program, a multiple of `rows`."""
        runs = max(1, self.programs // (batch * cdiv(channels, self.channels)))
        tokens = max(cdiv(tokens, runs), min(tokens, self.shortest))
        return cdiv(tokens, self.rows) * self.rows


class KeptOptions(Generic[Tuning]):
    """The options of an operator's kernels for bf16 and fp32 tokens.

    An unmeasured case takes the nearest entry of its dtype: possibly slower, but equally correct.

    Args:
        kernels: their name in the log.
        entries: the options, in the order of head dims.
    """

    def __init__(self, kernels: str, entries: Mapping[Key, Tuning]) -> None:
        self._kernels, self._entries = kernels, entries
        self._found: dict[tuple[tuple[int, int], torch.dtype, int], Tuning] = {}

    def options_for(self, *tokens: torch.Tensor) -> Tuning:
        """The options for tokens like these, [..., K] or [..., V]; a choice is logged once."""
        # Sizes may be symbols of a compiler, which are no keys of a cache.
        largest = int(max(x.shape[-1] for x in tokens))
        case = Target.of(tokens[0].device).architecture, tokens[0].dtype, largest
        if case not in self._found:
            key = self._nearest(*case)
            logger.info(
                "%s: %s, head dims up to %d on sm_%d%d take the kept options of %s, up to %d",
                self._kernels,
                str(tokens[0].dtype).removeprefix("torch."),
                largest,
                *case[0],
                "other GPUs" if key[0] is None else "sm_{}{}".format(*key[0]),
                key[2],
            )
            self._found[case] = self._entries[key]
        return self._found[case]

    def _nearest(self, architecture: tuple[int, int], dtype: torch.dtype, largest: int) -> Key:
        # An entry for larger dims is correct for smaller ones; one for smaller dims may not fit into shared memory.
        return min(
            (key for key in self._entries if key[1] == dtype),
            key=lambda key: (key[2] < largest, key[0] != architecture, key[0] is not None, abs(key[2] - largest)),
        )
