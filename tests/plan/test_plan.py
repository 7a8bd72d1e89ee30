"""The planner: memory and time as formulas; advice; the experiments; the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from tests.support.planning import EAGER, GLA_1B, command, make, make_case, planned
from zeco_train.collectives.cost_model import Link, Load
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.config.schema import group_options
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import stored_slow_downs
from zeco_train.plan import calibration
from zeco_train.plan.advice import legal_segments, options
from zeco_train.plan.config import PlanSettings, parse
from zeco_train.plan.memory import KINDS, parameter_bytes, plan_memory
from zeco_train.plan.report import _assumptions, as_json, as_text, longest_text
from zeco_train.plan.step_time import operator_seconds, plan_step
from zeco_train.plan.traffic import costs_of, load_of, parameter_traffic, scan_bytes, scan_choice
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.numbers import divisors

# --- memory and time as formulas ---


def test_memory_by_kind_matches_formula() -> None:
    memory = planned(*GLA_1B, "world_size=4", "data.seq_len=65536").memory
    numbers = make_case("model=gla_1b").spec.num_parameters
    assert set(memory.kinds) == set(KINDS)
    # A shard of the master weights, and all weights in bf16.
    assert memory.kinds["weights"] == pytest.approx(numbers * (4 / 4 + 2), rel=1e-3)
    assert memory.kinds["optimizer"] == pytest.approx(numbers * 8 / 4, rel=1e-3)
    assert memory.peak == sum(memory.kinds.values()) == max(sum(kinds.values()) for kinds in memory.phases.values())
    # The gradients of this rank, which split the memory of CUDA graphs.
    assert memory.fragments == pytest.approx(numbers * 4 / 4, rel=1e-3)
    assert memory.usable == pytest.approx(memory.available * 0.95 - calibration.OUTSIDE_BYTES - memory.fragments)
    tighter = plan_memory(make_case(*GLA_1B, "world_size=4", "data.seq_len=65536"), headroom=0.5)
    assert tighter.usable < memory.usable
    assert tighter.peak == memory.peak


def test_peak_memory_follows_each_setting() -> None:
    """Recompute, segments, strategies and compilation change peak memory in the documented direction."""

    def peak(*arguments: str) -> float:
        return plan_memory(make_case(*GLA_1B, "world_size=4", "data.seq_len=262144", *arguments), 0.05).peak

    whole = peak()
    assert peak("train.recompute=selective") < 0.75 * whole
    assert peak("train.recompute=full") < 0.4 * whole
    assert whole > peak("train.segments=2") > peak("train.segments=4")
    assert peak("parallel=zero3") < whole < peak("parallel=ddp")
    assert peak(EAGER) > whole
    # Longer sequences in proportionally more segments need only more states between segments.
    long, short = (
        plan_memory(
            make_case(*GLA_1B, "world_size=4", f"data.seq_len={segments << 18}", f"train.segments={segments}"), 0.05
        )
        for segments in (32, 2)
    )
    assert long.peak - short.peak == long.kinds["states"] - short.kinds["states"] == 2 * 30 * 20 * 16 * 64 * 128 * 4


def test_whole_gradients_and_weights_match_formulas() -> None:
    """Of ZeRO-1, which reduces once a step, and torch's DDP, whose weights are those that it computes with."""
    numbers = make_case("model=gla_1b").spec.num_parameters
    shared = [*GLA_1B, "train.dtype=fp32", "world_size=4", "data.seq_len=65536", "data.global_batch=3", "sp.size=4"]
    zero1, zero2, ddp, torchs = (
        planned(*shared, f"parallel={name}") for name in ("zero1", "zero2", "ddp", "torch_ddp")
    )
    loss = [plan.memory.phases["loss"] for plan in (zero1, zero2, ddp, torchs)]
    assert [each["gradients"] / numbers for each in loss] == pytest.approx([4, 1, 4, 4], rel=1e-3)
    assert [each["optimizer"] / numbers for each in loss] == pytest.approx([2, 2, 8, 8], rel=1e-3)
    assert [each["weights"] / numbers for each in loss] == pytest.approx([5, 5, 8, 4], rel=1e-3)
    # Once sharded, gradients are sharded.
    assert zero1.memory.phases["optimizer"] == zero2.memory.phases["optimizer"]
    sent = [parameter_traffic(plan.case) for plan in (zero1, zero2, ddp, torchs)]
    assert sent[1].scattered == 3 * sent[0].scattered > 0
    assert (sent[0].gathered, sent[2]) == (sent[1].gathered, sent[3])
    alone = [planned(*shared, "data.global_batch=1", f"parallel={name}") for name in ("zero1", "zero2", "torch_ddp")]
    assert alone[0].memory.phases == alone[1].memory.phases
    assert alone[2].memory.phases["loss"]["gradients"] == loss[3]["gradients"]


