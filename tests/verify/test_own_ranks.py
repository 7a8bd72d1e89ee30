"""The exact cases that `verify` runs on ranks of its own: what they cover, and planted faults that they find."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.mixer_registry import MIXERS
from tests.support.distributed import run_distributed
from tests.support.recurrence import recurrence
from zeco_train.collectives import chain, doubling, halo, serial
from zeco_train.lifecycle.join import Launch
from zeco_train.ops import mix, oracle
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.sp.attention import ring
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.attention.routes import Routes
from zeco_train.verify import runs, step_cases, team_cases
from zeco_train.verify.__main__ import not_covered
from zeco_train.verify.own_ranks import HandIn, OwnRanksError, Team, rows_of_own_ranks
from zeco_train.verify.reference import Expected, exact
from zeco_train.verify.report import Deviation, VerifyRow, line
from zeco_train.verify.team_cases import HALO, SCANS, TeamCase, cover_pairs, distribute
from zeco_train.verify.whole import DOCUMENTS as DOCUMENT_STARTS
from zeco_train.verify.whole import SOFTMAX, Whole

pytestmark = pytest.mark.numeric

TIMEOUT = timedelta(seconds=60)


def test_covering_cases_have_every_possible_pair() -> None:
    axes = {"a": [0, 1, 2], "b": ["x", "y"], "c": [False, True], "d": [1, 2]}

    def is_possible(cell: dict[str, Any]) -> bool:
        return not (cell["a"] == 1 and cell["c"])

    cells = cover_pairs(axes, is_possible)
    assert all(map(is_possible, cells))
    for (a, of_a), (b, of_b) in itertools.combinations(axes.items(), 2):
        wanted = {(x, y) for x, y in itertools.product(of_a, of_b) if not (a == "a" and b == "c" and x == 1 and y)}
        assert {(cell[a], cell[b]) for cell in cells} == wanted
    assert len(cells) < 12


@pytest.mark.slow
def test_cases_have_every_operator_with_every_scan_and_every_method() -> None:
    found = {(case.whole.operator, case.over) for case in team_cases.scan_cases()}
    assert found >= set(itertools.product(OPERATORS, SCANS))
    assert ("short_conv", HALO) in found
    assert {case.over.split(":")[0] for case in team_cases.attention_cases()} == {*METHODS}
    assert {case.mixer for case in step_cases.step_cases()} == {*MIXERS}


def test_cases_go_to_teams_of_their_size_in_turn() -> None:
    assert distribute([2, 3, 2, 2, 3], [3, 2, 2]) == [[1, 4], [0, 3], [2]]


# A case that passes, a fault in it, and what the row says of it.
CHAIN = TeamCase(Whole("a test", "gla", 6, 3, heads=1, value_dim=6, carry=True, segments=2), "chain/2")
LASP1 = TeamCase(Whole("a test", "gated_delta", 6, 3, heads=2, carry=True), "lasp1", few=True)
LANE = TeamCase(Whole("a test", "scalar_decay", 5, 3, heads=3), "lane, 1 a node", few=True)
CONVOLUTION = TeamCase(Whole("a test", "short_conv", 4, 3, scale=1.0), HALO)
DOCUMENTS = TeamCase(Whole("a test", "kda", 5, 3, heads=2, documents="spanning", segments=2), "lasp2")
UNMASKED = TeamCase(Whole("a test", "unmasked", 5, 3, heads=2, groups=2), "doubling", few=True)
RING = TeamCase(Whole("a test", SOFTMAX, 6, 3, heads=2, segments=2), "ring")
GATHERED = TeamCase(Whole("a test", SOFTMAX, 6, 3, heads=2, groups=1, documents="spanning"), "all_gather", few=True)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """`wrong` gets the original, and then the arguments."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **named: wrong(original, *args, **named)):
        yield


def _joined_in_reverse(join: Callable[..., Tensor], parts: list[Tensor], along_values: int) -> Tensor:
    return join(parts[::-1], along_values)


