"""Benchmark case `delays`: where its delays take effect, what the planner predicts, and the case on two CPU ranks."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch

from lab.delays import __main__ as delays
from lab.delays.__main__ import _Measurement, hidden_us
from lab.delays.chains import TwoGpuChain
from lab.delays.config import DelaysConfig
from lab.delays.hops import _Hops
from lab.delays.model import OVERLAPS, PATTERNS, Predicted, late_by
from lab.delays.spins import Place, SpinningScan, Spins
from tests.collectives.test_all_scan import start_interpreter
from tests.support.all_scan_emulation import allocate_shared
from tests.support.bench_settings import TINY, error_line
from tests.support.commands import TORCHRUN, Command
from tests.support.distributed import run_distributed
from zeco_train.bench.session import Session
from zeco_train.bench.variants import parse_variants
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.seam import ScanRequest
from zeco_train.plan import calibration as known
from zeco_train.sp.backend import LocalScan
from zeco_train.system.numbers import relative_error

MODEL = [text.replace("model.num_layers=", "layers=") for text in TINY if not text.startswith("heads")]
QUICK = [*MODEL, "model.num_heads=2", "device=cpu", "dtype=fp32", "warmup=1", "runs=3", "steps=3", "flush_mb=1"]
QUICK += ["hops=5", "heads=[2]", "tokens=[32]", "drift_tokens=32", "delays_us=[10000,100000]", "drift_us=[20000]"]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["parts=[hop]"], "parts=['hop']: must be a list of different ones of hops, operator, drift, step"),
        (["variants=[lasp1]"], "variants=lasp1: must be one of lasp2, zeco"),
        (["strategies=[hsdp]"], "strategies=['hsdp']: must be a list of different ones of ddp, zero2, zero3"),
        (["delays_us=[5,2]"], "delays_us=[5.0, 2.0]: must be a list of rising numbers > 0 and ≤ 1e+06"),
        (["drift_us=[0]"], "drift_us=[0.0]: must be a list of rising numbers"),
        (["chain_ranks=[2,5]"], "chain_ranks=[2, 5]: must be a list of rising even numbers ≥ 2"),
        (["layers=1"], "layers=1: must be ≥ 2"),
        (["model.num_layers=3"], "model.num_layers=3: write layers=… here"),
        (["model=kda_340m"], "model=kda_340m: must be a model whose layers are all of mixer gla"),
        (["device=cpu"], "ranks=1: this case is of two"),
    ],
)
def test_invalid_arguments_print_one_error_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in error_line(arguments, capsys, delays.main)


def test_spins_follow_the_layers_of_each_direction() -> None:
    layers, spent = 3, list[tuple[Place, bool, int]]()
    spins = Spins(layers, torch.device("cpu"))
    inner = LocalScan()
    with (
        mock.patch.object(spins, "spend", lambda *where: spent.append(where)),
        mock.patch.object(inner, "worker", return_value=mock.Mock(launch=lambda job: job.run())),
    ):
        scan = SpinningScan(inner, spins)
        state = torch.randn(1, 2, 3, 4)
        for reverse in (False,) * layers + (True,) * layers + (False,):
            scan.launch(ScanRequest(state, torch.zeros(1, 2, 3), reverse))
    order = [*((False, layer) for layer in (0, 1, 2)), *((True, layer) for layer in (2, 1, 0)), (False, 0)]
    assert spent == [(place, *each) for each in order for place in Place]


def test_tables_hold_the_delays_of_one_place_and_direction() -> None:
    spins = Spins(2, torch.device("cpu"))
    spins.load(spins.table(Place.scan, True, [0.0, 20_000.0]))
    places = [*itertools.product(Place, (False, True), range(2))]
    with mock.patch.object(time, "sleep") as sleep:
        for where in places:
            spins.spend(*where)
    slept = [call.args[0] for call in sleep.call_args_list]
    assert dict(zip(places, slept, strict=True)) == dict.fromkeys(places, 0.0) | {(Place.scan, True, 1): 0.02}


_BLOCK = 25.0


def _predicted(drift: float, hidden: float, layers: int) -> Predicted:
    return Predicted(1.0, (1.0 + hidden, 1.0 + hidden), drift, True, layers, (1.0, 1.0), _BLOCK)


def test_late_ranks_share_their_delays_only_within_the_drift() -> None:
    layers, delay = 100, 5.0
    for reverse in (False, True):
        coupled, free = _predicted(0.0, 1.0, layers), _predicted(100.0, 100.0, layers)
        shares = [
            {pattern: each.late_growth(pattern, reverse, delay) / layers / delay for pattern in PATTERNS}
            for each in (coupled, free)
        ]
        assert shares[0] == pytest.approx({"same": 1.0, "alternating": 1.0, "once": 0.01})
        assert shares[1] == pytest.approx({"same": 1.0, "alternating": 0.5, "once": 0.01})
        # Beyond twice the drift, max(1/2, 1 − drift / delay) of the delay is waited for.
        between = _predicted(2.0, 100.0, layers).late_growth("alternating", reverse, delay)
        assert between / layers / delay == pytest.approx(1 - 2.0 / delay, abs=0.01)
    assert [late_by("alternating", rank, 3, 1.0) for rank in range(2)] == [[1, 0, 1], [0, 1, 0]]


def test_constants_are_those_that_explain_what_was_measured() -> None:
    predicted, delay = _predicted(2.0, 100.0, 20), 5.0
    for reverse in (False, True):
        growth = predicted.late_growth("alternating", reverse, delay)
        assert predicted.drift_of(reverse, delay, growth) == pytest.approx(2.0 / _BLOCK, abs=1e-3)
        # Ranks that wait in every layer; and those that never do, which may be apart by half of the delay at least.
        assert predicted.drift_of(reverse, delay, 20 * delay) == pytest.approx(0.0, abs=1e-6)
        assert predicted.drift_of(reverse, delay, 0.0) >= delay / 2 / _BLOCK
        assert predicted.overlap_of(reverse, 0.0) == OVERLAPS[reverse]


def test_delayed_scans_grow_beyond_the_window() -> None:
    predicted = _predicted(2.0, 3.0, 10)
    assert predicted.hidden(False) == 3.0
    # One late layer in ten waits within the drift, all of them beyond it.
    assert [predicted.step_growth(False, delay) for delay in (3.0, 5.0, 6.0)] == pytest.approx([0.0, 0.2, 1.2])
    assert predicted.operator_growth(True, 4.0) == 4.0


@pytest.mark.slow
def test_prediction_is_that_of_the_planner() -> None:
    config = DelaysConfig.load([])
    session = mock.Mock(spec=Session, on_cuda=True, world_size=2, device=torch.device("cuda"))
    with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        chain, two_shot = (
            Predicted.of(config.run_config("ddp"), variant, 16_384, session)
            for variant in parse_variants(["zeco:chain", "zeco:two_shot"], "zeco")
        )
    assert (chain.layers, chain.one_way, two_shot.one_way) == (config.layers, True, False)
    # S of 0.5 MiB by the costs of symmetric memory.
    assert chain.scan == pytest.approx(7.3e-6 + 5.8e-6 + 3.8e-12 * (1 << 19))
    assert chain.alone[0] == pytest.approx(known.IN_STEP * chain.windows[0])
    assert two_shot.drift == 0.0 < chain.drift < 2e-3


def test_hidden_delay_is_the_longest_without_exposure() -> None:
    rows = [{"delay_us": delay, "share": share} for delay, share in ((50.0, 0.02), (100.0, 0.2), (200.0, 0.05))]
    assert hidden_us(rows) == 50.0
    assert hidden_us(rows[1:]) == 0.0


def _chains_are_right(rank: int, world_size: int) -> None:
    """The kernels of both GPUs' ranks, one after the other, in Triton's interpreter."""
    start_interpreter()
    config = DelaysConfig.load([*QUICK, "heads=[2]", "key_dim=4", "value_dim=8"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    hops = _Hops(2, config, session)
    for ranks in (2, 6):
        with mock.patch("lab.delays.chains.INTERPRETED", True):
            chain = TwoGpuChain(ranks, hops.state, hops.log_decay, session, allocate_shared)
        for _ in range(3):
            # Each rank of the chain but the first writes what it receives.
            for output in chain._outputs[1 - rank :]:
                output.fill_(torch.nan)
            assert relative_error(chain.run(), hops.expected(ranks - 1)) < 1e-6, ranks
        chain.check()


@pytest.mark.campaign
def test_chain_of_many_ranks_on_two_gpus_is_right() -> None:
    run_distributed(_chains_are_right, 2, fresh=True)


def _one_failure_spares_the_rest(rank: int, world_size: int, folder: str) -> tuple[list[str], set[str]]:
    """Run the case with a part that fails on rank 1 only; returns the failures, and the parts with rows."""
    config = DelaysConfig.load([*QUICK, f"out={folder}", "parts=[hops,operator]"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))

    def fail(*rest: Any) -> None:
        if rank == 1:
            raise RuntimeError("no such kernel")

    with mock.patch.object(_Measurement, "_hops", fail):
        report = delays.CASE.run(config, session)
    session.drain()
    return report.failures, {row["part"] for row in report.rows}


@pytest.mark.slow
def test_spin_compiles_for_a_gpu() -> None:
    """The GPU compiler runs without a GPU."""
    triton = pytest.importorskip("triton")
    from lab.delays.spin_kernel import spin_kernel

    signature = {"nanoseconds": "*i64", "index": "i32", "LANES": "constexpr"}
    source = triton.compiler.ASTSource(fn=spin_kernel, signature=signature, constexprs={(2,): 32})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 1})
    assert compiled.asm["ptx"].count("%globaltimer") == 2
    assert compiled.asm["cubin"]


@pytest.mark.slow
def test_a_failing_part_is_noted_and_the_others_are_measured(tmp_path: Path) -> None:
    for failures, parts in run_distributed(_one_failure_spares_the_rest, 2, str(tmp_path)):
        assert failures == ["hops of 2 heads: rank 1: RuntimeError: no such kernel"]
        assert parts == {"operator"}


@pytest.mark.processes
@pytest.mark.campaign
def test_delays_case_on_two_ranks(tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    with Command([*launcher, "-m", "lab.delays", *QUICK, f"out={tmp_path}"], tmp_path) as running:
        outcome = running.wait()
    assert outcome.code == 0, outcome
    results = json.loads((tmp_path / "results.json").read_text())
    rows: list[dict[str, Any]] = results["rows"]
    assert [sum(row["part"] == part for row in rows) for part in ("hops", "operator", "drift", "step")] == [1, 5, 14, 5]
    (hops,) = (row for row in rows if row["part"] == "hops")
    assert hops["relative_error"] < 1e-6
    assert hops["each_us"] == pytest.approx(1e3 * hops["median_ms"] / 5)
    for row in rows:
        assert row["median_ms"] == median(map(max, *row["samples_ms_by_rank"]))
    # Each of the operator's scans waits for the delay, of which nothing here hides much.
    for row in rows:
        if row["part"] == "operator" and row["delay_us"] == 100_000:
            # On a busy machine the run without delay may be the late one.
            assert row["share"] > 0.3
    drift = {(row["strategy"], row["pass"], row["pattern"]) for row in rows if row["part"] == "drift"}
    assert drift == {("zero2", None, "none"), ("ddp", None, "none")} | {
        (strategy, name, pattern)
        for strategy in ("zero2", "ddp")
        for name in ("forward", "backward")
        for pattern in PATTERNS
    }
    assert "no symmetric memory and no CUDA graphs on a CPU" in results["notes"][1]
    (summary,) = (note for note in results["notes"] if "µs a hop: zeco:chain:p2p" in note)
    assert "OVERLAP_FORWARD: operator: zeco:chain, 32 tokens, forward" in summary
    assert summary.count("DRIFT, or more") == 4


@pytest.mark.processes
@pytest.mark.gpu
@pytest.mark.slow
def test_delays_case_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("of two GPUs")
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    arguments = ["model=gla_125m", "layers=2", "tokens=[2048]", "drift_tokens=2048", "steps=3", "runs=3"]
    arguments += ["heads=[16]", "delays_us=[200,2000]", "drift_us=[2000]", "budget_seconds=500", f"out={tmp_path}"]
    with Command([*launcher, "-m", "lab.delays", *arguments], tmp_path) as running:
        outcome = running.wait()
    assert outcome.code == 0, outcome
    rows: list[dict[str, Any]] = json.loads((tmp_path / "results.json").read_text())["rows"]
    modes = {(row["part"], row["mode"]) for row in rows if row.get("median_ms")}
    assert modes == {*((part, mode) for part in ("hops", "drift") for mode in ("eager", "graph"))} | {
        ("operator", "eager"),
        ("step", "graph"),
    }
    for row in rows:
        # With ddp the reductions hide a part of a late rank's delays.
        if row["part"] == "drift" and (row["strategy"], row["mode"], row["pattern"]) == ("zero2", "graph", "same"):
            assert row["share"] == pytest.approx(1.0, abs=0.4)