def test_longest_sequences_fit_and_no_longer_ones() -> None:
    shared = ["model=gla_tiny", "world_size=2", "sp.size=2", "gpu=h100", "memory_gb=4", "longest=true"]
    code, text, _ = command(*shared, "train.dtype=bf16")
    assert code == 0, text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[-7:-1]}
    assert [*rows] == [each.value for each in Strategy]
    assert rows["torch_ddp"] == ["refused"] * len(Recompute)
    assert text.splitlines()[-1].startswith("  refused: train.dtype=bf16: must be fp32 or fp64 with parallel=torch_ddp")
    # One refused setting hides no other, and a reason of two is given once.
    mixed = longest_text({"ddp": {"none": 2048, "full": "no"}, "zero1": {"none": "no", "full": 4096}}).splitlines()
    assert [line.split() for line in mixed[2:]] == [
        ["ddp", "2,048", "refused"], ["zero1", "refused", "4,096"], ["refused:", "no"],
    ]  # fmt: skip
    for column, (name, recompute) in enumerate(zip(("ddp", "zero1", "zero3"), Recompute, strict=True)):
        found = int(rows[name][column].replace(",", ""))
        case = make_case(*shared[:-1], f"parallel={name}", f"train.recompute={recompute.value}", "train.dtype=bf16")
        assert plan_memory(case.with_changes(seq_len=found), 0.05).fits
        assert not plan_memory(case.with_changes(seq_len=found + 2048), 0.05).fits


def test_step_time_by_kind_matches_formula() -> None:
    arguments = [*GLA_1B, "world_size=4", "data.seq_len=65536"]
    own = make_case(*GLA_1B).spec.flops_per_token(1)
    time = planned(*arguments, "matmul_tflops=500").time
    assert time.seconds["products"] == pytest.approx(16384 * (own.linear + own.head) / 500e12)
    assert time.tokens == 65536
    assert time.tokens_per_second == pytest.approx(65536 / time.total)
    assert time.per_device == pytest.approx(time.tokens_per_second / 4)
    # Full recompute repeats most of the forward products, a third of all; segments repeat them for all but one.
    full = planned(*arguments, "matmul_tflops=500", "train.recompute=full").time.seconds["products"]
    assert 1.2 < full / time.seconds["products"] < 4 / 3
    segments = planned(*arguments, "matmul_tflops=500", "train.segments=4").time.seconds["products"]
    expected = (own.linear * (1 + 3 / 4 / 3) + own.head) * 16384 / 500e12
    assert segments == pytest.approx(expected)
    case = make_case(*arguments)
    forward, backward = operator_seconds(case, next(iter(case.spec.blocks.values())))
    assert time.seconds["operator"] == pytest.approx(20 * (forward + backward))
    assert forward + backward == pytest.approx(0.700e-3 / calibration.IN_STEP, rel=0.01)
    slower = planned(*arguments, "bandwidth_gbps=1000").time
    assert slower.seconds["elementwise"] == pytest.approx(time.seconds["elementwise"] * 3.84)


@pytest.mark.slow
def test_operators_without_kernels_take_the_measured_slow_down() -> None:
    kda, wide = ["model=kda_1b", "gpu=h100", "train.dtype=bf16", "data.seq_len=16384", EAGER], "model.head_dim=512"
    served, slow = make(*kda), make(*kda, wide, "model.num_heads=4")
    # K + V is four times as large, and a quarter of the heads have it.
    times = (plan.planned.time.seconds["operator"] for plan in (served, slow))
    rows = [row for row in stored_slow_downs().rows if (row.operator, row.tokens) == ("kda", 16_384)]
    assert next(times) * rows[0].slow_down == pytest.approx(next(times))
    assert not served.notes
    (note,) = slow.notes
    assert "kda of K 512, V 512 in bf16 runs in PyTorch, about " in note
    assert note.endswith("the times below count that")
    assert (
        make(*kda, "model.head_dim=1024", "model.num_heads=2")
        .notes[0]
        .endswith("the times below are of kernels, and too short")
    )
    with pytest.raises(ConfigError, match=r"^train\.kernels=require: .*kda"):
        make(*kda, wide, "model.num_heads=4", "train.kernels=require")


