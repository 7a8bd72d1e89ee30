"""All-gather with a weighted prefix: every rank gets every pair and folds those before its own (LASP-2, for GLA).

    all-gather:  (S_p, G_p) of all ranks, as one message [B, H, K, V + 1]
    locally:     R ← 0;  for each rank before this one, in scan order:  R ← exp(G) ⊙_K R + S

LASP-2's paper sends states alone, which is right without decays only. The prefix is folded from the first rank on and
never made by subtraction or division. The first rank in scan order folds `carry_in` into its message, so nobody else's
`carry_in` is read; `carry_out` is the fold over all ranks, the same on each, and costs no message.

On the wire, per rank: S (V + 1)/V bytes sent to each of P − 1 others, as many received. Rounds: 1.
Time = (P − 1)(α' + βS); P pairs are held in memory meanwhile.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives.courier import Courier, PendingScan, scan_alone
from zeco_train.collectives.transition import fold
from zeco_train.collectives.wire import Wire, check_scan


def launch_all_gather(
    state: Tensor,
    log_decay: Tensor,
    group: ProcessGroup,
    *,
    courier: Courier,
    timeout: timedelta,
    reverse: bool = False,
    carry_in: Tensor | None = None,
    want_carry: bool = False,
) -> PendingScan:
    """Start the scan; it ends without this rank's `wait`. Arguments and errors as in `launch_chain`."""
    check_scan(state, log_decay, carry_in)
    wire = Wire(group, "all_gather_scan", reverse, timeout)
    if wire.size == 1:
        return scan_alone(state, log_decay, carry_in, want_carry)
    scan = PendingScan(want_carry)
    with courier.launching(state, log_decay, carry_in):
        return courier.submit(lambda: _gather(scan, wire, state, log_decay, carry_in), scan, state.device)


def _gather(scan: PendingScan, wire: Wire, state: Tensor, log_decay: Tensor, carry_in: Tensor | None) -> None:
    if wire.is_first:
        scan.incoming.deliver(torch.zeros_like(state) if carry_in is None else carry_in)
        if carry_in is not None:
            state = fold(state, log_decay, carry_in)
    message = torch.cat((state, log_decay.unsqueeze(-1)), dim=-1)
    pairs = message.new_empty((wire.size, *message.shape))
    wire.all_gather(pairs, message, "states and log-decays").wait()

    running = torch.zeros_like(state)
    for position in range(wire.size):
        if position == wire.position and not wire.is_first:
            scan.incoming.deliver(running)
        if position >= wire.position and scan.carry is None:
            break
        pair = pairs[wire.group_rank(position)]
        running = fold(pair[..., :-1], pair[..., -1], running)
    if scan.carry is not None:
        scan.carry.deliver(running)
