"""Gathers sharded matrices onto owner ranks, one whole matrix per rank and round, to distribute the work on them.

Every matrix has an owner. `gather` sends the shards of a round's matrices to their owners, `scatter` sends the owners'
results back. Each is one all-to-all under every strategy: only the rows per rank differ, and replicated shards (`ddp`,
`hsdp`) are sent by one rank and received by all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

# Imported where it is used: it takes a second, and `--help` reads the settings of the optimizers, which import this.
if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The items of each rank, most costly first: each goes greedily to the least loaded rank (Graham, 1969)."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owned[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return owned


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WholeMatrices:
    """Assigns matrices [N, K] to owner ranks and rounds, by the owner's work for each (`costs`).

    All have the same placement: sharded over rows or replicated, on a mesh of all ranks or of this one. `rounds` has
    the matrices of each round, by owner: an index, or None for a rank without a matrix left.
    """

    def __init__(self, parameters: Sequence[Tensor], costs: Sequence[float]) -> None:
        from torch.distributed.tensor import DTensor

        self._shapes = [parameter.shape for parameter in parameters]
        self._rank, table = 0, torch.zeros(1, 1, dtype=torch.int)
        first = parameters[0] if parameters else None
        if isinstance(first, DTensor) and first.device_mesh.size() > 1:
            mesh, placements = first.device_mesh, first.placements
            assert mesh.size() == dist.get_world_size(), "a mesh of some of the ranks"
            assert all(isinstance(p, DTensor) and p.placements == placements for p in parameters)
            self._rank, table = dist.get_rank(), _table(mesh.mesh, placements)
        # [replica][shard]: the rank that holds these rows.
        ranks: list[list[int]] = table.tolist()
        self._parts = {rank: part for row in ranks for part, rank in enumerate(row)}
        # The ranks of this rank's replica, which together hold each matrix once.
        self._copy = next(row for row in ranks if self._rank in row)
        owned = assign(costs, table.numel())
        self.rounds = [
            [indices[number] if number < len(indices) else None for indices in owned]
            for number in range(max(map(len, owned)))
        ]

    def owned(self, owners: Sequence[int | None]) -> int | None:
        return owners[self._rank]

    def gather(self, owners: Sequence[int | None], shards: Sequence[Tensor]) -> Tensor | None:
        """The whole matrix that this rank owns in a round, or None, from each rank's rows of the round's matrices."""
        if len(owners) == 1:
            return shards[0]
        mine, flat = owners[self._rank], iter(shards)
        sent = [next(flat).flatten() if index is not None else shards[0].new_empty(0) for index in owners]
        # The ranks of a replica send only to owners in the same replica.
        sent = [x if owner in self._copy else x[:0] for owner, x in enumerate(sent)]
        counts = [self._elements(mine, rank) if rank in self._copy else 0 for rank in range(len(owners))]
        received = _exchange(sent, counts)
        if mine is None:
            return None
        return torch.cat([received[rank] for rank in self._copy]).view(self._shapes[mine])

    def scatter(self, owners: Sequence[int | None], whole: Tensor | None, like: Tensor) -> list[Tensor]:
        """Scatter a round's matrices from their owners, `whole` from this rank; returns this rank's rows of each.

        `like` has the matrices' dtype and device.
        """
        if len(owners) == 1:
            assert whole is not None
            return [whole]
        sent = [like.new_empty(0)] * len(owners)
        if whole is not None:
            cut = whole.split([self._rows(owners[self._rank], rank) for rank in self._copy])
            sent = [cut[self._parts[rank]].flatten() for rank in range(len(owners))]
        received = _exchange(sent, [self._elements(index, self._rank) for index in owners])
        owned = [(x, index) for x, index in zip(received, owners, strict=True) if index is not None]
        return [x.view(-1, self._shapes[index][1]) for x, index in owned]

    def _rows(self, index: int | None, rank: int) -> int:
        # Number of a matrix's rows on a rank: split like `torch.chunk`, as in FSDP2.
        if index is None:
            return 0
        total, part = self._shapes[index][0], self._parts[rank]
        height = -(-total // len(self._copy))
        return max(0, min(total, (part + 1) * height) - part * height)

    def _elements(self, index: int | None, rank: int) -> int:
        return 0 if index is None else self._rows(index, rank) * self._shapes[index][1]


def _table(ranks: Tensor, placements: Sequence[Placement]) -> Tensor:
    # The mesh's ranks as a table [replicas, shards].
    from torch.distributed.tensor import Replicate, Shard

    cut = [dim for dim, placement in enumerate(placements) if placement == Shard(0)]
    others = [placement for placement in placements if placement != Shard(0)]
    assert len(cut) <= 1, placements
    assert all(placement == Replicate() for placement in others), placements
    return ranks.movedim(cut[0], -1).reshape(-1, ranks.size(cut[0])) if cut else ranks.view(-1, 1)


def _exchange(sent: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Tensor]:
    # All-to-all of flat tensors: sends `sent[rank]` to each rank, and receives `counts[rank]` elements from each.
    flat = torch.cat(list(sent))
    received = flat.new_empty(sum(counts))
    dist.all_to_all_single(received, flat, list(counts), [x.numel() for x in sent])
    return received.split(list(counts))
