"""Every operator over every scan, and every method of softmax attention, on 1 to 6 ranks of `verify`'s own, in fp64.

A case is a series of calls, as training makes them: two layers, forward and then backward from the last; replays of
what was received, as recomputation makes them; a layer of another shape between two calls of the first; a sequence in
segments, forward and then backward from the last, or with softmax attention through caches of keys.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.collectives.topology import Topology
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.seam import Exchange
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig
from zeco_train.sp.attention.all_gather import ALL_GATHER, AllGather
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.attention.method_registry import build_attention
from zeco_train.sp.attention.ulysses import ULYSSES, Ulysses
from zeco_train.sp.backend_registry import BACKENDS, Backend, SPConfig
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.verify.config import LIMITS, METHODS
from zeco_train.verify.own_ranks import HandIn, Team
from zeco_train.verify.reference import Expected, exact
from zeco_train.verify.report import Deviation, VerifyRow
from zeco_train.verify.runs import Pass
from zeco_train.verify.whole import DOCUMENTS, SOFTMAX, Results, Whole

# The ranks in teams, one partition after the other. Most teams do not begin at rank 0: a rank of the group that is
# taken for one of the world, or the reverse, is an error there.
PARTITIONS = (((0, 1, 2, 3, 4, 5),), ((0, 1, 2), (3, 4), (5,)), ((4, 5), (0, 1, 2, 3)))
TEAM_SIZES = sorted({len(team) for partition in PARTITIONS for team in partition})
# Beside a backend's own scan, of a convolution's inputs.
HALO = "halo"
Cell = dict[str, Any]
# A pair of values: axis, index of the value, and the same of another axis.
_Pair = tuple[str, int, str, int]

# Random completions of a case of which the best is taken, and tries to find a possible one at all.
_CANDIDATES, _TRIES = 24, 1_000


def _scans() -> dict[str, SPConfig]:
    # In blocks with several numbers of them, `lane` with several nodes; `zeco` chooses one block for small states.
    found = {name: SPConfig(Backend[name]) for name in BACKENDS}
    for scan in ALL_SCANS:
        algorithm = AllScanAlgorithm[scan.name]
        if scan.best_blocks is not None:
            for blocks in ("2", "3", "7"):
                found[f"{scan.name}/{blocks}"] = SPConfig(all_scan=AllScanConfig(algorithm, blocks=blocks))
        elif scan.name == "lane":
            for per_node in (1, 2, 3):
                found[f"lane, {per_node} a node"] = SPConfig(all_scan=AllScanConfig(algorithm, ranks_per_node=per_node))
        else:
            found[scan.name] = SPConfig(all_scan=AllScanConfig(algorithm))
    return found


SCANS = _scans()
# With the heads in parts, as between nodes.
METHODS_IN_PARTS: dict[str, MethodSpec] = {
    **METHODS,
    "all_gather:3 parts": replace(ALL_GATHER, build=partial(AllGather, num_parts=3)),
    "ulysses:3 parts": replace(ULYSSES, build=partial(Ulysses, num_parts=3)),
}

# --- the table of cases ---


def cover_pairs(
    axes: Mapping[str, Sequence[Any]], is_possible: Callable[[Cell], bool], given: Sequence[Cell] = ()
) -> list[Cell]:
    """Cases with each possible pair of values of two axes that `given` cases lack; the same in every process."""
    generator, sizes = random.Random(0), {axis: len(values) for axis, values in axes.items()}
    missing: dict[_Pair, None] = {}
    for a, b in itertools.combinations(axes, 2):
        missing |= dict.fromkeys((a, i, b, j) for i in range(len(axes[a])) for j in range(len(axes[b])))
    for cell in given:
        for pair in _pairs({axis: values.index(cell[axis]) for axis, values in axes.items()}):
            missing.pop(pair, None)
    chosen: list[Cell] = []
    while missing:
        a, i, b, j = next(iter(missing))
        best: dict[str, int] | None = None
        most = found = 0
        for _ in range(_TRIES):
            indices = {axis: int(generator.random() * size) for axis, size in sizes.items()} | {a: i, b: j}
            if not is_possible(_cell(axes, indices)):
                continue
            new = sum(pair in missing for pair in _pairs(indices))
            if best is None or new > most:
                best, most = indices, new
            found += 1
            if found == _CANDIDATES:
                break
        if best is None:
            # No case can have both.
            del missing[a, i, b, j]
            continue
        chosen.append(_cell(axes, best))
        for pair in _pairs(best):
            missing.pop(pair, None)
    return chosen


def _cell(axes: Mapping[str, Sequence[Any]], indices: Mapping[str, int]) -> Cell:
    return {axis: axes[axis][index] for axis, index in indices.items()}


def _pairs(indices: Mapping[str, int]) -> list[_Pair]:
    return [(a, i, b, j) for (a, i), (b, j) in itertools.combinations(indices.items(), 2)]


@dataclass(frozen=True)
class TeamCase:
    """One operator over one scan, or softmax attention by one method.

    Attributes:
        whole: the sequence of the first calls; the others vary it.
        over: a key of `SCANS`, `HALO`, or of `METHODS_IN_PARTS`.
        few: a few calls only, for a long sequence.
    """

    whole: Whole
    over: str
    few: bool = False

    def run(self, team: Team, timeout: timedelta) -> VerifyRow:
        """The row of the case. Collective over the team."""
        whole = self.whole
        meter: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if whole.operator == SOFTMAX:
            method = build_attention(METHODS_IN_PARTS[self.over], team.attention, timeout)
            exchange = local_exchange().replaced(attention=method)
            uses: tuple[str, ...] = (f"method {self.over.split(':')[0]}",)
        else:
            config = SPConfig() if self.over == HALO else SCANS[self.over]
            halo = team.halos if self.over == HALO else None
            exchange = connect(config, team.scans, timeout, None, halo, Topology.one_node(team.size))
            uses = f"operator {whole.operator}", f"scan {self.over.split('/')[0].split(',')[0]}"
            if whole.tokens % 2:
                # Waits are measured in training, which wraps every scan.
                meter = ExposedMeter().measuring()
        wholes = _wholes(self)
        with meter:
            found = compare_calls(team, wholes, _calls(self, wholes, exchange, team.rank))
        exchange.drain()
        row = VerifyRow("fp64", whole.tokens, whole.ranks, whole.layout, self.over, found, LIMITS["fp64"])
        return replace(row, on_own_ranks=True, uses=uses)


SCAN_AXES: dict[str, Sequence[Any]] = {
    "operator": [*OPERATORS],
    "scan": [*SCANS, HALO],
    "ranks": TEAM_SIZES,
    "documents": [None, *DOCUMENTS],
    "carry": [False, True],
    "tokens": [1, 5, 37, 64, 70],
    # H and heads of keys.
    "heads": [(1, 1), (2, 1), (3, 3), (4, 4), (6, 2)],
    "dims": [(5, 3), (4, 6), (3, 1), (2, 5), (16, 20)],
    "batch": [1, 2, 3],
    "segments": [1, 2, 3],
    "strided": [False, True],
    "scale": [None, 0.7],
    "width": [2, 3, 4],
}
# H and V: fewer columns than ranks or blocks, and blocks along the values of one head; and columns of several heads,
# whose borders are not between the ranks' slices.
_NARROW, _WIDE = ((1, 1), (1, 6), (2, 3), (1, 5), (2, 1), (2, 6), (1, 7)), ((3, 7), (5, 5), (4, 5), (3, 4), (5, 3))
# Algorithms that send states whole.
_WHOLE = ("lasp1", "lasp2", "zeco", "doubling")


def _can_scan(cell: Cell) -> bool:
    operator, scan, ranks = OPERATORS[cell["operator"]], cell["scan"], cell["ranks"]
    heads, groups = cell["heads"]
    is_conv = operator.state_is_halo
    if operator.reads_whole and (cell["documents"] or cell["carry"] or cell["segments"] > 1):
        return False
    if (cell["scale"] is not None and not operator.has_scale) or (is_conv and heads != 1):
        return False
    if scan == HALO and not (is_conv and cell["tokens"] >= cell["width"] - 1):
        return False
    if scan != HALO and not _fits(scan, ranks):
        return False
    # The recurrence is slow.
    if cell["tokens"] * ranks * cell["segments"] > 300:
        return False
    return not ((cell["documents"] and cell["batch"] > 1) or (groups < heads and not operator.is_grouped))


def _fits(scan: str, ranks: int) -> bool:
    per_node = SCANS[scan].all_scan.ranks_per_node or 1
    return ranks == 1 or (scan != "dp" and (ranks % per_node == 0 or per_node > ranks))


def scan_cases() -> list[TeamCase]:
    """All cases of operators."""
    cases = []
    for number, cell in enumerate(cover_pairs(SCAN_AXES, _can_scan)):
        (heads, groups), (key_dim, value_dim) = cell.pop("heads"), cell.pop("dims")
        scan = cell.pop("scan")
        if not OPERATORS[cell["operator"]].has_scale:
            cell["scale"] = 1.0
        shape = {"heads": heads, "groups": groups, "key_dim": key_dim, "value_dim": value_dim}
        cases.append(TeamCase(Whole(name=str(number), **shape, **cell), scan))
    # Every scan on each number of ranks, with both kinds of transitions: what it cuts along heads and values, and which
    # ranks forward what, depends on these together.
    numbers, shapes = itertools.count(), (itertools.cycle(_NARROW), itertools.cycle(_WIDE))
    with_heads = [(name, operator.kind) for name, operator in OPERATORS.items() if not operator.state_is_halo]
    of_kinds = [next(name for name, kind in with_heads if kind is wanted) for wanted in Kind]
    for scan, ranks, operator, wide in itertools.product(SCANS, TEAM_SIZES[1:], of_kinds, (False, True)):
        if _fits(scan, ranks) and not (scan in _WHOLE and wide):
            number = next(numbers)
            heads, value_dim = next(shapes[wide])
            whole = Whole(
                f"shape {number}", operator, 3, ranks, heads=heads, groups=heads, key_dim=3, value_dim=value_dim,
                batch=1 + number % 2, carry=number // 2 % 2 == 0,
            )  # fmt: skip
            cases.append(TeamCase(whole, scan, few=True))
    # Many chunks on each of two ranks.
    for name, facts in OPERATORS.items():
        groups, scale = (1 if facts.is_grouped else 2), (None if facts.has_scale else 1.0)
        long = Whole("long", name, 1_100, 2, heads=2, groups=groups, key_dim=3, scale=scale)
        cases.append(TeamCase(long, "lasp2", few=True))
    return cases


METHOD_AXES: dict[str, Sequence[Any]] = {
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
# By tokens of a shard.
_WINDOWS = {
    "none": lambda tokens: None,
    "of 2": lambda tokens: 2,
    "inside a shard": lambda tokens: max(2, tokens // 2),
    "over shards": lambda tokens: 2 * tokens + 1,
}


def _can_attend(cell: Cell) -> bool:
    heads, key_heads = cell["heads"]
    problem = METHODS_IN_PARTS[cell["method"]].heads_problem(heads, key_heads, cell["ranks"])
    return problem is None and not (cell["masks"][0] and cell["batch"] > 1)


def attention_cases() -> list[TeamCase]:
    """All cases of softmax attention; segments go one after another through caches."""
    cases = []
    for number, cell in enumerate(cover_pairs(METHOD_AXES, _can_attend)):
        method, (heads, groups), (documents, kind) = cell.pop("method"), cell.pop("heads"), cell.pop("masks")
        cell |= {"heads": heads, "groups": groups, "key_dim": 5, "value_dim": 5, "documents": documents}
        window = _WINDOWS[kind](cell["tokens"])
        cases.append(TeamCase(Whole(name=str(number), operator=SOFTMAX, window=window, **cell), method))
    # More queries than the block that PyTorch's kernel is given at once.
    long = Whole("long", SOFTMAX, ranks=2, tokens=600, heads=2, groups=1, key_dim=5, value_dim=5)
    return [*cases, *(TeamCase(long, method) for method in METHODS)]


# --- the runner ---


def run_team_cases(cases: Sequence[TeamCase], rank: int, size: int, timeout: timedelta, hand_in: HandIn) -> None:
    """The cases, on the ranks of `rows_of_own_ranks`, as many as `PARTITIONS` have."""
    members = [team for partition in PARTITIONS for team in partition]
    assert size == sum(map(len, PARTITIONS[0]))
    teams = [Team.make(team, rank, timeout) for team in members]
    numbers_of = distribute([case.whole.ranks for case in cases], [*map(len, members)])
    for team, numbers in zip(teams, numbers_of, strict=True):
        for number in numbers if team.rank >= 0 else ():
            row = cases[number].run(team, timeout)
            if team.rank == 0:
                hand_in(row)


def distribute(sizes: Sequence[int], teams: Sequence[int]) -> list[list[int]]:
    """Numbers of cases of these `sizes` by team: of the `teams` of a case's size each takes every so many."""
    turns = {size: itertools.cycle([i for i, team in enumerate(teams) if team == size]) for size in set(teams)}
    cases: list[list[int]] = [[] for _ in teams]
    for number, size in enumerate(sizes):
        cases[next(turns[size])].append(number)
    return cases


