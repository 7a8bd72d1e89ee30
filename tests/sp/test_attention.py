"""Softmax attention over ranks, with every method, against a naive softmax over the whole sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import on_ranks, run_distributed
from zeco_train.collectives.wire import Wire
from zeco_train.errors import CommunicationError
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.ops.seam import Exchange
from zeco_train.ops.softmax import sdpa
from zeco_train.sp.attention import ring
from zeco_train.sp.attention.all_gather import AllGather
from zeco_train.sp.attention.method import AttentionLoad, LocalAttention, ShardedAttention
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.attention.ulysses import Ulysses
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

BATCH, HEAD_DIM, SCALE = 2, 6, 0.7
NAMES = ("o", "dq", "dk", "dv")
# Sums of up to 24 terms near 1, each rounded by 2^-53; the bound is the issue's.
TOLERANCE = 1e-12
TIMEOUT = timedelta(seconds=60)
UNPAIRED = "all_gather, unpaired"
# Where only some ranks read others' keys: at a border of 2 and of 4 shards, of 3, inside them, a document of one token.
DOCUMENTS = (0, 1, 5, 12, 13, 24)
THIRDS = (0, 8, 9, 16, 24)


@dataclass(frozen=True)
class Case:
    """A whole sequence."""

    tokens: int | None = 24  # None: one less than there are ranks, so that a rank has none
    borders: tuple[int, ...] | None = None
    of_rows: tuple[tuple[int, ...], ...] = ()  # in place of them, those of each sequence
    window: int | None = None
    queries_per_key: int | None = 1  # heads of queries for each of keys; None: all of them
    uneven: bool = False  # later ranks have more tokens, the first of many has one


CASES = {
    "plain": Case(),
    "documents": Case(borders=DOCUMENTS),
    "documents of whole shards": Case(borders=THIRDS),
    "window within a shard": Case(window=3),
    "window of one key": Case(window=1),
    "window wider than a shard": Case(window=15),
    "window wider than the sequence": Case(window=40),
    "four queries a key": Case(queries_per_key=4),
    "one head of keys": Case(queries_per_key=None),
    "unequal shards": Case(tokens=23),
    "unequal shards, window": Case(tokens=23, window=9, queries_per_key=4),
    "uneven shards": Case(uneven=True),
    "uneven shards, documents": Case(borders=DOCUMENTS, uneven=True),
    "uneven shards, documents, wide window, four queries a key": Case(
        borders=THIRDS, window=15, queries_per_key=4, uneven=True
    ),
    "documents, window": Case(borders=DOCUMENTS, window=5),
    "documents, wide window, four queries a key": Case(borders=THIRDS, window=15, queries_per_key=4),
    "documents of each sequence": Case(of_rows=((0, 24), (0, 2, 3, 8, 24))),
    "documents of each sequence, window": Case(of_rows=((0, 24), (0, 2, 3, 8, 24)), window=5, queries_per_key=4),
    "a rank without tokens": Case(tokens=None),
    "a rank without tokens, window": Case(tokens=None, window=2),
}


class Whole:
    """Inputs and results of a case, of heads that every method can spread over the ranks."""

    def __init__(self, case: Case, ranks: int, dtype: torch.dtype = torch.float64) -> None:
        self.case, self.ranks = case, ranks
        self.tokens = max(1, ranks - 1) if case.tokens is None else case.tokens
        self.heads = 4 * ranks
        self.key_heads = self.heads // (case.queries_per_key or self.heads)
        generator = torch.Generator().manual_seed(self.tokens)
        heads = {"q": self.heads, "k": self.key_heads, "v": self.key_heads, "do": self.heads}
        self.inputs = {
            name: torch.randn(
                BATCH, self.tokens, count, HEAD_DIM, generator=generator, dtype=torch.float64
            ).to(dtype)
            for name, count in heads.items()
        }  # fmt: skip

    @property
    def shards(self) -> list[tuple[int, int]]:
        if not self.case.uneven:
            return [*itertools.pairwise(even_bounds(self.tokens, self.ranks))]
        return [*itertools.pairwise(max(r, self.tokens * r**2 // self.ranks**2) for r in range(self.ranks + 1))]

    def position(self, exchange: Exchange, rank: int) -> SequencePosition:
        documents = self.case.of_rows or (None if self.case.borders is None else [self.case.borders])
        bounds = [0, *(stop for _, stop in self.shards)]
        return SequencePosition(bounds, rank, documents=documents, exchange=exchange)

    def mask(self) -> Tensor:
        """[rows, 1, queries, keys] of all or of each sequence, by the definition."""
        rows, window = self.case.of_rows or (self.case.borders or (0, self.tokens),), self.case.window or self.tokens
        masks = []
        for borders in rows:
            document = [sum(border <= position for border in borders) for position in range(self.tokens)]
            masks.append(
                [
                    key <= query and query - key < window and document[key] == document[query]
                    for query, key in itertools.product(range(self.tokens), repeat=2)
                ]
            )
        return torch.tensor(masks).view(len(rows), 1, self.tokens, self.tokens)

    def naive(self) -> dict[str, Tensor]:
        """Results in fp64, with a head of keys for each of queries."""
        leaves = [self.inputs[name].double().requires_grad_() for name in ("q", "k", "v")]
        q, k, v = (x.repeat_interleave(self.heads // x.shape[2], 2).transpose(1, 2) for x in leaves)
        scores = SCALE * torch.einsum("bhik,bhjk->bhij", q, k)
        o = (scores.masked_fill(~self.mask(), -torch.inf).softmax(-1) @ v).transpose(1, 2)
        grads = torch.autograd.grad(o, leaves, self.inputs["do"].double())
        return dict(zip(NAMES, (o.detach(), *grads), strict=True))

    def of_rank(self, method: Any, rank: int) -> dict[str, Tensor]:
        """By a method, through the op, checked against a replay, of the same bits, and against a compiler's shapes."""
        start, stop = self.shards[rank]
        exchange = local_exchange().replaced(attention=method)
        position = self.position(exchange, rank)
        received: list[Tensor | None] = [None, None]
        found: list[dict[str, Tensor]] = []
        for _ in ("first", "replay"):
            results: list[list[Tensor]] = []
            for device in ("meta", "cpu"):
                own = (self.inputs[name][:, start:stop].to(device, copy=True) for name in ("q", "k", "v", "do"))
                *leaves, do = (x.requires_grad_() for x in own)
                given = [StateInput(x if x is None else x.to(device)) for x in received]
                o, state_outputs = attend_at(*leaves, SCALE, position, given, self.case.window)
                grads = torch.autograd.grad(o, leaves, do.detach())
                results.append([o.detach(), *grads, *(state_output.received for state_output in state_outputs)])
            shapes, whole = results
            assert [x.shape for x in shapes] == [x.shape for x in whole]
            found.append(dict(zip(NAMES, whole[:4], strict=True)))
            received[:] = whole[4:]
        for name in NAMES:
            assert torch.equal(found[0][name], found[1][name]), f"{name} of a replay"
        return found[0]


