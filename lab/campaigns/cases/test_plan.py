"""What the planner's command needs; its mistakes and operator times of kinds that the gate has one of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.plan import test_plan as gate
from tests.plan.test_hybrid_plans import HYBRID
from tests.plan.test_sharding import of_1b
from tests.support.commands import REPOSITORY
from tests.support.planning import GLA_1B, make_case, planned
from tests.support.waiting import ENOUGH
from zeco_train.config.schema import group_options
from zeco_train.plan import calibration
from zeco_train.plan.attention_costs import attention_blocks, attention_seconds, method_costs, plan_exchanges
from zeco_train.plan.case import build_case
from zeco_train.plan.config import parse
from zeco_train.plan.memory import plan_memory
from zeco_train.plan.report import _assumptions
from zeco_train.plan.step_time import operator_seconds, plan_step
from zeco_train.plan.traffic import parameter_traffic
from zeco_train.sp.backend_registry import BACKENDS

pytestmark = pytest.mark.campaign


@pytest.mark.processes
def test_command_needs_no_gpu_packages_or_process_group() -> None:
    """The planner has to run on a laptop without GPU packages."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('triton', 'fla', 'transformers', 'wandb')))\n"
        "from zeco_train.plan.__main__ import main\n"
        "assert main(['+experiment=gla_1b_8m']) == 0\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=ENOUGH
    )
    assert done.returncode == 0, done.stderr
    assert "gla_1b: 1,159,766,528 parameters" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpu=h900"], "gpu=h900: must be one of h200, h100, a100, cpu or null"),
        (["gpus_per_node=0"], "gpus_per_node=0: must be ≥ 1 and ≤ 1048576"),
        (["memory_gb=-3"], "memory_gb=-3.0: must be > 0 and ≤ 1e+18"),
        (["token_budget=0"], "token_budget=0.0: must be > 0 and ≤ 1e+18"),
        (["json=/no/such/folder/plan.json"], "json=/no/such/folder/plan.json: its folder does not exist"),
        (["+world_size=4"], "+world_size=4: the key exists; write world_size=4"),
        (["+experiment=gla_9b"], "experiment=gla_9b: must be one of"),
        (["train.segment=4"], "train.segment=4: unknown key; did you mean train.segments?"),
        (["sp=dp", "sp.size=2", "world_size=2"], "sp.size=2: sp=dp keeps whole sequences on a rank"),
        (["data.seq_len=2", "train.segments=3"], "data.seq_len=2: must be ≥"),
        (["world_size=4", "sp.size=1", "data.global_batch=3"], "data.global_batch=3: must be a multiple of"),
        (
            ["model.attn.every=4", "world_size=64", "data.seq_len=65536", "sp.attention=ulysses"],
            "sp.attention=ulysses: needs ranks that divide the",
        ),
        (["dry_run=true", "rank=4", "world_size=4"], "rank=4: must be < 4"),
        (["rank=1"], "rank=1: would be ignored; it needs dry_run=true"),
        (["4"], "argument=4: must be KEY=VALUE"),
        (["world_size=two"], "world_size=two: "),
        (["json=/"], "json=/: "),
    ],
)
def test_invalid_arguments_give_one_line_errors(arguments: list[str], expected: str) -> None:
    gate.test_invalid_arguments_give_one_line_errors(arguments, expected)


@pytest.mark.parametrize(
    ("model", "operator", "milliseconds", "scaled"),
    [
        ("gla_1b", "gla", None, False),
        ("mamba2_1b", "scalar_decay", 1.176 * 16 / 64 * 256 / (128 + 64), False),
        ("retnet_1b", "fixed_decay", 0.167 + 0.380, False),
        ("linear_1b", "fixed_decay", 0.167 + 0.380, False),
        ("kda_1b", "kda", 1.769, False),
        ("hgrn_1b", "hgrn", 0.464 * 256 / (128 + 1), False),
        ("mamba1_1b", "mamba1", 6.519 * 16 / 4096 * 256 / (16 + 1), False),
        ("cosformer_1b model.causal=false task=mlm", "unmasked", 0.167 + 0.380, True),
    ],
)
def test_operator_times_are_those_of_the_operator(
    model: str, operator: str, milliseconds: float | None, scaled: bool
) -> None:
    """On an H200 alone, 16,384 tokens: of 16 heads of K = V = 128, scaled to those of the model."""
    case = make_case(*f"model={model} train.dtype=bf16 data.global_batch=1 data.seq_len=16384".split())
    block = next(iter(case.spec.blocks.values()))
    assert block.operators[-1] == operator
    if milliseconds is not None:
        heads, key_dim, value_dim = block.state_shape
        expected = milliseconds * 1e-3 / calibration.IN_STEP * heads / 16 * (key_dim + value_dim) / 256
        assert sum(operator_seconds(case, block)) == pytest.approx(expected, rel=0.01)
    row = _assumptions(case)["operator"]
    assert ("unmasked has no measurement, so fixed_decay's is taken, scaled by K + V" in row) is scaled
    on_cpu = _assumptions(make_case(f"model={model.split()[0]}", "gpu=cpu"))["operator"]
    assert (f"{operator if not scaled else 'fixed_decay'} has no measurement, so gla's" in on_cpu) is (
        operator != "gla"
    )