# What a call was, the name of its sequence, the shard, and results.
Call = tuple[str, str, int, Results]


def compare_calls(team: Team, wholes: Mapping[str, Whole], calls: Iterable[Call]) -> tuple[dict[str, Deviation], ...]:
    """The largest error of each tensor over a series of calls, by rank. Collective over the team.

    Args:
        team: the ranks of the calls.
        wholes: the sequences by name; the exact results of each are computed by one member.
        calls: made as they are taken.
    """
    shared = team.share([partial(_arrays, whole) for whole in wholes.values()])
    expected = {
        name: Expected.of(whole, [{tensor: torch.from_numpy(x) for tensor, x in piece.items()} for piece in pieces])
        for (name, whole), pieces in zip(wholes.items(), shared, strict=True)
    }
    deviations: dict[str, Deviation] = {}
    for call, name, piece, results in calls:
        for tensor, (error, head) in expected[name].errors(results, piece).items():
            if tensor not in deviations or not error <= deviations[tensor].error:
                deviations[tensor] = Deviation(error, where=f"head {head}, {call}")
    return tuple(team.gather(deviations))


def _arrays(whole: Whole) -> list[dict[str, NDArray[np.float64]]]:
    # Pickled faster than tensors.
    return [{name: x.contiguous().numpy() for name, x in piece.items()} for piece in exact(whole)]


