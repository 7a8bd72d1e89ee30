"""The halo of a shard: the last inputs of the shard before, for states that cross one border (`Operator.neighbours`).

Every backend's own scan carries such states as well, with their transitions, and in rounds that they do not need. So a
backend that shares sequences has one of these beside it, `ScanBackend.neighbour`, over groups of its own: on CPUs a
courier runs one scan after another, and a halo would wait until the state before it has passed all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from zeco_train.collectives import Courier
from zeco_train.collectives.neighbour import NEIGHBOUR
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.sp.backend import SpecScan


class HaloScan(SpecScan):
    """One message to the next rank, in the direction of the scan.

    Args:
        couriers: see `ScanBackend`; other than those of the backend that it stands beside.
    """

    def __init__(self, couriers: tuple[Courier, ...]) -> None:
        super().__init__(couriers, NEIGHBOUR)

    def kinds(self, device: torch.device) -> Sequence[Callable[[ScanRequest], LaunchedScan]]:
        """`start`, for requests that need not say that they cut."""
        return [lambda request: self.start(replace(request, cuts=True))]
