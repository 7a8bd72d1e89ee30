"""What an All-Scan takes, by the model of DESIGN section 5, and the choice that follows from it.

With α seconds a message, β seconds a byte, S bytes of a state, P ranks and b blocks,

    chain       T(b) = (P − 2 + b)(α + βS/b)        one message a block and rank; b = √((P − 2)βS/α)
    chain       T = α₀ + (P − 1)α + βS              one kernel, whose blocks flow side by side
    two_shot    T = 2(α' + (P − 1)α'' + β'S(P − 1)/P)

α and β were measured once, for each way over the wire, and stand below: nothing is measured at run time, so a run that
goes on later, or elsewhere, chooses as before and adds up states in the same order. (Bits are the same on processors of
one kind: within a product, math libraries choose the order by the processor.)

What `Link.symmetric` has is fitted to lone scans of 2 and 4 GPUs, from launch to wait: beyond 4 ranks it extrapolates.
Scans back to back in a CUDA graph, where ranks may run ahead of each other, take half of that, and a chain, which then
is a full pipeline, gains the most; but between two scans of a model lies a layer, so the lone scan is the measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Link(Enum):
    """A way over the wire: `p2p` between processes of a CPU, GPUs of one machine, and machines; or `symmetric`."""

    gloo = "gloo"
    nccl = "nccl"
    nccl_across_nodes = "nccl across nodes"
    symmetric = "symmetric memory"


@dataclass(frozen=True)
class Costs:
    """Attributes:
    message, byte: α in seconds and β in seconds a byte, of a chain's messages.
    exchange, exchange_peer, exchange_byte: α', α'' and β', of one of the two all-to-alls.
    start: α₀, what one kernel takes whatever it does.
    """

    message: float
    byte: float
    exchange: float
    exchange_peer: float
    exchange_byte: float
    start: float = 0.0


MEASURED = {
    # 2 to 4 processes on 2 cores, torch 2.13, 0.03 to 4 MB: DESIGN's machine for tests.
    Link.gloo: Costs(3e-4, 7e-10, 8e-4, 3e-4, 3e-9),
    # 2 × H200 (the chain's messages: also 4), torch 2.11, 0.5 to 8 MB, inside CUDA graphs; packing and folds included.
    Link.nccl: Costs(2.0e-5, 4.0e-12, 2.9e-5, 1e-6, 1.2e-11),
    # DESIGN, section 5: 10 µs and 50 GB/s between nodes; not measured here.
    Link.nccl_across_nodes: Costs(2.5e-5, 2e-11, 2e-5, 2e-6, 2e-11),
    # 2 and 4 × H200, torch 2.11, Triton 3.6, 0.5 to 8 MB, launched one by one.
    Link.symmetric: Costs(5.8e-6, 3.8e-12, 6.25e-6, 5e-7, 3.8e-12, start=7.3e-6),
}


@dataclass(frozen=True)
class Choice:
    """Attributes:
    algorithm: `chain` or `two_shot`.
    blocks: of `chain` over p2p; None elsewhere.
    seconds: what the model says that it takes.
    """

    algorithm: str
    blocks: int | None
    seconds: float


def best_blocks(ranks: int, state_bytes: int, columns: int, costs: Costs) -> int:
    """b = √((P − 2)βS/α), a whole number from 1 to the H · V columns of a state."""
    exact = math.sqrt(max(ranks - 2, 0) * costs.byte * state_bytes / costs.message)
    return max(1, min(columns, round(exact)))


def chain_seconds(link: Link, ranks: int, state_bytes: int, blocks: int | None = None) -> float:
    """T of `chain`; the blocks count over p2p only."""
    costs = MEASURED[link]
    if link is Link.symmetric or blocks is None:
        return costs.start + (ranks - 1) * costs.message + costs.byte * state_bytes
    return (ranks - 2 + blocks) * (costs.message + costs.byte * state_bytes / blocks)


def two_shot_seconds(link: Link, ranks: int, state_bytes: int) -> float:
    """T of `two_shot`."""
    costs = MEASURED[link]
    latency = costs.exchange + (ranks - 1) * costs.exchange_peer
    return 2 * (latency + costs.exchange_byte * state_bytes * (ranks - 1) / ranks)


def choose(
    link: Link, ranks: int, state_bytes: int, columns: int, algorithm: str | None = None, blocks: int | None = None
) -> Choice:
    """The faster algorithm, or what is left to choose of a given one.

    Args:
        link: the way over the wire.
        ranks: P ≥ 2.
        state_bytes: S.
        columns: H · V, which bounds the blocks.
        algorithm: `chain`, `two_shot`, or None for the faster one; at equal times it is `chain`.
        blocks: of `chain`; None is the best number over p2p, and 16,384 elements each in one kernel.
    """
    if link is not Link.symmetric and blocks is None:
        blocks = best_blocks(ranks, state_bytes, columns, MEASURED[link])
    chain = Choice("chain", blocks, chain_seconds(link, ranks, state_bytes, blocks))
    two_shot = Choice("two_shot", None, two_shot_seconds(link, ranks, state_bytes))
    match algorithm:
        case "chain":
            return chain
        case "two_shot":
            return two_shot
        case None:
            return min(chain, two_shot, key=lambda choice: choice.seconds)
        case _:
            raise ValueError(f"no such algorithm: {algorithm}")


def eligible(link: Link, ranks: int) -> tuple[str, ...]:
    """The algorithms that `choose` may prefer for some size of state."""
    if link is not Link.symmetric:
        return ("chain", "two_shot")
    # Both times are linear in the size: what is faster for the least and the largest state is so for all between.
    ends = {choose(link, ranks, state_bytes, 1).algorithm for state_bytes in (0, 1 << 62)}
    return tuple(sorted(ends))
