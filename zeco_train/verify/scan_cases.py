"""Every operator over every scan, on 1 to 6 ranks of `verify`'s own, in fp64.

A case is a series of calls on one scan object, as training makes them: two layers, forward and then backward from the
last; replays of received states, as recomputation makes them; a layer of another shape between two calls of the first;
a sequence in segments, forward and then backward from the last.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.collectives.topology import Topology
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator import Kind
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import Exchange, StateInput
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig
from zeco_train.sp.exchange import connect
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.sp.registry import BACKENDS, Backend, SPConfig
from zeco_train.verify.config import LIMITS
from zeco_train.verify.coverage import Cell, cover_pairs
from zeco_train.verify.own_ranks import TEAM_SIZES, Team
from zeco_train.verify.report import Deviation, VerifyRow
from zeco_train.verify.whole import DOCUMENTS, Expected, Results, Whole, exact_results


def _settings() -> dict[str, SPConfig]:
    """Each backend, and each All-Scan: those in blocks with several numbers of them, `lane` with several nodes.

    One block is what `zeco` chooses for small states.
    """
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


SCANS = _settings()
# H and V: fewer columns than ranks or blocks, and blocks along the values of one head; and columns of several heads,
# whose borders are not those of the ranks' slices.
_NARROW, _WIDE = ((1, 1), (1, 6), (2, 3), (1, 5), (2, 1), (2, 6), (1, 7)), ((3, 7), (5, 5), (4, 5), (3, 4), (5, 3))
# Algorithms that send states whole.
_WHOLE = ("lasp1", "lasp2", "zeco", "doubling")
# Beside a backend's own scan, of a convolution's inputs.
HALO = "halo"


@dataclass(frozen=True)
class ScanCase:
    """One operator over one scan.

    Attributes:
        whole: the sequence of the first calls; the others vary it.
        scan: a key of `SCANS`, or `HALO`.
        few: a few calls only, for a long sequence.
    """

    whole: Whole
    scan: str
    few: bool = False

    @property
    def ranks(self) -> int:
        """See `own_ranks.TeamCase`."""
        return self.whole.ranks

    def run(self, team: Team, timeout: timedelta) -> VerifyRow:
        """See `own_ranks.TeamCase`."""
        config = SPConfig() if self.scan == HALO else SCANS[self.scan]
        halo = team.halos if self.scan == HALO else None
        exchange = connect(config, team.scans, timeout, None, halo, Topology.one_node(team.size))
        wholes = _wholes(self)
        # Waits are measured in training, which wraps every scan.
        with ExposedMeter().measuring() if self.whole.tokens % 2 else contextlib.nullcontext():
            calls = _calls(self, wholes, exchange, team.rank)
            deviations = compare_calls(team, wholes, exact_results, calls, {"dg": "dg"})
        exchange.drain()
        whole = self.whole
        return VerifyRow(
            "fp64",
            whole.tokens,
            whole.ranks,
            describe(whole),
            self.scan,
            deviations,
            LIMITS["fp64"],
            on_own_ranks=True,
            uses=(f"operator {whole.operator}", f"scan {self.scan.split('/')[0].split(',')[0]}"),
        )


AXES: dict[str, Sequence[Any]] = {
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


def _is_possible(cell: Cell) -> bool:
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


def scan_cases() -> list[ScanCase]:
    """All cases."""
    cases = []
    for number, cell in enumerate(cover_pairs(AXES, _is_possible)):
        (heads, groups), (key_dim, value_dim) = cell.pop("heads"), cell.pop("dims")
        scan = cell.pop("scan")
        if not OPERATORS[cell["operator"]].has_scale:
            cell["scale"] = 1.0
        shape = {"heads": heads, "groups": groups, "key_dim": key_dim, "value_dim": value_dim}
        cases.append(ScanCase(Whole(name=str(number), **shape, **cell), scan))
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
            cases.append(ScanCase(whole, scan, few=True))
    # Many chunks on each of two ranks.
    for name, facts in OPERATORS.items():
        groups, scale = (1 if facts.is_grouped else 2), (None if facts.has_scale else 1.0)
        long = Whole("long", name, 1_100, 2, heads=2, groups=groups, key_dim=3, scale=scale)
        cases.append(ScanCase(long, "lasp2", few=True))
    return cases


# What a call was, the name of its sequence, the shard, and results.
Call = tuple[str, str, int, Results]


def compare_calls(
    team: Team,
    wholes: Mapping[str, Whole],
    exact: Callable[[Whole], list[Results]],
    calls: Iterable[Call],
    beside: Mapping[str, str],
) -> tuple[dict[str, Deviation], ...]:
    """Compare the results of a series of calls with the exact ones. Collective over the team.

    Args:
        team: the ranks of the calls.
        wholes: the sequences by name.
        exact: the exact results of a sequence; each is computed by one member.
        calls: made as they are taken.
        beside: see `Expected`.

    Returns:
        The largest error of each tensor, by rank.
    """
    shared = team.share([partial(_arrays, exact, whole) for whole in wholes.values()])
    expected = {
        name: Expected([{tensor: torch.from_numpy(x) for tensor, x in piece.items()} for piece in pieces], beside)
        for name, pieces in zip(wholes, shared, strict=True)
    }
    deviations: dict[str, Deviation] = {}
    for call, name, piece, results in calls:
        for tensor, (error, head) in expected[name].errors(results, piece).items():
            if tensor not in deviations or not error <= deviations[tensor].error:
                deviations[tensor] = Deviation(error, where=f"head {head}, {call}")
    return tuple(team.gather(deviations))


def _arrays(exact: Callable[[Whole], list[Results]], whole: Whole) -> list[dict[str, NDArray[np.float64]]]:
    # Pickled faster than tensors.
    return [{name: x.contiguous().numpy() for name, x in piece.items()} for piece in exact(whole)]


def describe(whole: Whole) -> str:
    """The operator and its sequence, for the table."""
    _, heads, key_dim, value_dim = whole.state_shape
    widths = (
        f"w{whole.width} C{whole.value_dim}"
        if OPERATORS[whole.operator].state_is_halo
        else f"H{heads}" + (f"/{whole.groups}" if whole.groups < heads else "") + f" K{key_dim} V{value_dim}"
    )
    words = [f"{whole.operator} B{whole.batch} {widths}"]
    words += [f"documents {whole.documents}"] if whole.documents else []
    words += ["carry"] * whole.carry + [f"{whole.segments} segments"] * (whole.segments > 1)
    return ", ".join(words)


def _wholes(case: ScanCase) -> dict[str, Whole]:
    """The sequences of a case, by name."""
    segmented, first = case.whole, replace(case.whole, segments=1)
    if case.few:
        return {"first": first}
    other = replace(
        first,
        name=f"{first.name} other",
        tokens=max(first.width - 1, first.tokens // 2) + 3,
        value_dim=first.value_dim + 2,
        documents=None if first.documents is None else "many",
        strided=not first.strided,
    )
    wholes = {"first": first, "second": replace(first, name=f"{first.name} second"), "other": other}
    return wholes | ({"segments": segmented} if segmented.segments > 1 else {})


def _calls(case: ScanCase, wholes: dict[str, Whole], exchange: Exchange, rank: int) -> Iterator[Call]:
    first = Pass(wholes["first"], exchange, rank)
    if not case.few:
        second = Pass(wholes["second"], exchange, rank)
        second.backward()
        yield "the second call", "second", rank, second.results
    first.backward()
    yield "the first call", "first", rank, first.results
    if case.few:
        return
    replay = Pass(wholes["first"], exchange, rank, incoming=first.received)
    other = Pass(wholes["other"], exchange, rank)
    # Not from the last: two micro-batches.
    replay.backward()
    yield "a replay", "first", rank, replay.results
    other.backward()
    yield "a call of another shape", "other", rank, other.results
    if "segments" in wholes:
        yield from _segments(wholes["segments"], exchange, rank)
    last = Pass(wholes["second"], exchange, rank)
    last.backward()
    yield "the last call", "second", rank, last.results


def _segments(whole: Whole, exchange: Exchange, rank: int) -> Iterator[Call]:
    """First passes of all segments but the last, then each forward and backward from the last."""
    carries, received = [whole.tensors["carry_in"] * whole.carry], []
    pieces = [segment * whole.ranks + rank for segment in range(whole.segments)]
    for piece in pieces[:-1]:
        with torch.no_grad():
            one = Pass(whole, exchange, piece, carry_in=carries[-1], want_carry=True)
        yield "a first pass of segments", "segments", piece, one.results
        assert one.carry_out is not None
        received.append(one.received)
        carries.append(one.carry_out)
    dcarry = whole.tensors["dcarry_out"] if whole.carry else None
    for piece, carry, incoming in reversed([*itertools.zip_longest(pieces, carries, received)]):
        again = Pass(whole, exchange, piece, carry_in=carry, want_carry=dcarry is not None, incoming=incoming)
        again.backward(dcarry)
        yield "a second pass of segments", "segments", piece, again.results
        dcarry = again.results["dcarry_in"]


class Pass:
    """A forward pass of a shard, and its backward pass.

    Args:
        whole: the sequence.
        exchange: over its ranks.
        piece: the shard's number.
        incoming: the state of an earlier pass, to be replayed.
        carry_in: the state before the shard's segment; None: that of the sequence, if it has one.
        want_carry: the state after the segment is wanted; None: if the sequence has one.

    Attributes:
        results: as of `exact_results`, those that are known.
        received: the state to replay.
        carry_out: the state after the segment, if it is wanted.
    """

    def __init__(
        self,
        whole: Whole,
        exchange: Exchange,
        piece: int,
        incoming: Tensor | None = None,
        carry_in: Tensor | None = None,
        want_carry: bool | None = None,
    ) -> None:
        self._whole, self._piece, self._leaves = whole, piece, whole.operands(piece)
        operands = [*self._leaves.values()]
        if carry_in is None and whole.carry:
            carry_in = whole.tensors["carry_in"]
        self._carry_in = None if carry_in is None else carry_in.detach().clone().requires_grad_()
        want_carry = whole.carry if want_carry is None else want_carry
        position = whole.position(exchange, piece).on(operands[0])
        scale = OPERATORS[whole.operator].scale_of(operands, whole.scale)
        state_input = StateInput(incoming, self._carry_in, want_carry)
        self._o, state_output = mix_at(whole.operator, operands, scale, position, state_input)
        self.results: Results = {"o": self._o.detach()}
        self.received, self.carry_out = state_output.received, state_output.carry_out if want_carry else None
        if incoming is None:
            self.results["R"] = self.received
            if self.carry_out is not None:
                self.results["carry_out"] = self.carry_out.detach()

    def backward(self, dcarry_out: Tensor | None = None) -> None:
        """Adds the gradients to the results.

        Args:
            dcarry_out: of the state after the segment, if it is wanted; None: that of the sequence.
        """
        whole, leaves = self._whole, {name: x for name, x in self._leaves.items() if x.requires_grad}
        outputs, grads = [self._o], [whole.do(self._piece)]
        if self.carry_out is not None:
            outputs.append(self.carry_out)
            grads.append(whole.tensors["dcarry_out"] if dcarry_out is None else dcarry_out)
        inputs = [*leaves.values()] + ([] if self._carry_in is None else [self._carry_in])
        found = torch.autograd.grad(outputs, inputs, grads)
        self.results |= dict(zip([*(f"d{name}" for name in leaves), "dcarry_in"], found, strict=False))