def test_both_passes_of_slot_attention_take_as_long_as_measured() -> None:
    """Together, by another script than the first pass alone, whose time the plan takes (tests/gpu_results.md)."""
    case = make_case("model=gsa_1.3b", "train.dtype=bf16", "data.global_batch=1", "data.seq_len=16384")
    (block,) = case.spec.blocks.values()
    assert [*block.operators] == ["gsa", "gla"]
    forward, backward = operator_seconds(case, block)
    assert (forward + backward) * calibration.IN_STEP == pytest.approx(1.062e-3, rel=0.05)
    assert forward * calibration.IN_STEP == pytest.approx(0.376e-3, rel=0.05)


NO_LENGTH = ("quickstart", "gla_1b_extension", "gla_recall", "gla_needle")


@pytest.mark.parametrize("name", [name for name in group_options()["experiment"] if name not in NO_LENGTH])
def test_experiments_fit_their_machine(name: str) -> None:
    case, notes = build_case(parse([f"+experiment={name}"]))
    assert notes == []
    assert case.machine.name == ("cpu" if name == "gla_tiny_1m" else "h200")
    assert case.world_size == case.sp_size == (2 if name == "gla_tiny_1m" else 4)
    assert plan_memory(case, 0.05).fits
    expected = {"gla_1b_16k": 16384, "gla_1b_32k": 32768, "gla_1b_1m": 1 << 18, "gla_1b_8m": 1 << 15}
    assert case.tokens == expected.get(name, case.tokens)
    if name == "gla_1b_8m":
        # Allocators reserve more than a peak: measured at 32,768 tokens a rank, up to a quarter.
        assert plan_memory(case, 0.05).peak < 100e9
    if name == "gla_tiny_1m":
        assert case.config.data.seq_len == 1 << 20
        assert plan_memory(case, 0.05).peak < 2.5e9


def test_slow_links_bound_step_time() -> None:
    fast = planned(*GLA_1B, "world_size=4", "data.seq_len=65536").time
    slow = planned(*GLA_1B, "world_size=4", "data.seq_len=65536", "link_gbps=1").time
    moved = parameter_traffic(make_case(*GLA_1B, "world_size=4", "data.seq_len=65536")).total / 1e9
    assert slow.total > moved > fast.total
    # Between nodes the network bandwidth applies, of eight cards together.
    across = [*GLA_1B, "world_size=16", "data.seq_len=262144"]
    moved = parameter_traffic(make_case(*across)).total / 8e9
    assert moved < planned(*across, "node_gbps=1").time.total < 2 * moved


def test_throughput_of_dp_falls_with_ranks_less_so_within_fewer_shards() -> None:
    whole = [plan_step(of_1b(ranks)).total - plan_step(of_1b(ranks)).seconds["scans"] for ranks in (8, 256, 1024, 4096)]
    assert whole == sorted(whole)
    in_nodes = [of_1b(ranks, "parallel.shard_size=8") for ranks in (256, 4096)]
    times = [plan_step(case).total - plan_step(case).seconds["scans"] for case in in_nodes]
    assert times[1] < 1.01 * times[0]
    assert times[1] < whole[2] < whole[3] / 1.3


def test_time_of_softmax_grows_with_length_and_stops_at_the_window() -> None:

    def seconds(length: int, *more: str) -> float:
        return attention_seconds(make_case(*HYBRID, "world_size=8", f"data.seq_len={length}", *more))

    assert seconds(1 << 20) == pytest.approx(4 * seconds(1 << 19), rel=1e-3)
    window = "model.attn.window=4096"
    assert seconds(1 << 20, window) == pytest.approx(2 * seconds(1 << 19, window), rel=1e-2)
    # Without a shared sequence each rank has a short one.
    case = make_case(*HYBRID, "world_size=8", "data.seq_len=1048576")
    assert attention_seconds(case.by(BACKENDS["dp"])) == pytest.approx(attention_seconds(case) / 8, rel=1e-3)
    assert plan_exchanges(case.by(BACKENDS["dp"])).sent == 0


@pytest.mark.parametrize(
    ("settings", "phase"),
    [
        (["model.attn.every=4"], "backward of the last block"),
        (["model.attn.every=4", "model.attn.offset=0"], "backward of layer 16, softmax"),
        (["model.attn.layers=[0]"], "backward of the first block"),
    ],
)
def test_peak_has_the_keys_that_a_method_holds_wherever_the_layer_is(settings: list[str], phase: str) -> None:
    arguments = [*GLA_1B, *settings, "data.seq_len=1048576", "world_size=16"]
    gathered = make_case(*arguments, "sp.attention=all_gather")
    spread = make_case(*arguments, "sp.attention=ulysses")
    (block, _), *_ = attention_blocks(gathered)
    more = method_costs(gathered, block).held - method_costs(spread, block).held
    memory, less = (plan_memory(case, 0.05) for case in (gathered, spread))
    assert sum(memory.phases[phase].values()) - sum(less.phases[phase].values()) == pytest.approx(more, rel=0.05)
    # Where the last layer is early, so are few activations left.
    assert phase != "backward of layer 16, softmax" or memory.phase == phase
    keys, queries = 2 * 16 * 128 * (1 << 20), 16 * 128 * (1 << 16)
    assert method_costs(gathered, block).held == keys * 2 * 4 + 4 * queries * 2