def _wholes(case: TeamCase) -> dict[str, Whole]:
    first, changes = replace(case.whole, segments=1), dict[str, Any]()
    if case.few:
        return {"first": first}
    if first.operator == SOFTMAX:
        changes = {"tokens": first.tokens + 3, "strided": True}
    else:
        tokens = max(first.width - 1, first.tokens // 2) + 3
        documents = None if first.documents is None else "many"
        changes = {"tokens": tokens, "value_dim": first.value_dim + 2, "documents": documents}
        changes["strided"] = not first.strided
    other = replace(first, name=f"{first.name} other", **changes)
    wholes = {"first": first, "second": replace(first, name=f"{first.name} second"), "other": other}
    return wholes | ({"segments": case.whole} if case.whole.segments > 1 else {})


def _calls(case: TeamCase, wholes: dict[str, Whole], exchange: Exchange, rank: int) -> Iterator[Call]:
    first = _pass(wholes["first"], exchange, rank)
    if not case.few:
        second = _pass(wholes["second"], exchange, rank)
        yield "the second call", "second", rank, second.backward()
    yield "the first call", "first", rank, first.backward()
    if case.few:
        return
    replay = _pass(wholes["first"], exchange, rank, incoming=first.received)
    other = _pass(wholes["other"], exchange, rank)
    # Not from the last: two micro-batches.
    yield "a replay", "first", rank, replay.backward()
    yield "a call of another shape", "other", rank, other.backward()
    if "segments" in wholes:
        in_segments = _through_caches if case.whole.operator == SOFTMAX else _segments
        yield from in_segments(wholes["segments"], exchange, rank)
    yield "the last call", "second", rank, _pass(wholes["second"], exchange, rank).backward()


def _pass(whole: Whole, exchange: Exchange, piece: int, **options: Any) -> Pass:
    return Pass(whole, whole.part(piece), whole.position(exchange, piece), **options)


def _segments(whole: Whole, exchange: Exchange, rank: int) -> Iterator[Call]:
    # First passes of all segments but the last, then each forward and backward from the last.
    carry_in, dcarry_out = whole.ends
    carries, received = [carry_in], list[Sequence[Tensor]]()
    pieces = [segment * whole.ranks + rank for segment in range(whole.segments)]
    for piece in pieces[:-1]:
        with torch.no_grad():
            one = _pass(whole, exchange, piece, carry_in=carries[-1], want_carry=True)
        yield "a first pass of segments", "segments", piece, one.results
        assert one.carry_out is not None
        received.append(one.received)
        carries.append(one.carry_out)
    dcarry = dcarry_out if whole.carry else None
    for piece, carry, incoming in reversed([*zip(pieces, carries, [*received, ()], strict=True)]):
        again = _pass(whole, exchange, piece, carry_in=carry, want_carry=dcarry is not None, incoming=incoming)
        yield "a second pass of segments", "segments", piece, again.backward(dcarry)
        dcarry = again.results["dcarry_in"]


def _through_caches(whole: Whole, exchange: Exchange, rank: int) -> Iterator[Call]:
    # Segments without gradients, as in validation, each with the keys and values of those before it in caches.
    capacity = whole.seq_len if whole.window is None else min(whole.window, whole.seq_len)
    shape = whole.batch, whole.groups, capacity
    caches = [torch.full((*shape, dim), math.nan, dtype=torch.float64) for dim in (whole.key_dim, whole.value_dim)]
    for segment in range(whole.segments):
        piece = segment * whole.ranks + rank
        q, k, v, _ = whole.part(piece).values()
        position, state_inputs = whole.position(exchange, piece), [StateInput(None, x, True) for x in caches]
        with torch.no_grad():
            o, _ = attend_at(q, k, v, whole.key_dim**-0.5, position, state_inputs, whole.window)
        yield "a segment after caches", "segments", piece, {"o": o}
