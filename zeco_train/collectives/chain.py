"""All-Scan `chain`: blocks of the state flow from rank to rank, each folded as it passes (ZeCO, Algorithm 2).

    rank p, for each block:  receive R_p from p−1  →  R_{p+1} = A_p R_p + S_p  →  send R_{p+1} to p+1

On the wire: each rank but the last sends one state of S bytes, no transitions, in `blocks` messages cut along H, then V
(never along K, whose elements a transition may mix); `carry_out` adds a broadcast of S from the last rank. The number
of rounds is P − 2 + b. With α seconds per message and β seconds per byte,

    T(b) = (P − 2 + b)(α + βS/b),    least at b = √((P − 2)βS/α)

or, over nodes, the sum of all hops' α + βS/b, and b − 1 times that of the slowest; and in one kernel, whose blocks flow
in parallel, T = α₀ + (P − 1)α + βS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.one_kernel import CHAIN_KERNEL
from zeco_train.collectives.wire import Transfer
from zeco_train.collectives.worker import ScanJob, ScanSpec, ScanWorker
from zeco_train.ops.seam import LaunchedScan, ScanRequest, fold


def launch_chain(request: ScanRequest, worker: ScanWorker, *, blocks: int) -> LaunchedScan:
    """Start the scan. All receives are posted before this returns; blocks are forwarded without this rank's `wait`.

    `blocks` need not divide H. If it exceeds H, each head is also cut along V, into at most V pieces.
    """
    if blocks < 1:
        raise ValueError(f"blocks must be ≥ 1, not {blocks}")
    tags = worker.take_tags(len(_split(request.state, blocks)))
    return worker.launch(_Chain(request, blocks, tags))


@dataclass
class _Block:
    # A piece of some heads, or of some columns of one, [B, h, K, v], on this rank.
    name: str
    tag: int
    state: Tensor
    transition: Tensor
    incoming: Tensor  # of R_p
    receive: Transfer | None = None  # None on the first rank


def _pieces(shape: tuple[int, ...], blocks: int) -> tuple[int, int]:
    # Numbers of pieces along H, and along V for each of them.
    _, heads, _, value_dim = shape
    return (blocks, 1) if blocks <= heads else (heads, min(value_dim, -(-blocks // heads)))


def _split(state: Tensor, blocks: int) -> list[Tensor]:
    along_heads, along_values = _pieces(state.shape, blocks)
    return [part for some in state.tensor_split(along_heads, dim=1) for part in some.tensor_split(along_values, dim=3)]


def _join(parts: list[Tensor], along_values: int) -> Tensor:
    rows = [torch.cat(parts[i : i + along_values], dim=3) for i in range(0, len(parts), along_values)]
    return torch.cat(rows if along_values > 1 else parts, dim=1)


class _Chain(ScanJob):
    operation = "all_scan_chain"

    def __init__(self, request: ScanRequest, blocks: int, tags: range) -> None:
        super().__init__(request)
        self._count, self._tags = blocks, tags

    def post(self) -> None:
        request, wire = self.request, self.wire
        if wire.is_first:
            incoming = request.first_incoming()
            self.scan.incoming.set_result(incoming)
            parts = _split(incoming, self._count)
        else:
            # Messages need contiguous memory, and the pieces of a state are strided views.
            like = _split(request.state, self._count)
            parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in like]
        along_heads, self._along_values = _pieces(request.state.shape, self._count)
        states, names = _split(request.state, self._count), (f"block {i}" for i in range(len(self._tags)))
        of_heads = request.transition.tensor_split(along_heads, dim=1)
        # The pieces of a head along V share its transition.
        transitions = [transition for transition in of_heads for _ in range(self._along_values)]
        fields = zip(names, self._tags, states, transitions, parts, strict=True)
        self._blocks = [_Block(*of_block) for of_block in fields]
        if not wire.is_first:
            for block in self._blocks:
                block.receive = wire.receive(block.incoming, wire.position - 1, block.tag, block.name)

    def run(self) -> None:
        wire, scan = self.wire, self.scan
        folded: list[Tensor] = []
        sends: list[Transfer] = []
        for block in self._blocks:
            if block.receive is not None:
                block.receive.wait()
            if wire.is_last and scan.carry is None:
                continue
            folded.append(fold(block.state, block.transition, block.incoming).contiguous())
            if not wire.is_last:
                sends.append(wire.send(folded[-1], wire.position + 1, block.tag, block.name))
        if not wire.is_first:
            scan.incoming.set_result(_join([block.incoming for block in self._blocks], self._along_values))
        # The rest is for this rank's successors: its own `wait` is already satisfied.
        for send in sends:
            send.wait()
        if scan.carry is not None:
            # The carry only on the last rank; on the others the broadcast overwrites it.
            carry = _join(folded, self._along_values)
            wire.broadcast(carry, wire.size - 1, "carry_out").wait()
            scan.carry.set_result(carry)


def best_blocks(costs: Costs, load: Load) -> int:
    """The fastest number of blocks, from 1 to the H · V columns of a state.

    With α and β of the slowest hop and B the sum of β over all others, √(BS/α), rounded; for equal hops √((P − 2)βS/α).
    """
    hops = costs.along(load)
    whole = sum(hop.byte for hop in hops)
    # The slowest hop is that with the largest α if blocks are small, or with the largest β.
    counts = {
        max(1, min(load.columns, round(math.sqrt(max(whole - hop.byte, 0.0) * load.state_bytes / hop.message))))
        for hop in set(hops)
    }
    return min(counts, key=lambda blocks: _seconds(costs, load, blocks))


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    # T; `blocks` applies to messages only.
    if costs.link is Link.symmetric or blocks is None:
        latency = costs.start + (load.ranks - 1) * costs.message
        return latency + costs.byte * load.state_bytes + costs.fold * load.fold_products
    hops = [hop.message + hop.byte * load.state_bytes / blocks for hop in costs.along(load)]
    return sum(hops) + (blocks - 1) * max(hops)


CHAIN = ScanSpec(
    name="chain",
    description="blocks of a state flow from rank to rank, each folded as it passes (ZeCO, Algorithm 2)",
    launch=launch_chain,
    # The last rank forwards no state but broadcasts the carry, so it sends as much as the others.
    bytes_sent=lambda load, want_carry: float(load.state_bytes),
    seconds=_seconds,
    best_blocks=best_blocks,
    kernel=CHAIN_KERNEL,
    one_way=True,
    line="-.",
)