def _no_decay_on_the_middle_rank(fold: Callable[..., Tensor], state: Tensor, transition: Tensor, x: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        return state + x
    return fold(state, transition, x)


def _replays_of_nothing(op: Callable[..., Any], *args: Any) -> Any:
    *before, boundary = args
    if boundary.incoming_state is not None:
        boundary = boundary._replace(incoming_state=torch.zeros_like(boundary.incoming_state))
    return op(*before, boundary)


class _KeptHalo:
    """The first call's message again in all later ones of that size."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, run: Callable[..., None], job: Any) -> None:
        run(job)
        if not job.wire.is_first:
            job.scan.incoming._result = self._kept.setdefault(
                (job.request.reverse, *job._incoming.shape), job._incoming
            )


def _off_in_the_last_head(op: Callable[..., Any], *args: Any) -> Any:
    o, state_output = op(*args)
    factors = torch.ones(o.shape[2], 1, dtype=o.dtype)
    factors[-1] += 1e-9
    return o * factors, state_output


FAULTS: dict[str, tuple[TeamCase, Callable[[], Any], str]] = {
    "blocks joined in reverse": (CHAIN, lambda: _replaced(chain, "_join", _joined_in_reverse), "R on rank"),
    "no decay on the middle rank": (
        LASP1,
        lambda: _replaced(serial, "fold", _no_decay_on_the_middle_rank),
        "R on rank 2 (head",
    ),
    "rounds without decays": (LANE, lambda: mock.patch.object(doubling, "fold", lambda s, t, x: s + x), "R on rank 2"),
    "replays of nothing": (DOCUMENTS, lambda: _replaced(runs, "mix_at", _replays_of_nothing), "a replay"),
    "a stale halo": (CONVOLUTION, lambda: _replaced(halo._Halo, "run", _KeptHalo()), "the second call"),
    "outputs of the states before": (
        UNMASKED,
        lambda: mock.patch.object(mix, "_whole", lambda one: one.wait()),
        "o on",
    ),
    "an error in the last head": (DOCUMENTS, lambda: _replaced(runs, "mix_at", _off_in_the_last_head), "(head 1, "),
    "far gradients lost": (RING, lambda: mock.patch.object(ring._Partials, "add", return_value=None), "dk on rank 0"),
    "paired halves swapped": (
        GATHERED,
        lambda: _replaced(Routes, "start", lambda start, self, xs, what: start(self, [x.flip(1) for x in xs], what)),
        "o on rank",
    ),
}


# In the gate: a collective's, a replay's, a method's.
FIRST = ["blocks joined in reverse", "replays of nothing", "far gradients lost"]


def failures_of_faults(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Failures of the case of each fault, without and with the fault."""
    team, found, sound = Team.make(range(world_size), rank, TIMEOUT), {}, dict[TeamCase, list[str]]()
    for name in names:
        case, fault, _ = FAULTS[name]
        if case not in sound:
            sound[case] = case.run(team, TIMEOUT).failures
        with fault():
            found[name] = sound[case], case.run(team, TIMEOUT).failures
    dist.barrier()  # keep ranks alive until their peers have received everything
    return found


@pytest.mark.parametrize(
    "names", [FIRST, pytest.param([name for name in FAULTS if name not in FIRST], marks=pytest.mark.slow)]
)
def test_planted_faults_fail_with_tensor_rank_head_and_call(names: list[str]) -> None:
    first, *others = run_distributed(failures_of_faults, 3, names)
    assert all(other == first for other in others), "all ranks judge alike"
    for name, (sound, failures) in first.items():
        said = FAULTS[name][-1]
        assert not sound, name
        assert any(said in failure for failure in failures), (name, failures)


@pytest.mark.few(3)
@pytest.mark.parametrize("documents", [None, *DOCUMENT_STARTS])
@pytest.mark.parametrize("operator", OPERATORS)
def test_exact_results_equal_the_recurrence(operator: str, documents: str | None) -> None:
    """Tokens of all shards at once, token by token; states from the tokens before a shard and from those after it."""
    reads_whole = OPERATORS[operator].reads_whole
    whole = Whole(
        "a test", operator, 19, 2, segments=1 if reads_whole else 2, batch=2 if documents is None else 1, heads=4,
        groups=2 if OPERATORS[operator].is_grouped else 4, documents=None if reads_whole else documents,
        carry=not reads_whole,
    )  # fmt: skip
    tensors, (of_start, dcarry_out) = whole.tensors, whole.ends
    with mock.patch.object(oracle, "_PIECE", 8):
        found = exact(whole)
    operands = {name: tensors[name] for name in OPERATORS[operator].operands}
    tokens = [name for name in operands if "T" in whole.dims[name]]
    restarts = whole.borders[1:-1]

    def run(start: int, stop: int, carry_in: Tensor | None) -> dict[str, Tensor]:
        cut = {name: x[:, start:stop] if name in tokens else x for name, x in operands.items()}
        starts = [restart - start for restart in restarts if start <= restart < stop]
        dcarry = None if reads_whole else dcarry_out
        return recurrence(operator, cut, tensors["do"][:, start:stop], starts, carry_in, dcarry)

    carry_in = None if reads_whole else of_start
    expected = run(0, whole.seq_len, carry_in)
    for name in ("o", *(f"d{name}" for name in tokens)):
        close(torch.cat([piece[name] for piece in found], 1), expected[name])
    for name in {f"d{name}" for name in operands} & found[0].keys() - {f"d{name}" for name in tokens}:
        close(torch.stack([piece[name] for piece in found]).sum(0), expected[name])
    if reads_whole:
        return
    for number, piece in enumerate(found):
        start = number * whole.tokens
        before = run(0, start, carry_in)["carry_out"] if number else carry_in
        close(piece["R"], before)
        if number % whole.ranks == 0:
            close(piece["dcarry_in"], run(start, whole.seq_len, before)["dcarry_in"])
            close(piece["carry_out"], run(0, start + whole.tokens * whole.ranks, carry_in)["carry_out"])


close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)