def check(found: dict[str, Tensor], whole: dict[str, Tensor], shard: tuple[int, int], bound: float, where: str) -> None:
    for name, x in found.items():
        expected = whole[name][:, slice(*shard)]
        assert x.shape == expected.shape, f"{name}: {where}"
        scale = max(1.0, whole[name].abs().max().item())
        error = (x.double() - expected).abs().max().item() / scale if x.numel() else 0.0
        assert error <= bound, f"{name} off by {error:.1e}: {where}"  # a NaN fails too


def build_methods(world_size: int, timeout: timedelta = TIMEOUT) -> dict[str, Any]:
    if world_size == 1:
        return {"local": LocalAttention()}

    def wire() -> Wire:
        return Wire(dist.new_group(range(world_size)), "softmax attention", False, timeout)

    return {
        **{name: spec.build(wire()) for name, spec in METHODS.items()},
        UNPAIRED: AllGather(wire(), paired=False),
        "all_gather, up to 3 parts": AllGather(wire(), num_parts=3),
        "ulysses, up to 4 parts": Ulysses(wire(), num_parts=4),
    }


# Every method, documents, also of each sequence, windows, shared heads and uneven shards, and what they could hide.
QUICK = (
    "one head of keys",
    "documents of each sequence, window",
    "uneven shards, documents, wide window, four queries a key",
    "a rank without tokens, window",
)


