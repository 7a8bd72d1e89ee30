"""All-Scan `chain`: blocks of the state flow from rank to rank, each folded as it passes (ZeCO, Algorithm 2).

    rank p, for each block:  receive R_p from p−1  →  R_{p+1} = exp(G_p) ⊙_K R_p + S_p  →  send R_{p+1} to p+1

On the wire: each rank but the last sends one state of S bytes, no decays, in `blocks` messages cut along K; `carry_out`
adds a broadcast of S from the last rank. Rounds: P − 2 + b. With α seconds a message and β seconds a byte,

    T(b) = (P − 2 + b)(α + βS/b),    least at b = √((P − 2)βS/α)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeco_train.collectives.courier import Courier
from zeco_train.collectives.scan import PendingScan, ScanRequest
from zeco_train.collectives.transition import fold
from zeco_train.collectives.wire import Transfer, Wire


def launch_chain(request: ScanRequest, courier: Courier, *, blocks: int) -> PendingScan:
    """Start the scan. All receives are posted before this returns; blocks flow on without this rank's `wait`.

    Args:
        request: this rank's part.
        courier: that of the group and of the request's direction.
        blocks: pieces along K, ≥ 1; more than K are taken as K. They need not divide K.

    Raises:
        ValueError: `blocks` < 1, or the group is without this process.
        CommunicationError: an earlier scan of the courier failed, or a peer is gone.
    """
    if blocks < 1:
        raise ValueError(f"blocks must be ≥ 1, not {blocks}")
    tags = courier.take_tags(min(blocks, request.state.shape[2]))
    return courier.launch(request, "all_scan_chain", lambda wire, scan: _post(request, tags, wire, scan))


@dataclass
class _Block:
    """A piece along K, [B, H, K / b, V], on this rank; `incoming` is its piece of R_p, `receive` what brings it."""

    name: str
    tag: int
    state: Tensor
    log_decay: Tensor
    incoming: Tensor
    receive: Transfer | None = None


def _post(request: ScanRequest, tags: range, wire: Wire, scan: PendingScan) -> Callable[[], None]:
    """Cut the request into blocks and post their receives; the rest is `_flow`."""
    if wire.is_first:
        incoming = request.first_incoming()
        scan.incoming.deliver(incoming)
        parts = incoming.tensor_split(len(tags), dim=2)
    else:
        like = request.state.tensor_split(len(tags), dim=2)
        parts = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in like)
    states, log_decays = (x.tensor_split(len(tags), dim=2) for x in (request.state, request.log_decay))
    names = (f"block {i}" for i in range(len(tags)))
    blocks = [_Block(*fields) for fields in zip(names, tags, states, log_decays, parts, strict=True)]
    if not wire.is_first:
        for block in blocks:
            block.receive = wire.receive(block.incoming, wire.position - 1, block.tag, block.name)
    return partial(_flow, blocks, wire, scan)


def _flow(blocks: list[_Block], wire: Wire, scan: PendingScan) -> None:
    """Receive, fold and send on, block by block."""
    folded: list[Tensor] = []
    sends: list[Transfer] = []
    for block in blocks:
        if block.receive is not None:
            block.receive.wait()
        if wire.is_last and scan.carry is None:
            continue
        folded.append(fold(block.state, block.log_decay, block.incoming).contiguous())
        if not wire.is_last:
            sends.append(wire.send(folded[-1], wire.position + 1, block.tag, block.name))
    if not wire.is_first:
        scan.incoming.deliver(torch.cat([block.incoming for block in blocks], dim=2))
    # What follows concerns this rank's successors: its own `wait` has all that it needs.
    for send in sends:
        send.wait()
    if scan.carry is not None:
        carry = torch.cat(folded, dim=2)
        wire.broadcast(carry, wire.size - 1, "carry_out").wait()
        scan.carry.deliver(carry)
