"""All-Scan `two_shot`: every rank owns a slice of all states and scans it alone, between two all-to-alls.

A state is taken as H·V *columns* of K elements, ordered by head, then V: owner j folds columns [j·w, (j+1)·w),
w = ⌈H·V / P⌉, over all ranks in scan order. K is never cut, so a transition may mix a column's elements.

    all-to-all:  rank p → owner j:  the columns that j owns, and the log-decays of their heads
    owner:       R_0 = 0,  R_{p+1} = exp(G_p) ⊙_K R_p + S_p     for its columns
    all-to-all:  owner j → rank p:  its columns of R_p (and of the carry)

The first rank in scan order folds `carry_in` into what it sends and keeps it as its own incoming state, so nobody
else's `carry_in` is read. On the wire, per rank: S + (w's heads) log-decays out, S back, of S bytes each ((P−1)/P of
that leaves the rank); `carry_out` adds S. Rounds: 2. Time ≈ 2(α' + βS), α' being an all-to-all's latency.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from zeco_train.collectives.courier import Courier
from zeco_train.collectives.scan import PendingScan, ScanRequest
from zeco_train.collectives.transition import fold
from zeco_train.collectives.wire import Wire


def launch_two_shot(request: ScanRequest, courier: Courier) -> PendingScan:
    """Start the scan, for any P and H·V; it ends without this rank's `wait`. Errors as of `Courier.launch`."""
    return courier.launch(request, "all_scan_two_shot", lambda wire, scan: partial(_exchange, request, wire, scan))


def _exchange(request: ScanRequest, wire: Wire, scan: PendingScan) -> None:
    state = request.state
    batch, heads, key_dim, value_dim = state.shape
    cut = _Cut(heads, value_dim, wire.size)
    if wire.is_first:
        scan.incoming.deliver(request.first_incoming())
        if request.carry_in is not None:
            state = fold(state, request.log_decay, request.carry_in)

    message = cut.pack(state, request.log_decay)
    received = torch.empty_like(message)
    wire.all_to_all(received, message, "slices").wait()
    results = _fold_slices(received, wire, cut, with_carry=scan.carry is not None)
    returned = torch.empty_like(results)
    wire.all_to_all(returned, results, "results").wait()

    # [P owners, 1 or 2, B, w, K] → [B, P·w columns, K] → [B, H, K, V]
    incoming, *carry = (
        part.transpose(0, 1)
        .reshape(batch, -1, key_dim)[:, : heads * value_dim]
        .unflatten(1, (heads, value_dim))
        .transpose(2, 3)
        .contiguous()
        for part in returned.unbind(1)
    )
    if not wire.is_first:
        scan.incoming.deliver(incoming)
    if scan.carry is not None:
        scan.carry.deliver(carry[0])


class _Cut:
    """Which columns and heads each owner has.

    Attributes:
        width: columns of an owner, w. The last owners' may be padding.
        rows: heads that an owner's columns touch, at most; the same for all, so that messages are equally long.
    """

    def __init__(self, heads: int, value_dim: int, owners: int) -> None:
        self._heads, self._value_dim, self._owners = heads, value_dim, owners
        columns = heads * value_dim
        self.width = -(-columns // owners)
        starts = range(0, columns, self.width)
        self.rows = max(
            (min(start + self.width, columns) - 1) // value_dim - start // value_dim + 1 for start in starts
        )

    def pack(self, state: Tensor, log_decay: Tensor) -> Tensor:
        """The messages to the owners: [B, H, K, V] and [B, H, K] → [P, B, w + rows, K]."""
        columns = state.transpose(2, 3).flatten(1, 2)
        padding = self._owners * self.width - columns.shape[1]
        slices = functional.pad(columns, (0, 0, 0, padding)).unflatten(1, (self._owners, self.width))
        # Indices are computed on the device: a list from the host would synchronise with it.
        first_head = torch.arange(self._owners, device=state.device) * self.width // self._value_dim
        touched = first_head[:, None] + torch.arange(self.rows, device=state.device)
        decays = log_decay[:, touched.clamp(max=self._heads - 1)]
        return torch.cat((slices, decays), dim=2).transpose(0, 1).contiguous()

    def row_of_column(self, owner: int, device: torch.device) -> Tensor:
        """For each of an owner's columns, [w], the row of its message's decays that belongs to it."""
        start = owner * self.width
        rows = (start + torch.arange(self.width, device=device)) // self._value_dim - start // self._value_dim
        return rows.clamp(max=self.rows - 1)  # padding may lie beyond the last head


def _fold_slices(received: Tensor, wire: Wire, cut: _Cut, with_carry: bool) -> Tensor:
    """The exclusive scan of this rank's columns: [P, B, w + rows, K] → [P, 1 or 2, B, w, K], for each rank its R
    (and the carry)."""
    slices, decays = received[:, :, : cut.width], received[:, :, cut.width :]
    decays = decays[:, :, cut.row_of_column(wire.rank, received.device)]
    results = slices.new_empty((wire.size, 2 if with_carry else 1, *slices.shape[1:]))
    running = torch.zeros_like(slices[0])
    for position in range(wire.size):
        rank = wire.group_rank(position)
        results[rank, 0] = running
        if position < wire.size - 1 or with_carry:
            # Each column is folded as a head with V = 1.
            running = fold(slices[rank].unsqueeze(-1), decays[rank], running.unsqueeze(-1)).squeeze(-1)
    if with_carry:
        results[:, 1] = running
    return results