@pytest.mark.slow
def test_matrix_transitions_are_planned_as_they_travel_and_are_kept() -> None:
    """In one kernel; a transition a layer, unless blocks are recomputed, and those of walks."""
    arguments = ["model=gated_deltanet_1b", *GLA_1B[1:], EAGER, "world_size=4", "data.seq_len=65536"]
    case = make_case(*arguments)
    load, shape = load_of(case), (1, 12, 128, 256)
    assert (load.shape, load.matrices) == (shape, True)
    choice = scan_choice(case)
    assert choice is not None
    assert choice.link is Link.symmetric
    assert scan_bytes(case, BACKENDS["lasp2"].scans[0]) == 3 * 4 * (12 * 128 * 256 + 12 * 128 * 128)
    cases = (make_case(*arguments, f"train.recompute={name}") for name in ("none", "full"))
    kept = [case.measured("gated_deltanet").kept.fixed for case in cases]
    assert kept[0] > 12 * 128 * 128 * 4 > kept[1] == 0
    row = _assumptions(case)["operator"]
    assert "no measurement" not in row
    assert "in PyTorch" not in row
    wide = _assumptions(make_case(*arguments, "model.head_dim=272", "model.expand_v=1.0"))["operator"]
    assert re.search(r"; [\d.]+ times as long in PyTorch$", wide), wide
    row = _assumptions(make_case("model=delta_net_1b", *arguments[1:]))["operator"]
    assert "delta has no measurement, so gated_delta's is taken" in row
    assert "in PyTorch" not in _assumptions(make_case("model=gla_1b", "train.dtype=bf16"))["operator"]


def test_scan_link_and_cost_within_and_across_nodes() -> None:
    for arguments, backend, link in (
        (["world_size=8"], "zeco", Link.symmetric),
        (["world_size=8"], "lasp2", Link.nccl),
        (["world_size=16"], "zeco", Link.nccl_across_nodes),
        (["world_size=16", "sp.size=8"], "zeco", Link.symmetric),
        (["world_size=8", "sp.all_scan.transport=p2p"], "zeco", Link.nccl),
    ):
        case, scans = make_case("model=gla_1b", *arguments), BACKENDS[backend].scans
        assert costs_of(case, scans, load_of(case)).link is link
        # No kernel serves matrices of K = 512.
        for key_dim, served in ((256, link), (512, Link.nccl if link is Link.symmetric else link)):
            assert costs_of(case, scans, Load(8, (1, 2, key_dim, 8), 4, matrices=True)).link is served
    costs: list[list[str]] = [[], ["scan_alpha_us=1000"], ["scan_gbps=0.1"]]
    cases = (make_case(*GLA_1B, "world_size=16", "data.seq_len=262144", *more) for more in costs)
    choices = [scan_choice(case.by(scan=SCANS["chain"])) for case in cases]
    measured, late, slow = (choice.seconds for choice in choices if choice is not None)
    assert measured < min(late, slow)


# --- advice ---


def test_legal_segment_counts_for_any_length() -> None:
    """Also for 2^40 tokens, where trying every number would take minutes."""
    for number in (1, 2, 36, 1000, 3 << 10, 9973, 2 * 9973):
        assert divisors(number) == [count for count in range(1, number + 1) if number % count == 0]
    assert legal_segments(make_case("sp=dp", f"data.seq_len={1 << 40}")) == [1 << power for power in range(31)]


def test_advice_is_fastest_setting_that_fits() -> None:
    arguments = [*GLA_1B, "world_size=4", "data.seq_len=1048576"]
    plan = make(*arguments)
    assert not plan.planned.memory.fits
    assert plan.options
    times = [option.time.total for option in plan.options]
    assert times == sorted(times)
    for option in plan.options:
        assert option.memory.fits
        fewer = [count for count in legal_segments(option.case) if count < option.case.segments]
        assert not any(plan_memory(option.case.with_changes(segments=count), 0.05).fits for count in fewer)
    settings = itertools.product(Recompute, legal_segments(plan.planned.case))
    everything = [plan.planned.case.with_changes(recompute=recompute, segments=count) for recompute, count in settings]
    assert times[0] == min(plan_step(case).total for case in everything if plan_memory(case, 0.05).fits)


def test_advice_when_planned_setting_fits() -> None:
    plan = make(*GLA_1B, "world_size=4", "data.seq_len=65536", "train.segments=2")
    assert plan.planned.memory.fits
    assert plan.options[0].setting == "train.recompute=none train.segments=1"
    assert plan.planned.setting in [option.setting for option in plan.options]
    assert as_text(plan).count("(as planned)") == 2  # the backend, and the setting


