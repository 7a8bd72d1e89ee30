"""All-gather with a weighted prefix: every rank gets every pair and folds those before its own (LASP-2, for GLA).

    all-gather:  (S_p, A_p) of all ranks, as one message: [B, H, K, V + 1], with matrices [B, H, K, V + K]
    locally:     R ← 0;  for each rank before this one, in scan order:  R ← A R + S

The LASP-2 paper sends states only, which is correct only without decays. The prefix is folded from the first rank on,
never computed by subtraction or division. The first rank in scan order folds `carry_in` into its message, so no other
rank's `carry_in` is read; `carry_out` is the fold over all ranks, computed on each, without a further message.

On the wire, per rank: S (V + 1)/V bytes, with matrices S (V + K)/V, sent to each of P − 1 others, as many received.
Rounds: 1. As an ablation (LASP-2, Table 5) the rows of a message are gathered in `blocks` pieces, all under way at
once, with the same result to the last bit.
Time = α' + (P − 1)(α'' + β'(S + A)), with A bytes of a transition; over nodes those between them. Peak memory: P pairs;
2P with `blocks` > 1, whose pieces are joined.
"""

from __future__ import annotations

import torch

from zeco_train.collectives.cost_model import Costs, Load
from zeco_train.collectives.worker import ScanJob, ScanSpec, ScanWorker
from zeco_train.ops.seam import LaunchedScan, ScanRequest, as_columns, fold, from_columns


def launch_all_gather(request: ScanRequest, worker: ScanWorker, *, blocks: int = 1) -> LaunchedScan:
    """Start the scan, its message in `blocks` pieces of rows, at most B · H · K."""
    if blocks < 1:
        raise ValueError(f"blocks must be ≥ 1, not {blocks}")
    return worker.launch(_Gather(request, blocks))


class _Gather(ScanJob):
    operation = "all_gather_scan"

    def __init__(self, request: ScanRequest, blocks: int) -> None:
        super().__init__(request)
        self._count = blocks

    def run(self) -> None:
        request, wire, scan = self.request, self.wire, self.scan
        state = self.own_state()
        message = torch.cat((state, as_columns(request.transition)), dim=-1)
        rows = message.flatten(0, 2)
        pieces = rows.tensor_split(min(self._count, len(rows)))
        gathered = [piece.new_empty((wire.size, *piece.shape)) for piece in pieces]
        # All are under way before the first one is waited for.
        transfers = [wire.all_gather(*pair, "states and transitions") for pair in zip(gathered, pieces, strict=True)]
        for transfer in transfers:
            transfer.wait()
        pairs = gathered[0] if len(gathered) == 1 else torch.cat(gathered, 1)
        pairs = pairs.view(wire.size, *message.shape)

        running = torch.zeros_like(state)
        for position in range(wire.size):
            if position == wire.position and not wire.is_first:
                # Not copied: `fold` returns a new tensor, so the folds for the carry do not change this one.
                scan.incoming.set_result(running)
            if position >= wire.position and scan.carry is None:
                break
            columns = pairs[wire.group_rank(position)]
            part, transition = columns.split((state.shape[-1], columns.shape[-1] - state.shape[-1]), dim=-1)
            running = fold(part, from_columns(transition, request.transition), running)
        if scan.carry is not None:
            scan.carry.set_result(running)


def _seconds(costs: Costs, load: Load, blocks: int | None) -> float:
    # A ring: each step lasts as long as its slowest hop.
    hop = costs.farthest(load.nodes)
    pair = load.state_bytes + load.transition_bytes
    return hop.exchange + (load.ranks - 1) * (hop.exchange_peer + hop.exchange_byte * pair)


ALL_GATHER = ScanSpec(
    name="all_gather",
    description="every rank gets every pair and folds those before its own (LASP-2)",
    launch=launch_all_gather,
    # Every rank sends its pair to every other rank; the carry costs no message.
    bytes_sent=lambda load, want_carry: float(load.state_bytes + load.transition_bytes) * (load.ranks - 1),
    seconds=_seconds,
    held_states=lambda ranks: ranks + 1,
)
