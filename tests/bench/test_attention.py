"""Benchmark case `attention`: its settings, checks and FLOPs, and the whole case on two ranks."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.bench_settings import measure
from tests.support.commands import run_here
from tests.support.distributed import run_distributed
from zeco_train.bench import __main__ as command
from zeco_train.bench import attention
from zeco_train.bench.attention import DEFAULTS, VARIANTS, AttentionConfig, _flops, build_variant
from zeco_train.bench.config import PASSES
from zeco_train.bench.operator import Inputs
from zeco_train.bench.session import Session, WrongResultError
from zeco_train.errors import ConfigError
from zeco_train.sp.attention import method as local
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

SMALL = ["device=cpu", "warmup=1", "runs=2", "flush_mb=0", "timeout_seconds=60", "dtype=fp64"]
TORCH = VARIANTS["torch"]
SMALL += ["heads=4", "head_dim=8", "tokens=[24]", "check_tokens=20"]


def test_flops_count_the_pairs_that_are_read() -> None:
    for window in (None, 5):
        config = AttentionConfig.load(["heads=2", "head_dim=8", f"window={'null' if window is None else window}"])
        pairs = sum(min(position + 1, window or 24) for position in range(24))
        assert _flops(config, VARIANTS["dp"], 24, "forward", 3) == 2 * 2 * 2 * 8 * pairs
        assert _flops(config, VARIANTS["ring"], 8, "forward_backward", 3) == pytest.approx(2 * 7 * 2 * 8 * pairs / 3)
    assert math.isnan(_flops(config, VARIANTS["gla:zeco"], 8, "forward", 3))


def test_torch_is_refused_where_it_does_not_apply() -> None:
    sessions = [
        mock.Mock(spec=Session, on_cuda=on_cuda, world_size=2, rank=rank, device=torch.device("cpu"))
        for on_cuda, rank in ((False, 0), (True, 0), (True, 1))
    ]
    grouped, plain = (AttentionConfig.load(more).shape(TORCH, 8) for more in (["key_heads=4"], []))
    for session, shape, window, says in (
        (sessions[0], plain, None, "need CUDA"),
        (sessions[1], grouped, None, "without window, and with key_heads=null"),
        (sessions[1], plain, 4, "without window, and with key_heads=null"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_variant(TORCH, shape, window, session)
    positions = [build_variant(TORCH, plain, None, session).positions.tolist() for session in sessions[1:]]
    assert positions == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("name", ["dp", "dp:deterministic"])
def test_deterministic_variant_adds_up_in_one_order(name: str) -> None:
    shape = AttentionConfig.load(SMALL).shape(VARIANTS[name], 8)
    session = mock.Mock(spec=Session, on_cuda=False, world_size=2, rank=1, device=torch.device("cpu"))
    session.position.side_effect = partial(Session.position, session)
    inputs = Inputs.random(shape, Dtype.fp64, 0, session.device)
    expected = inputs.results(build_variant(VARIANTS["dp"], shape, None, session).attention)
    with mock.patch.object(local, "attend_backward", wraps=local.attend_backward) as backward:
        found = inputs.results(build_variant(VARIANTS[name], shape, None, session).attention)
    assert [call.args[-1] for call in backward.call_args_list] == [name != "dp"]
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def _case(rank: int, world_size: int, folder: str, settings: list[str]) -> str:
    measure(rank, world_size, "attention", *SMALL, *settings, f"out={folder}/right")
    # A method that forgets the keys of other ranks must not be timed.
    with (
        mock.patch.object(attention, "_method", return_value=local.LocalAttention()),
        pytest.raises(WrongResultError) as wrong,
    ):
        measure(rank, world_size, "attention", *SMALL, "variants=[dp,ulysses]", f"out={folder}/wrong")
    return str(wrong.value)


def test_case_on_one_rank(tmp_path: Path) -> None:
    variants = ["dp", "ring", "ulysses", "megatron_sp", "gla:zeco"]
    outcome = run_here(command.main, "attention", *SMALL, f"variants=[{','.join(variants)}]", f"out={tmp_path}")
    assert outcome.code == 0, outcome
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["pass"], row["variant"]) for row in rows] == [(kind, name) for kind in PASSES for name in variants]
    assert all(row["relative_error"] < 1e-11 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["key_heads=2", "window=30", "passes=[forward_backward]"], pytest.param([], marks=pytest.mark.campaign)],
    ids=["window", "default"],
)
def test_methods_are_checked_and_measured_on_two_ranks(settings: list[str], tmp_path: Path) -> None:
    for wrong in run_distributed(_case, 2, str(tmp_path), settings):
        assert "ulysses is wrong, nothing is timed: " in wrong
    assert not (tmp_path / "wrong").exists()
    assert (tmp_path / "right" / "attention.png").exists()
    results = json.loads((tmp_path / "right" / "results.json").read_text())
    measured = [name for name in DEFAULTS if name != "torch"]
    assert {*METHODS, "megatron_sp", "all_gather:contiguous", "gla:zeco"} < {*measured}
    assert [(row["pass"], row["variant"]) for row in results["rows"]] == [
        (kind, name) for kind in (["forward_backward"] if settings else PASSES) for name in measured
    ]
    for row in results["rows"]:
        assert row["relative_error"] < 1e-11
        assert ("tflops_per_gpu" in row) == (not row["variant"].startswith("gla:"))
        assert (row["heads"], row["head_dim"], row["tokens"]) == (4, 8, 24)
    assert any("torch is not measured: " in note for note in results["notes"])
