"""Benchmark case `model`: wrong gradients, and the time that is kept for peers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.bench.test_decode import QUICK as DECODE
from tests.support.bench_settings import QUICK
from tests.support.commands import run_here
from tests.support.distributed import run_distributed
from zeco_train.bench import __main__ as command
from zeco_train.bench import model, timing
from zeco_train.bench.backends import RandomTokens
from zeco_train.bench.case import Report
from zeco_train.bench.config import ModelConfig, ModelSettings
from zeco_train.bench.model import _Measurement
from zeco_train.bench.session import Session, WrongResultError
from zeco_train.bench.timing import Contender
from zeco_train.bench.variants import LocalCopyScan, Variant, backend_variant, gathered_exchange, over_all_ranks
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.numbers import relative_error

pytestmark = pytest.mark.campaign


def _within(budget: float, seconds: dict[str, float], tokens: list[int]) -> list[tuple[str, int, int]]:
    """(variant, tokens, steps) timed within the budget, for steps of the given seconds on a simulated clock; setup
    takes 60 seconds, compiling for a number of tokens 20."""
    clock, timed = [0.0], list[tuple[str, int, int]]()
    fake = mock.Mock(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])

    def take(duration: float) -> float:
        clock[0] += duration
        return 5.6

    def contender(measurement: Any, ours: Any, variant: Variant, tokens: RandomTokens) -> Contender:
        take(20.0 if variant.is_dp else 0.0)
        return Contender(variant, lambda _: take(seconds[variant.name]), loss=5.6)

    def add(rows: list[dict[str, Any]]) -> None:
        timed.extend((row["variant"], row["tokens"], row["runs"]) for row in rows)

    names = [*seconds]
    config = ModelConfig.load([*QUICK, f"tokens={tokens}", "steps=40", f"variants=[{','.join(names)}]"])
    peer = mock.Mock(step=lambda *_: take(seconds["fla"]), logits=lambda _: torch.ones(1))
    with (
        mock.patch("zeco_train.bench.model.time", fake),
        mock.patch("zeco_train.bench.session.time", fake),
        mock.patch("zeco_train.bench.timing.time", fake),
        mock.patch.multiple(timing.dist, barrier=mock.Mock(), all_gather_object=mock.Mock()),
        mock.patch("zeco_train.bench.model.Backends", side_effect=lambda *_: take(60.0)),
        mock.patch("zeco_train.bench.model.Peer", return_value=peer),
        mock.patch("zeco_train.bench.model._forget"),
        mock.patch.object(_Measurement, "_check", return_value={name: {} for name in names}),
        mock.patch.object(_Measurement, "_weights", return_value=mock.Mock(logits=torch.ones(1))),
        mock.patch.object(_Measurement, "_contender", contender),
        mock.patch.object(_Measurement, "_check_losses"),
    ):
        mesh = mock.Mock(rank=0, world_size=1, device=torch.device("cpu"))
        session = Session(mesh, budget)
        report = mock.Mock(spec=Report, add=add)
        with mock.patch.object(session, "agree", lambda action: action()):
            peers = [variant for variant in config.chosen if variant.is_peer]
            ours = [variant for variant in config.chosen if not variant.is_peer]
            _Measurement(config.run_config(ModelSettings(heads=2)), config, session, report).measure(ours, peers)
    return timed


@pytest.mark.slow
def test_budget_reserves_time_for_peers() -> None:
    # 60 s of setup, 20 of compiling, 4 × 45 steps of 0.2 s: the backends end at 116 s, and a peer takes 8.
    seconds = dict.fromkeys(["dp", "lasp1", "lasp2", "zeco", "fla", "fla:no_optimizer"], 0.2)
    all_of_them = [(name, 32, 40) for name in seconds]
    assert _within(240, seconds, [32]) == all_of_them
    assert _within(140, seconds, [32]) == all_of_them
    # Ten times slower: the backends get fewer steps, to leave time for the peers.
    timed = _within(400, dict.fromkeys(seconds, 2.0), [32, 64])
    assert [name for name, *_ in timed] == [*seconds]
    assert {count for _, count, _ in timed} == {32}
    assert all(number < 40 for name, _, number in timed if not name.startswith("fla"))
    # The larger token count is measured for all variants or for none.
    assert [name for name, count, _ in _within(1000, seconds, [32, 64]) if count == 64] == [*seconds]


def _wrong_scan_is_caught(rank: int, world_size: int, folder: str) -> list[str]:
    """Run the case with scans that return a wrong state or none, in both precisions. Returns the error messages."""
    found = []
    for dtype, wrong in (
        ("fp32", over_all_ranks(LocalCopyScan())),
        ("bf16", local_exchange()),
    ):
        config = ModelConfig.load([*QUICK, f"dtype={dtype}", f"out={folder}/{dtype}", "variants=[lasp2]"])
        session = Session.open(config, Launch(rank, world_size, rank, world_size))
        right = session.exchange

        def exchange(variant: Variant, *rest: Any, right: Any = right, wrong: Any = wrong, **options: Any) -> Any:
            return wrong if variant.kind == "lasp2" else right(variant, *rest, **options)

        with (
            mock.patch.object(session, "exchange", exchange),
            mock.patch("zeco_train.bench.model.time_in_turns") as timed,
        ):
            try:
                model.CASE.measure(config, session)
            except WrongResultError as error:
                found.append(str(error))
            timed.assert_not_called()
        session.drain()
    return found


@pytest.mark.slow  # of the operator, and of softmax attention, the default run has the same
def test_backend_with_wrong_gradients_is_not_timed(tmp_path: Path) -> None:
    for found in run_distributed(_wrong_scan_is_caught, 2, str(tmp_path)):
        assert len(found) == 2
        assert all("lasp2 is wrong, nothing is timed: gradient on rank" in line for line in found)
    assert list(tmp_path.iterdir()) == []


def _gathered_scan_is_right(rank: int, world_size: int) -> None:
    config = ModelConfig.load(QUICK)
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    generator = torch.Generator().manual_seed(rank)
    state = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=generator)
    log_decay = -torch.rand(1, 2, 3, dtype=torch.float64, generator=generator)
    matrices = torch.randn(1, 2, 3, 3, dtype=torch.float64, generator=generator)
    carry_in = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    exchanges = gathered_exchange(), session.exchange(backend_variant("lasp1"), 24)
    for each in exchanges:
        assert (each.is_first, each.is_last) == (rank == 0, rank == world_size - 1)
    # `adjoint` returns a transposed view, whose strides differ from those of a new tensor.
    for reverse, transition in itertools.product((False, True), (log_decay, matrices, matrices.mT)):
        results = []
        for each in exchanges:
            pending = each.states.launch(ScanRequest(state, transition, reverse, carry_in, want_carry=True))
            received = pending.wait()
            pending.finish()
            results.append((received, pending.carry_out()))
        for found, expected in zip(*results, strict=True):
            assert relative_error(found, expected) < 1e-14
    session.drain()


def test_gathered_scan_equals_lasp1() -> None:
    run_distributed(_gathered_scan_is_right, 3)


def test_states_of_a_hybrid_include_its_caches(tmp_path: Path) -> None:
    """With the capacity of the context and the steps after it."""
    hybrid = ["contexts=[70]", "check_tokens=70", "model.attn.every=2", "model.attn.num_kv_heads=2"]
    outcome = run_here(command.main, "decode", *DECODE, *hybrid, f"out={tmp_path}")
    assert outcome.code == 0, outcome
    for row in json.loads((tmp_path / "results.json").read_text())["rows"]:
        assert row["relative_error"] < 1e-12
        # One linear layer; and k and v of one softmax layer, with 2 heads of 8 and a warm-up of 1 and 4 steps.
        of_one = 4 * 4 * 8 * 8 + 2 * 2 * 8 * (row["context"] + 5) * 8
        assert row["state_mb"] == pytest.approx(row["batch"] * of_one / 1e6)
