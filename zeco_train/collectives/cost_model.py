"""Predicted times of scans over ranks (docs/mathematics.md): costs of the links, and the load of a scan.

Each algorithm's formula is in its file. The costs were measured once per link: nothing is measured at run time, so a
run resumed later or elsewhere chooses the same algorithm and adds up states in the same order. (Bitwise reproducibility
needs processors of one kind: within a product, math libraries choose the order by the processor.)

`Link.symmetric` is fitted to isolated scans of 2 and 4 GPUs, from launch to wait; beyond 4 ranks it extrapolates.
Back-to-back scans in a CUDA graph, where ranks may run ahead of each other, take half of that, and a chain, which is
then a full pipeline, gains the most; but in a model a layer lies between two scans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Link(Enum):
    """Transport of a scan: messages between processes on CPUs, between GPUs of one or several machines, or memory."""

    gloo = "gloo"
    nccl = "nccl"
    nccl_across_nodes = "nccl across nodes"
    symmetric = "symmetric memory"


@dataclass(frozen=True)
class Costs:
    """Cost parameters of a link, in seconds and seconds per byte."""

    link: Link
    message: float  # α, of point-to-point messages
    byte: float  # β
    exchange: float  # α', of an exchange between all ranks
    exchange_peer: float  # α''
    exchange_byte: float  # β'
    start: float = 0.0  # α₀, fixed cost of a kernel
    fold: float = 0.0  # by a matrix inside a kernel, of each product of two elements
    between: Costs | None = None  # the costs between nodes, if they differ

    def farthest(self, nodes: int) -> Costs:
        """The costs of the longest hop over this many nodes."""
        return self.between if self.between is not None and nodes > 1 else self

    def along(self, load: Load) -> tuple[Costs, ...]:
        return (self,) * (load.ranks - load.nodes) + (self.farthest(load.nodes),) * (load.nodes - 1)

    def exchange_seconds(self, load: Load, part: float) -> float:
        """Time of an all-to-all with `part` bytes from each rank to each other: α' + Σ (α'' + β' part)."""
        far, mates = self.farthest(load.nodes), load.per_node - 1
        inside = mates * (self.exchange_peer + self.exchange_byte * part)
        return far.exchange + inside + (load.ranks - 1 - mates) * (far.exchange_peer + far.exchange_byte * part)


# Assumed: 25 µs and 50 GB/s between nodes; not measured here.
_ACROSS = Costs(Link.nccl_across_nodes, 2.5e-5, 2e-11, 2e-5, 2e-6, 2e-11)
# 2 × H200 (the messages: also 4), torch 2.11, 0.5 to 8 MB, inside CUDA graphs; packing and folds included.
_NCCL = Costs(Link.nccl, 2.0e-5, 4.0e-12, 2.9e-5, 1e-6, 1.2e-11)
MEASURED = {
    costs.link: costs
    for costs in (
        # 2 to 4 processes on 2 cores, torch 2.13, 0.03 to 4 MB.
        Costs(Link.gloo, 3e-4, 7e-10, 8e-4, 3e-4, 3e-9),
        _NCCL,
        # Inside a node NCCL's.
        replace(_NCCL, link=Link.nccl_across_nodes, between=_ACROSS),
        # 2 and 4 × H200, torch 2.11, Triton 3.6, 0.5 to 8 MB, launched one by one. The hops of `lab.delays`, each
        # α₀ + α + βS, bound α of long chains from above.
        # A fold: emulated chains, hops of 16 × 128 × 128 and 6 × 256 × 512 with it and without.
        Costs(Link.symmetric, 5.8e-6, 3.8e-12, 6.25e-6, 5e-7, 3.8e-12, start=7.3e-6, fold=4.3e-14),
    )
}


def assumed_costs(
    message: float | None = None,
    byte: float | None = None,
    node_message: float | None = None,
    node_byte: float | None = None,
) -> dict[Link, Costs]:
    """The costs of every link with assumed values in place of measured ones; None keeps the measured value.

    `message` stands for α and α', `byte` for β and β'; `node_message` and `node_byte` are those between nodes.
    """

    def changed(costs: Costs, message: float | None, byte: float | None) -> Costs:
        changes: dict[str, Any] = {}
        if message is not None:
            changes |= {"message": message, "exchange": message}
        if byte is not None:
            changes |= {"byte": byte, "exchange_byte": byte}
        between = None if costs.between is None else changed(costs.between, node_message, node_byte)
        return replace(costs, between=between, **changes)

    return {link: changed(costs, message, byte) for link, costs in MEASURED.items()}


@dataclass(frozen=True)
class Load:
    """The size of one scan."""

    ranks: int  # P
    shape: tuple[int, ...]  # of a state, [B, H, K, V]
    itemsize: int  # bytes per element
    matrices: bool = False  # the transitions are matrices [B, H, K, K] rather than log-decays [B, H, K]
    nodes: int = 1  # machines that hold the ranks

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def state_bytes(self) -> int:
        """S, bytes of a state."""
        return math.prod(self.shape) * self.itemsize

    @property
    def transition_bytes(self) -> int:
        return math.prod(self.shape[:3]) * (self.shape[2] if self.matrices else 1) * self.itemsize

    @property
    def fold_products(self) -> int:
        """Products of two elements in the folds of a state by matrices, which only ranks between others make."""
        return self.matrices * (self.ranks - 2) * math.prod(self.shape) * self.shape[2]

    @property
    def columns(self) -> int:
        """H · V columns of K elements each: the finest possible cut of a state."""
        return self.shape[1] * self.shape[3]
