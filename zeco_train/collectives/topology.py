"""Nodes of the ranks of a group: which neighbours in rank order share a machine."""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeco_train.system.numbers import check_divides


@dataclass(frozen=True)
class Topology:
    """The nodes of a group's ranks."""

    node_sizes: tuple[int, ...]  # ranks of each node, in rank order; a node is a run of adjacent ranks of one host
    hosts: tuple[str, ...] = ()  # host names in the order in which they occur, each once

    @classmethod
    def one_node(cls, ranks: int) -> Topology:
        return cls((ranks,), (socket.gethostname(),))

    @classmethod
    def of_hosts(cls, hosts: list[str]) -> Topology:
        """From the host name of every rank, in rank order."""
        sizes = tuple(len(list(run)) for _, run in itertools.groupby(hosts))
        return cls(sizes, tuple(dict.fromkeys(hosts)))

    @property
    def ranks(self) -> int:
        return sum(self.node_sizes)

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    @property
    def is_even(self) -> bool:
        return len(set(self.node_sizes)) == 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the first node; of every node if they are even."""
        return self.node_sizes[0]

    def with_ranks_per_node(self, count: int) -> Topology:
        """The ranks on nodes of `count`, or on one if there are fewer. Raises ConfigError if they do not fill them."""
        if count >= self.ranks:
            return Topology((self.ranks,), self.hosts)
        rule = f"must divide the {self.ranks} ranks that share a sequence"
        check_divides("sp.all_scan.ranks_per_node", count, self.ranks, rule)
        return Topology((count,) * (self.ranks // count), self.hosts)

    def __str__(self) -> str:
        """For logs: `4 nodes of 8 ranks`, or `3 nodes of 8, 8 and 4 ranks`."""
        if self.nodes == 1:
            return f"1 node of {self.ranks} ranks"
        *most, last = map(str, self.node_sizes)
        sizes = last if self.is_even else f"{', '.join(most)} and {last}"
        return f"{self.nodes} nodes of {sizes} ranks"


def find_topology(group: ProcessGroup) -> Topology:
    """The nodes of a group, by host names. Collective; synchronises with the device if there is no CPU backend."""
    hosts = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return Topology.of_hosts(hosts)
