"""Every method of softmax attention on ranks of `verify`'s own, in fp64: calls, replays, and caches of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeco_train.ops.attend import attend_at
from zeco_train.ops.oracle import exact_softmax
from zeco_train.ops.seam import Exchange, StateInput
from zeco_train.sp.attention.all_gather import ALL_GATHER, AllGather
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.attention.registry import build_attention
from zeco_train.sp.attention.ulysses import ULYSSES, Ulysses
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.config import LIMITS, METHODS
from zeco_train.verify.coverage import Cell, cover_pairs
from zeco_train.verify.own_ranks import TEAM_SIZES, Team
from zeco_train.verify.report import VerifyRow
from zeco_train.verify.scan_cases import Call, compare_calls
from zeco_train.verify.whole import SOFTMAX, Results, Whole

# With the heads in parts, as between nodes.
METHODS_IN_PARTS: dict[str, MethodSpec] = {
    **METHODS,
    "all_gather:3 parts": replace(ALL_GATHER, build=partial(AllGather, num_parts=3)),
    "ulysses:3 parts": replace(ULYSSES, build=partial(Ulysses, num_parts=3)),
}
# The windows, by tokens of a shard.
WINDOWS = {
    "none": lambda tokens: None,
    "of 2": lambda tokens: 2,
    "inside a shard": lambda tokens: max(2, tokens // 2),
    "over shards": lambda tokens: 2 * tokens + 1,
}


@dataclass(frozen=True)
class AttentionCase:
    """One method on one sequence.

    Attributes:
        method: a key of `METHODS_IN_PARTS`.
        whole: the sequence of the first calls; the heads of keys are its groups. Its segments go one after another
            through caches.
        window: keys that a query reads at most.
    """

    method: str
    whole: Whole
    window: int | None

    @property
    def ranks(self) -> int:
        """See `own_ranks.TeamCase`."""
        return self.whole.ranks

    def run(self, team: Team, timeout: timedelta) -> VerifyRow:
        """See `own_ranks.TeamCase`."""
        whole = self.whole
        first = replace(whole, segments=1)
        wholes = {
            "first": first,
            "second": replace(first, name=f"{whole.name} second"),
            "other": replace(first, name=f"{whole.name} other", tokens=whole.tokens + 3, strided=True),
            "segments": whole,
        }
        method = build_attention(METHODS_IN_PARTS[self.method], team.attention, timeout)
        calls = _calls(self, wholes, local_exchange().replaced(attention=method), team.rank)
        # A query that reads one key has no gradient.
        beside = {"dq": "dv", "dk": "dv"}
        deviations = compare_calls(team, wholes, partial(exact_attention, window=self.window), calls, beside)
        words = [f"softmax B{whole.batch} H{whole.heads}/{whole.groups}"]
        words += [f"documents {whole.documents}"] if whole.documents else []
        words += [f"window {self.window}"] if self.window else []
        words += [f"{whole.segments} segments"] * (whole.segments > 1)
        return VerifyRow(
            "fp64",
            whole.tokens,
            whole.ranks,
            ", ".join(words),
            self.method,
            deviations,
            LIMITS["fp64"],
            on_own_ranks=True,
            uses=(f"method {self.method.split(':')[0]}",),
        )


AXES: dict[str, Sequence[Any]] = {
    "method": [*METHODS_IN_PARTS],
    "ranks": TEAM_SIZES[1:],
    # Documents and windows, which each method meets together.
    "masks": [
        (None, "none"),
        (None, "of 2"),
        (None, "inside a shard"),
        (None, "over shards"),
        ("spanning", "none"),
        ("at edges", "none"),
        ("many", "none"),
        ("one border", "of 2"),
        ("spanning", "over shards"),
        ("at edges", "inside a shard"),
        ("many", "over shards"),
    ],
    "heads": [(1, 1), (3, 1), (4, 4), (4, 2), (6, 3), (12, 12), (12, 4)],
    "tokens": [1, 7, 24, 37],
    "batch": [1, 2],
    "segments": [1, 2, 3],
}


def _is_possible(cell: Cell) -> bool:
    (heads, key_heads), ranks = cell["heads"], cell["ranks"]
    if METHODS_IN_PARTS[cell["method"]].heads_problem(heads, key_heads, ranks) is not None:
        return False
    return not (cell["masks"][0] and cell["batch"] > 1)


def attention_cases() -> list[AttentionCase]:
    """All cases."""
    cases = []
    for number, cell in enumerate(cover_pairs(AXES, _is_possible)):
        method, (heads, groups) = cell.pop("method"), cell.pop("heads")
        documents, kind = cell.pop("masks")
        window = WINDOWS[kind](cell["tokens"])
        shape = {"heads": heads, "groups": groups, "key_dim": 5, "value_dim": 5}
        whole = Whole(name=str(number), operator=SOFTMAX, documents=documents, **shape, **cell)
        cases.append(AttentionCase(method, whole, window))
    # More queries than the block that PyTorch's kernel is given at once.
    long = Whole("long", SOFTMAX, ranks=2, tokens=600, heads=2, groups=1, key_dim=5, value_dim=5)
    return [*cases, *(AttentionCase(method, long, None) for method in METHODS)]


def exact_attention(whole: Whole, window: int | None) -> list[Results]:
    """o, dq, dk and dv of each shard."""
    q, k, v, do = (whole.tensors[name] for name in ("q", "k", "v", "do"))
    found = exact_softmax(q, k, v, do, borders=torch.tensor(whole.borders), window=window)
    split = {name: x.split(whole.tokens, 1) for name, x in found.items()}
    return [{name: parts[piece] for name, parts in split.items()} for piece in range(whole.num_pieces)]


def _calls(case: AttentionCase, wholes: dict[str, Whole], exchange: Exchange, rank: int) -> Iterator[Call]:
    first, second = (_Pass(wholes[name], exchange, rank, case.window) for name in ("first", "second"))
    second.backward()
    yield "the second call", "second", rank, second.results
    first.backward()
    yield "the first call", "first", rank, first.results
    replay = _Pass(wholes["first"], exchange, rank, case.window, first.kept)
    other = _Pass(wholes["other"], exchange, rank, case.window)
    replay.backward()
    yield "a replay", "first", rank, replay.results
    other.backward()
    yield "a call of another shape", "other", rank, other.results
    if case.whole.segments > 1:
        yield from _segments(wholes["segments"], exchange, rank, case.window)


def _segments(whole: Whole, exchange: Exchange, rank: int, window: int | None) -> Iterator[Call]:
    """Segments without gradients, as in validation, each with the keys and values of those before it in caches."""
    capacity = whole.seq_len if window is None else min(window, whole.seq_len)
    shape = whole.batch, whole.groups, capacity
    caches = [torch.full((*shape, dim), math.nan, dtype=torch.float64) for dim in (whole.key_dim, whole.value_dim)]
    for segment in range(whole.segments):
        piece = segment * whole.ranks + rank
        q, k, v = whole.operands(piece).values()
        position = whole.position(exchange, piece)
        with torch.no_grad():
            o, _ = attend_at(
                q, k, v, whole.key_dim**-0.5, position, [StateInput(None, x, True) for x in caches], window
            )
        yield "a segment after caches", "segments", piece, {"o": o}


class _Pass:
    """A forward pass of a shard, and its backward pass; `kept`: what a replay needs, of an earlier pass if given."""

    def __init__(
        self, whole: Whole, exchange: Exchange, rank: int, window: int | None, kept: Sequence[Tensor] = ()
    ) -> None:
        self._whole, self._rank, self._leaves = whole, rank, [*whole.operands(rank).values()]
        state_inputs = [StateInput(x) for x in kept] or [StateInput(), StateInput()]
        q, k, v = self._leaves
        position = whole.position(exchange, rank)
        self._o, state_outputs = attend_at(q, k, v, whole.key_dim**-0.5, position, state_inputs, window)
        self.kept = [state_output.received.clone() for state_output in state_outputs]
        self.results: Results = {"o": self._o.detach()}

    def backward(self) -> None:
        grads = torch.autograd.grad(self._o, self._leaves, self._whole.do(self._rank))
        self.results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