def test_documents_restart_and_others_cannot_see_them() -> None:
    whole = Whole("a test", "gla", 6, 3, documents="at edges")
    assert whole.borders == [0, 6, 17, 18]
    segments = exact(dataclasses.replace(whole, ranks=1, segments=3))
    assert not segments[1]["dcarry_in"].any(), "a document begins at the first token of the second shard"
    assert segments[2]["dcarry_in"].any()


def test_an_error_is_that_of_the_worst_head_and_names_it() -> None:
    ones = torch.ones(1, 3, 4, 2, dtype=torch.float64)
    expected, off = Expected([{"o": ones}, {"o": ones}], {}), ones.clone()
    off[:, :, 2] += 1e-9
    error, head = expected.errors({"o": off}, 1)["o"]
    assert head == 2
    assert error == pytest.approx(1e-9, rel=1e-6)
    off[0, 0, 1, 0] = torch.nan
    error, head = expected.errors({"o": off}, 1)["o"]
    assert head == 1
    assert math.isnan(error)
    row = VerifyRow("fp64", 3, 2, "gla", "chain", ({}, {"o": Deviation(error, where="head 1, a replay")}), 1e-12)
    assert row.failures == ["o on rank 1 (head 1, a replay) is off by nan > 1e-12"]
    assert "FAILED: o on rank 1 (head 1" in line(row)


def test_what_did_not_run_is_said() -> None:
    launch = Launch(0, 2, 0, 2)
    rows = [
        VerifyRow("fp64", 5, 3, "", "", uses=("operator gla", "mixer kda")),
        VerifyRow("fp64", 5, 4, "", "", reason="no GPU"),
    ]
    lines = not_covered(rows, torch.device("cpu"), launch)
    assert any("Triton kernels" in text for text in lines)
    (operators,) = [text for text in lines if text.startswith("operator:")]
    assert "delta" in operators
    assert " gla" not in operators
    assert any("more than 4 ranks" in text for text in lines)


def hands_in(rank: int, size: int, timeout: timedelta, hand_in: HandIn) -> None:
    """Work of own ranks: a row of each, and one that is missing."""
    hand_in(VerifyRow("fp64", rank, size, "", ""))
    dist.barrier()
    if rank == 1:
        raise ValueError("a planted error")


@pytest.mark.slow
@pytest.mark.processes
def test_rows_of_own_ranks_come_and_an_error_ends_them() -> None:
    rows = rows_of_own_ranks(hands_in, 2, 3, TIMEOUT)
    assert {next(rows).tokens, next(rows).tokens} == {0, 1}
    with pytest.raises(OwnRanksError, match="rank 1 of 2: ValueError: a planted error"):
        next(rows)
