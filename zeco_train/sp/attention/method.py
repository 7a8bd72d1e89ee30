"""Softmax attention over the ranks of a sequence: base class and descriptor of its methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.collectives.wire import Wire
from zeco_train.ops.seam import AttentionMethod
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.routes import Bounds, Range, Routes
from zeco_train.sp.exposed import run_wait


class ShardedAttention(AttentionMethod):
    """An `AttentionMethod` over the ranks of a wire, in the order of their tokens; the wire carries nothing else."""

    num_nodes = 1  # over which these ranks are spread
    deterministic = False  # add up gradients in one order on this rank, see `attend_backward`

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        wire.run_wait = run_wait
        self._is_connected = False

    def prepare(self, device: torch.device) -> None:
        """Warm up, so that the first step initialises nothing. Collective."""
        self.connect(torch.zeros(1, device=device))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def connect(self, like: Tensor) -> None:
        """Send a first message from each rank to each, unless that is done. Collective.

        NCCL needs all ranks for a communicator's first message, and then connects each two that exchange one.
        """
        if not self._is_connected:
            parts = like.new_zeros(self.wire.size)
            self.wire.all_to_all(torch.empty_like(parts), parts, "a first message").wait()
            self._is_connected = True

    def spans(self, span: Span, bounds: Bounds) -> list[Span]:
        """The spans of all ranks, given this rank's. Raises ValueError if its tokens are not those of the bounds."""
        shares = self._shares(bounds)
        if (span.start, span.stop) != (share := shares[self.wire.rank]):
            has, wanted = (f"{start} to {stop}" for start, stop in ((span.start, span.stop), share))
            raise ValueError(
                f"attention over {len(shares)} ranks: rank {self.wire.rank} has tokens {has}, not {wanted}"
            )
        return [span.part(*share) for share in shares]

    def gather(self, tensors: Sequence[Tensor], bounds: Bounds) -> list[Tensor]:
        """Raises ValueError if this rank's tokens are not those of the bounds."""
        shares = self._shares(bounds)
        own, (first, after) = tensors[0].shape[1], shares[self.wire.rank]
        if own != after - first:
            raise ValueError(
                f"rank {self.wire.rank} has {own} tokens of {bounds[0]} to {bounds[-1]}, not {after - first}"
            )
        routes = Routes(self.wire, [[share] for share in shares], [[(bounds[0], bounds[-1])]] * self.wire.size)
        return routes.start(tensors, "keys and values").wait()

    def _shares(self, bounds: Bounds) -> list[Range]:
        if len(bounds) != self.wire.size + 1:
            raise ValueError(f"attention over {self.wire.size} ranks: has the tokens of {len(bounds) - 1}")
        return list(itertools.pairwise(bounds))


class AttentionLoad(NamedTuple):
    """The size of one layer's attention, for `MethodSpec.costs`."""

    heads: int  # of queries
    key_heads: int  # of keys and values
    head_dim: int
    tokens: int  # of one sequence, on a rank
    ranks: int
    window: int | None  # keys that a query reads at most, itself among them; None: all before it
    itemsize: int  # bytes per element of operands
    wide: int  # bytes per element of sums and gradients
    nodes: int = 1  # over which the ranks are spread
    replayed: bool = False  # the backward pass has only what the layer itself keeps
    batch: int = 1  # sequences, of which only the number of messages depends: bytes are of one
    computed: int | None = None  # bytes per element of gradients as a kernel gives them, before sums; None: `wide`

    @property
    def queries(self) -> int:
        """Elements of a rank's queries, and of its outputs."""
        return self.tokens * self.heads * self.head_dim

    @property
    def keys_per_token(self) -> int:
        """Elements of keys and values."""
        return 2 * self.key_heads * self.head_dim


class MethodCosts(NamedTuple):
    """What a method costs one layer, for one sequence, on the rank with the most."""

    forward: float  # bytes sent
    backward: float
    exchanges: tuple[int, int]  # messages of a forward and of a backward pass, one after another
    held: float  # bytes at the peak of the backward pass beside the tensors that the layer lists itself
    slowest: float = 1.0  # work of the rank with the most, relative to the mean
    hidden: float = 0.0  # part of the messages that travels while attention is computed, if that takes as long
    kept: float = 0.0  # bytes for the backward pass, beside those of the layer

    @property
    def sent(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class MethodSpec:
    """Descriptor of a method, for settings, tables and plans."""

    name: str  # as in `sp.attention=`
    description: str  # one line for `--help`
    build: Callable[[Wire], ShardedAttention]
    costs: Callable[[AttentionLoad], MethodCosts]
    # (heads of queries, of keys, ranks) → why they cannot be spread so
    heads_problem: Callable[[int, int, int], str | None] = lambda heads, key_heads, ranks: None
    balanced: bool = True  # all ranks have the same work, so `auto` may choose it


class LocalAttention:
    """An `AttentionMethod` over one rank; `deterministic` as of `ShardedAttention`."""

    heads_over = 1

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float) -> Attended:
        return attend(q, k, v, span, span.start, scale)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attend_backward(do, q, k, v, attended, span, span.start, scale, self.deterministic)

    def gather(self, tensors: Sequence[Tensor], bounds: Bounds) -> list[Tensor]:
        del bounds
        return list(tensors)
