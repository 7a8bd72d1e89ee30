"""All-Scan `two_shot`: every rank owns a slice of all states and scans it alone, between two all-to-alls.

Owner j folds its columns of the state (`slices.py`), of which there are w = ⌈H·V / P⌉, over all ranks in scan order.

    all-to-all:  rank p → owner j:  the columns that j owns, and the transitions of their heads
    owner:       R_0 = 0,  R_{p+1} = A_p R_p + S_p     for its columns
    all-to-all:  owner j → rank p:  its columns of R_p (and of the carry)

The first rank in scan order folds `carry_in` into its messages and keeps it as its own incoming state, so no other
rank's `carry_in` is read. On the wire, per rank: S + (w's heads) transitions out, S back, of S bytes each ((P−1)/P of
that leaves the rank); `carry_out` adds S. Rounds: 2.
Time = 2(α' + (P − 1)α'') + β'(P − 1)(2S/P + A), α' + (P − 1)α'' being an all-to-all's latency and A the bytes of
transitions in a message; over nodes each of the P − 1 messages costs what it does where it goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.one_kernel import TWO_SHOT_KERNEL, matrix_copies
from zeco_train.collectives.slices import Slices, slice_bytes
from zeco_train.collectives.wire import Wire
from zeco_train.collectives.worker import ScanJob, ScanSpec
from zeco_train.ops.seam import fold


class _TwoShot(ScanJob):
    operation = "all_scan_two_shot"

    def run(self) -> None:
        request, wire, scan = self.request, self.wire, self.scan
        _, heads, _, value_dim = request.state.shape
        slices = Slices(heads, value_dim, wire.size)
        message = slices.pack(self.own_state(), request.transition)
        received = torch.empty_like(message)
        wire.all_to_all(received, message, "slices").wait()
        results = _fold_slices(received, request.transition, wire, slices, with_carry=scan.carry is not None)
        returned = torch.empty_like(results)
        wire.all_to_all(returned, results, "results").wait()

        incoming, *carry = (slices.whole(part) for part in returned.unbind(1))
        if not wire.is_first:
            scan.incoming.set_result(incoming)
        if scan.carry is not None:
            scan.carry.set_result(carry[0])


def _fold_slices(received: Tensor, transition: Tensor, wire: Wire, slices: Slices, with_carry: bool) -> Tensor:
    # The exclusive scan of this rank's columns: [P, B, w + …, K], by group rank its part of these columns and its
    # transitions of their heads → [P, 1 or 2, B, w, K], by group rank its R, and the carry if wanted.
    size, batch, _, key_dim = received.shape
    results = received.new_empty((size, 2 if with_carry else 1, batch, slices.width, key_dim))
    running = torch.zeros_like(slices.unpack(received[0], wire.rank, transition)[0])
    for position in range(size):
        rank = wire.group_rank(position)
        results[rank, 0] = slices.as_columns(running, wire.rank)
        if position < size - 1 or with_carry:
            running = fold(*slices.unpack(received[rank], wire.rank, transition), running)
    if with_carry:
        results[:, 1] = slices.as_columns(running, wire.rank)
    return results


def _bytes_sent(load: Load, want_carry: bool) -> float:
    columns, transitions = slice_bytes(load, load.ranks)
    return (load.ranks - 1) * (columns * (3 if want_carry else 2) + transitions)


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    if costs.link is Link.symmetric:
        # Measured without log-decays; the kernel's owners have tiles, not columns.
        matrices = matrix_copies(load) * load.transition_bytes if load.matrices else 0
        slices = (2 * load.state_bytes + matrices) / load.ranks
    else:
        columns, transitions = slice_bytes(load, load.ranks)
        slices = 2 * columns + transitions
    return 2 * costs.exchange_seconds(load, slices / 2) + costs.fold * load.fold_products / load.ranks


TWO_SHOT = ScanSpec(
    name="two_shot",
    description="every rank owns a slice of all states and scans it alone, between two all-to-alls",
    launch=lambda request, worker: worker.launch(_TwoShot(request)),
    bytes_sent=_bytes_sent,
    seconds=_seconds,
    kernel=TWO_SHOT_KERNEL,
    line=":",
)
