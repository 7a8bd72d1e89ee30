"""All-Scan `two_shot`: every rank owns a slice of all states and scans it alone, between two all-to-alls.

A state is taken as H·V *columns* of K elements, ordered by head, then V: owner j folds columns [j·w, (j+1)·w), over all
ranks in scan order, with w = ⌈H·V / P⌉. K is never cut, since a transition may mix a column's elements; each owner also
needs the transitions of its columns' heads, which are few.

    all-to-all:  rank p → owner j:  the columns that j owns, and the transitions of their heads
    owner:       R_0 = 0,  R_{p+1} = A_p R_p + S_p     for its columns
    all-to-all:  owner j → rank p:  its columns of R_p (and of the carry)

The first rank in scan order folds `carry_in` into its messages and keeps it as its own incoming state, so no other
rank's `carry_in` is read. On the wire, per rank: S + (w's heads) transitions out, S back, of S bytes each ((P−1)/P of
that leaves the rank); `carry_out` adds S. Rounds: 2.
Time = 2(α' + (P − 1)α'' + β'S(P − 1)/P), α' + (P − 1)α'' being an all-to-all's latency.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.courier import ScanJob
from zeco_train.collectives.one_kernel import TWO_SHOT_KERNEL
from zeco_train.collectives.spec import ScanSpec
from zeco_train.collectives.wire import Wire
from zeco_train.ops.transition import cut as transition_rows
from zeco_train.ops.transition import fold, join


class _Exchange(ScanJob):
    """A scan for any P and H·V."""

    operation = "all_scan_two_shot"

    def run(self) -> None:
        request, wire, scan = self.request, self.wire, self.scan
        batch, heads, key_dim, value_dim = request.state.shape
        cut = _Cut(heads, value_dim, wire.size)
        message = cut.pack(self.own_state(), request.transition)
        received = torch.empty_like(message)
        wire.all_to_all(received, message, "slices").wait()
        results = _fold_slices(received, request.transition, wire, cut, with_carry=scan.carry is not None)
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
    """Columns and heads of each owner.

    Attributes:
        width: columns per owner, w. Those of the last owners may be padding.
        rows: maximum number of heads that an owner's columns touch; the same for all, so that messages have equal
            length.
    """

    def __init__(self, heads: int, value_dim: int, owners: int) -> None:
        self._heads, self._value_dim, self._owners = heads, value_dim, owners
        columns = heads * value_dim
        self.width = -(-columns // owners)
        # Owners past the last column have padding only, and no start here.
        starts = range(0, columns, self.width)
        self.rows = max(
            (min(start + self.width, columns) - 1) // value_dim - start // value_dim + 1 for start in starts
        )

    def pack(self, state: Tensor, transition: Tensor) -> Tensor:
        """The messages to the owners, [P, B, w + rows, K], or [P, B, w + rows · K, K] with matrices."""
        columns = state.transpose(2, 3).flatten(1, 2)
        padding = self._owners * self.width - columns.shape[1]
        slices = functional.pad(columns, (0, 0, 0, padding)).unflatten(1, (self._owners, self.width))
        # Computed on the device: indices from a host list would synchronise.
        first_head = torch.arange(self._owners, device=state.device) * self.width // self._value_dim
        touched = first_head[:, None] + torch.arange(self.rows, device=state.device)
        transitions = transition_rows(transition, touched.clamp(max=self._heads - 1))
        return torch.cat((slices, transitions), dim=2).transpose(0, 1).contiguous()

    def as_heads(self, columns: Tensor, owner: int) -> Tensor:
        """An owner's columns as states of the heads that they touch: [B, w, K] → [B, rows, K, C].

        One head has C = w columns; several have C = V each, with zeros in other owners' columns.
        """
        columns = functional.pad(columns, (0, 0, *self._padding(owner)))
        return columns.unflatten(1, (self.rows, -1)).transpose(2, 3)

    def as_columns(self, states: Tensor, owner: int) -> Tensor:
        """Inverse of `as_heads`: [B, rows, K, C] → [B, w, K]."""
        before, after = self._padding(owner)
        columns = states.transpose(2, 3).flatten(1, 2)
        return functional.pad(columns, (0, 0, -before, -after))

    def _padding(self, owner: int) -> tuple[int, int]:
        """Numbers of other owners' columns among an owner's heads, before and after its own.

        Negative if its own columns include padding.
        """
        if self.rows == 1:
            return 0, 0
        before = owner * self.width % self._value_dim
        return before, self.rows * self._value_dim - before - self.width


def _fold_slices(received: Tensor, transition: Tensor, wire: Wire, cut: _Cut, with_carry: bool) -> Tensor:
    """The exclusive scan of this rank's columns.

    Args:
        received: [P, B, w + …, K], by group rank: its part of these columns, and its transitions of their heads.
        transition: of this rank; all ranks' are of one kind.
        wire: of the scan.
        cut: columns and heads of each owner.
        with_carry: also return the carry.

    Returns:
        [P, 1 or 2, B, w, K], by group rank: its R, and the carry if wanted.
    """
    columns, rows = received.split((cut.width, received.shape[2] - cut.width), dim=2)
    results = columns.new_empty((wire.size, 2 if with_carry else 1, *columns.shape[1:]))
    running = torch.zeros_like(cut.as_heads(columns[0], wire.rank))
    for position in range(wire.size):
        rank = wire.group_rank(position)
        results[rank, 0] = cut.as_columns(running, wire.rank)
        if position < wire.size - 1 or with_carry:
            running = fold(cut.as_heads(columns[rank], wire.rank), join(rows[rank], transition), running)
    if with_carry:
        results[:, 1] = cut.as_columns(running, wire.rank)
    return results


def _bytes_sent(load: Load, want_carry: bool) -> float:
    _, heads, key_dim, value_dim = load.shape
    cut = _Cut(heads, value_dim, load.ranks)
    sent = (cut.width + cut.rows * (key_dim if load.matrices else 1)) * (load.ranks - 1)
    returned = cut.width * (load.ranks - 1) * (2 if want_carry else 1)
    return (sent + returned) * float(load.state_bytes) / load.columns


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    latency = costs.exchange + (load.ranks - 1) * costs.exchange_peer
    return 2 * (latency + costs.exchange_byte * load.state_bytes * (load.ranks - 1) / load.ranks)


TWO_SHOT = ScanSpec(
    name="two_shot",
    description="every rank owns a slice of all states and scans it alone, between two all-to-alls",
    launch=lambda request, courier: courier.launch(_Exchange(request)),
    bytes_sent=_bytes_sent,
    seconds=_seconds,
    kernel=TWO_SHOT_KERNEL,
    line=":",
)