@pytest.mark.slow
def test_advice_when_nothing_fits() -> None:
    arguments = [*GLA_1B, "world_size=2", "data.seq_len=131072", "memory_gb=13"]
    plan = make(*arguments)
    assert plan.options == []
    assert plan.elsewhere is not None
    assert plan.elsewhere.memory.fits
    ranks = plan.elsewhere.case
    assert ranks.sp_size == ranks.world_size > 2
    assert options(dataclasses.replace(ranks, world_size=ranks.world_size // 2, sp_size=ranks.sp_size // 2), 0.05) == []
    text = as_text(plan)
    assert "does not fit" in text
    assert f"nothing fits on these ranks; with world_size={ranks.world_size} sp.size={ranks.sp_size}:" in text
    alone = make(*GLA_1B, "sp=dp", "world_size=2", "data.global_batch=2", "memory_gb=4")
    assert alone.options == []
    assert alone.elsewhere is None
    assert "nothing fits, with any train.recompute and train.segments" in as_text(alone)


# --- the experiments, and the command ---


def test_command_output_is_complete_and_deterministic(tmp_path: Path) -> None:
    arguments = ["+experiment=gla_1b_16k", "world_size=256"]
    code, text, err = command(*arguments, f"json={tmp_path / 'plan.json'}")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (code, err) == (0, "")
    assert "sp=zeco on 64 × 4 ranks (dp × sp) of h200, zero2" in text
    notes = text.splitlines()[3:5]
    assert notes[0] == "note: sp.size=4 is the experiment's; sp.size=256 spreads each sequence over all ranks"
    assert notes[1].startswith("note: data.global_batch=64, not 1")
    for row in ("dp", "lasp1", "lasp2", "zeco (chain)", "zeco (two_shot)", *KINDS):
        assert f"\n  {row} " in text, row
    plan = make(*arguments)
    assert (as_text(plan) + "\n", as_json(plan)) == (text, data)
    assert set(data) == {
        *("case", "parameters", "flops_per_token", "memory", "time", "wire", "advice", "assumptions", "notes")
    }
    assert data["parameters"] == make_case("model=gla_1b").spec.num_parameters
    assert sum(row["planned"] for row in data["wire"]["backends"].values()) == 1
    assert sum(data["time"]["seconds"].values()) == pytest.approx(data["time"]["step_seconds"])
    assert sum(data["memory"]["bytes"].values()) == pytest.approx(data["memory"]["peak_bytes"])
    # A run that does not fit is a valid plan: exit code 0.
    assert command("+experiment=gla_1b_1m", "train.recompute=none")[0] == 0


def test_hours_follow_token_budget() -> None:
    data = as_json(make(*GLA_1B, "token_budget=100e9"))["time"]
    assert data["hours"] == pytest.approx(100e9 / data["tokens_per_second"] / 3600)
    own = make(*GLA_1B, "train.steps=7")
    assert as_json(own)["time"]["token_budget"] == 7 * own.planned.case.tokens_per_step


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["world_size=0"], "world_size=0: must be ≥ 1 and ≤ 1048576"),
        (["headroom=1"], "headroom=1.0: must be ≥ 0 and < 1"),
        (["world_sise=4"], "world_sise=4: unknown key; did you mean world_size?"),
        (["world_size=6", "sp.size=4"], "sp.size=4: must divide the world size 6"),
        (["world_size=8", "parallel.shard_size=3"], "parallel.shard_size=3: must divide the world size 8"),
        (["dry_run=true", "rank=-1"], "rank=-1: must be ≥ 0"),
    ],
)
def test_invalid_arguments_give_one_line_errors(arguments: list[str], expected: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {expected}")
    assert err.count("\n") == 1


def test_plan_for_model_larger_than_this_machine() -> None:
    """Models for a cluster are planned on small machines."""
    large = ["model.hidden_size=131072", "model.num_heads=1024", "model.intermediate_size=393216", "model.num_layers=8"]
    arguments = [*large, "train.dtype=bf16", "world_size=4096", "sp.size=8", "data.seq_len=65536"]
    case = make_case(*arguments, "parallel=zero3")
    parameters = case.spec.num_parameters
    assert parameters > 1e12
    assert parameter_bytes(case, 4) == pytest.approx(parameters * 4 / 4096, rel=0.01)


def test_plan_keys_do_not_clash_with_training_keys() -> None:
    own = {entry.name for entry in dataclasses.fields(PlanSettings)}
    assert not own & {*group_options(), *(entry.name for entry in dataclasses.fields(parse([]).config))}


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["true", "false"])
def test_zero3_gathers_adjacent_units_beside_the_root(tied: str) -> None:
    model = ["model=gla_340m", f"model.tie_word_embeddings={tied}", "train.dtype=bf16", EAGER]
    case = make_case(*model, "world_size=4", "data.seq_len=65536", "parallel=zero3")
    *units, root = ([math.prod(shape) for shape, _ in unit] for unit in case.spec.units)
    table, block = 32000 * 1024, sum(units[1])
    assert sum(root) == (table if tied == "true" else 0) + 1024
    # A tied table lies in the root, which is gathered once.
    expected = parameter_bytes(case, 4) + 2 * (sum(root) + block + (block if tied == "true" else table))
    assert plan_memory(case, 0.05).phases["loss"]["weights"] == expected