@pytest.mark.parametrize(
    ("world_size", "names"), [(3, QUICK), *(pytest.param(n, [*CASES], marks=pytest.mark.campaign) for n in range(1, 6))]
)
@on_ranks()
def test_every_method_equals_softmax_over_the_whole_sequence(rank: int, world_size: int, names: Sequence[str]) -> None:
    # Several blocks of queries a shard.
    sdpa._BLOCK = 4
    methods = build_methods(world_size)
    for name in names:
        whole = Whole(CASES[name], world_size)
        naive = whole.naive()
        for method, attention in methods.items():
            where = f"{method}, {name}, {world_size} ranks"
            check(whole.of_rank(attention, rank), naive, whole.shards[rank], TOLERANCE, where)


@pytest.mark.slow
@on_ranks(3)
def test_every_dtype_has_its_accuracy_and_the_same_bits_twice(rank: int, world_size: int) -> None:
    sdpa._BLOCK = 4
    methods = build_methods(world_size)
    gradients = ring.attend_backward
    # As the kernel of GPUs, which gives gradients in the dtype of the operands.
    ring.attend_backward = lambda do, *more: tuple(grad.to(do.dtype) for grad in gradients(do, *more))  # type: ignore
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        whole = Whole(CASES["documents, wide window, four queries a key"], world_size, dtype)
        naive = whole.naive()
        for method, attention in methods.items():
            found, again = (whole.of_rank(attention, rank) for _ in range(2))
            where = f"{method}, {dtype}"
            assert all(x.dtype == dtype for x in found.values()), where
            check(found, naive, whole.shards[rank], bound, where)
            assert all(torch.equal(found[of], again[of]) for of in NAMES), f"other bits: {where}"


class Recorded:
    """The messages and the compute of a ring's forward pass, in their order."""

    def __init__(self, method: ShardedAttention) -> None:
        self.events: list[str] = []
        self.sent = 0
        exchange, compute = method.wire.send_and_receive, ring.attend

        def recorded(sent: Any, received: Any) -> Any:
            self.events += ["send"] * len(sent) + ["receive"] * len(received)
            self.sent += sum(message.tensor.numel() for message in sent)
            return exchange(sent, received)

        def computed(*arguments: Any) -> Any:
            self.events.append("compute")
            return compute(*arguments)

        method.wire.send_and_receive = recorded  # type: ignore[method-assign]
        ring.attend = computed


def frugal(rank: int, world_size: int) -> list[int]:
    group, sent = dist.new_group(range(world_size)), []
    for name, case in CASES.items():
        method = METHODS["ring"].build(Wire(group, "softmax attention", False, TIMEOUT))
        recorded, whole = Recorded(method), Whole(case, world_size)
        start, stop = whole.shards[rank]
        exchange = local_exchange().replaced(attention=method)
        position = whole.position(exchange, rank)
        attend_at(
            *(whole.inputs[of][:, start:stop] for of in ("q", "k", "v")),
            SCALE,
            position,
            [StateInput()] * 2,
            case.window,
        )
        # Of each block up to this rank's, in each sequence the keys from the first that its later queries read.
        tokens = 0
        for mask in whole.mask().expand(BATCH, -1, -1, -1)[:, 0]:
            read = mask[stop:].any(0).tolist()
            for first, last in whole.shards[: rank + 1]:
                tokens += last - next((key for key in range(first, last) if read[key]), last)
        assert recorded.sent == 2 * tokens * whole.key_heads * HEAD_DIM, f"{name}, rank {rank}"
        if name == "plain":
            # A rank receives the next block while it computes the current one.
            sends = ["send"] * (rank + 1 < world_size)
            rounds = [*sends, "receive", "compute"] * rank + [*sends, "compute"]
            assert recorded.events == rounds, f"{recorded.events} on rank {rank}"
            sent.append(recorded.sent)
    return sent


def test_ring_sends_only_what_later_ranks_read_and_computes_meanwhile() -> None:
    found = run_distributed(frugal, 3)
    whole = Whole(CASES["plain"], 3)
    load = AttentionLoad(whole.heads, whole.key_heads, HEAD_DIM, whole.tokens // 3, 3, None, itemsize=1, wide=1)
    assert max(*found) == [BATCH * METHODS["ring"].costs(load).forward]


@on_ranks(2)
def test_ring_names_a_missing_peer_within_the_timeout(rank: int, world_size: int) -> None:
    method = build_methods(world_size, timedelta(seconds=2))["ring"]
    whole = Whole(CASES["plain"], world_size)
    whole.of_rank(method, rank)
    if rank == 1:
        expected = r"receive of keys of rank 0 with rank 0: no answer within 2 s"
        with pytest.raises(CommunicationError, match=expected):
            whole.of_rank(method, rank)
