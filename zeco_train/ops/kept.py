"""Kept options of kernels, by architecture, dtype and largest head dim: no autotuning at run time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from zeco_train.ops.operator import Target

logger = logging.getLogger(__name__)

# (architecture or None, dtype, largest head dim of the entry). None: any other GPU, with less shared memory.
Key = tuple[tuple[int, int] | None, torch.dtype, int]
Tuning = TypeVar("Tuning")


class KeptOptions(Generic[Tuning]):
    """The options of an operator's kernels for bf16 and fp32 tokens; each choice is logged once.

    An unmeasured case takes the nearest entry of its dtype: possibly slower, but equally correct.

    Args:
        kernels: their name in the log.
        entries: the options, in the order of head dims.
    """

    def __init__(self, kernels: str, entries: Mapping[Key, Tuning]) -> None:
        self._kernels, self._entries = kernels, entries
        self._found: dict[tuple[tuple[int, int], torch.dtype, int], Tuning] = {}

    def options_for(self, k: torch.Tensor, v: torch.Tensor) -> Tuning:
        """The options for keys [B, T, G, K] and values [B, T, H, V] like these, of bf16 or fp32."""
        # Sizes may be symbols of a compiler, which are no keys of a cache.
        case = Target.of(k.device).architecture, k.dtype, int(max(k.shape[-1], v.shape[-1]))
        if case not in self._found:
            self._found[case] = self._find_on(*case)
        return self._found[case]

    def find(self, architecture: tuple[int, int], dtype: torch.dtype, largest: int) -> Tuning:
        """The options for head dims up to `largest` on GPUs of that compute capability."""
        return self._entries[self._nearest(architecture, dtype, largest)]

    def _find_on(self, architecture: tuple[int, int], dtype: torch.dtype, largest: int) -> Tuning:
        found = self._nearest(architecture, dtype, largest)
        logger.info(
            "%s: %s, head dims up to %d on sm_%d%d take the kept options of %s, up to %d",
            self._kernels,
            str(dtype).removeprefix("torch."),
            largest,
            *architecture,
            "other GPUs" if found[0] is None else "sm_{}{}".format(*found[0]),
            found[2],
        )
        return self._entries[found]

    def _nearest(self, architecture: tuple[int, int], dtype: torch.dtype, largest: int) -> Key:
        # An entry for larger dims is correct for smaller ones; one for smaller dims may not fit into shared memory.
        return min(
            (key for key in self._entries if key[1] == dtype),
            key=lambda key: (key[2] < largest, key[0] != architecture, key[0] is not None, abs(key[2] - largest)),
        )
