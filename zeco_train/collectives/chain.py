"""All-Scan `chain`: blocks of the state flow from rank to rank, each folded as it passes (ZeCO, Algorithm 2).

    rank p, for each block:  receive R_p from p−1  →  R_{p+1} = exp(G_p) ⊙_K R_p + S_p  →  send R_{p+1} to p+1

On the wire: each rank but the last sends one state of S bytes, no decays, in `blocks` messages cut along K; `carry_out`
adds a broadcast of S from the last rank. Rounds: P − 2 + b. With α seconds a message and β seconds a byte,

    T(b) = (P − 2 + b)(α + βS/b),    least at b = √((P − 2)βS/α)
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives.courier import Courier, PendingScan, scan_alone
from zeco_train.collectives.transition import fold
from zeco_train.collectives.wire import Transfer, Wire, check_scan


def launch_chain(
    state: Tensor,
    log_decay: Tensor,
    group: ProcessGroup,
    *,
    courier: Courier,
    timeout: timedelta,
    blocks: int,
    reverse: bool = False,
    carry_in: Tensor | None = None,
    want_carry: bool = False,
) -> PendingScan:
    """Start the scan. All receives are posted before this returns; blocks flow on without this rank's `wait`.

    Args:
        state: [B, H, K, V], fp32 or fp64, this rank's contribution from a zero start.
        log_decay: [B, H, K], same dtype, ≤ 0, may be −inf.
        group: the ranks to scan over, used by scans of this direction only.
        courier: the one that belongs to `group`.
        timeout: bound of each wait for a peer.
        blocks: pieces along K, ≥ 1; more than K are taken as K. They need not divide K.
        reverse: scan from the last rank to the first.
        carry_in: [B, H, K, V], read by the first rank in scan direction only; None is zero.
        want_carry: `carry_out` will be asked for. All ranks must agree.

    Raises:
        ValueError: shapes or dtypes that do not fit, `blocks` < 1, or a group without this process.
        CommunicationError: an earlier scan of the courier failed, or a peer is gone.
    """
    check_scan(state, log_decay, carry_in)
    if blocks < 1:
        raise ValueError(f"blocks must be ≥ 1, not {blocks}")
    wire = Wire(group, "all_scan_chain", reverse, timeout)
    if wire.size == 1:
        return scan_alone(state, log_decay, carry_in, want_carry)
    scan = PendingScan(want_carry)
    states = state.tensor_split(min(blocks, state.shape[2]), dim=2)
    tags = courier.take_tags(len(states))
    with courier.launching(state, log_decay, carry_in):
        if wire.is_first:
            incoming = torch.zeros_like(state) if carry_in is None else carry_in
            scan.incoming.deliver(incoming)
            parts = incoming.tensor_split(len(states), dim=2)
            receives: list[Transfer | None] = [None] * len(states)
        else:
            parts = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in states)
            receives = [
                wire.receive(part, wire.position - 1, tag, f"block {i}")
                for i, (part, tag) in enumerate(zip(parts, tags, strict=True))
            ]
        log_decays = log_decay.tensor_split(len(states), dim=2)
        return courier.submit(lambda: _flow(scan, wire, states, log_decays, parts, receives, tags), scan, state.device)


def _flow(
    scan: PendingScan,
    wire: Wire,
    states: tuple[Tensor, ...],
    log_decays: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    receives: list[Transfer | None],
    tags: range,
) -> None:
    """Receive, fold and send on, block by block; `parts` are the blocks of the incoming state."""
    folded: list[Tensor] = []
    sends: list[Transfer] = []
    for i, receive in enumerate(receives):
        if receive is not None:
            receive.wait()
        if wire.is_last and scan.carry is None:
            continue
        folded.append(fold(states[i], log_decays[i], parts[i]).contiguous())
        if not wire.is_last:
            sends.append(wire.send(folded[i], wire.position + 1, tags[i], f"block {i}"))
    if not wire.is_first:
        scan.incoming.deliver(torch.cat(parts, dim=2))
    # What follows concerns this rank's successors: its own `wait` has all that it needs.
    for send in sends:
        send.wait()
    if scan.carry is not None:
        carry = torch.cat(folded, dim=2)
        wire.broadcast(carry, wire.size - 1, "carry_out").wait()
        scan.carry.deliver(carry)
