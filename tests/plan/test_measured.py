"""The planner's memory and time against measurements."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.planning import EAGER, GLA_1B, make_case, planned
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.errors import ConfigError
from zeco_train.ops.operator import OperatorTime
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.plan import calibration
from zeco_train.plan.memory import plan_memory
from zeco_train.plan.step_time import drift_seconds, exposed_scan_seconds, operator_seconds, plan_step
from zeco_train.plan.traffic import scan_choice
from zeco_train.sp.backend_registry import BACKENDS

# --- measurements: peak GB of a rank (on CPUs of its process), seconds per step ---


def _h200(world_size: int, kilotokens: int, sp: str, *more: str, model: str = "gla_1b") -> list[str]:
    """Settings for a number of tokens per GPU: one sequence per GPU with dp, one over all GPUs otherwise."""
    sequences = world_size if sp == "sp=dp" else 1
    seq_len = 1024 * kilotokens * world_size // sequences
    split = [f"world_size={world_size}", f"data.seq_len={seq_len}", f"data.global_batch={sequences}"]
    return [f"model={model}", "train.dtype=bf16", "gpu=h200", sp, *split, *more]


# Arguments, peak GB, seconds per step. lab/campaigns/cases/test_measured.py has all that were measured.
REPLAYED = (_h200(1, 16, "sp=dp"), 49.17, 0.2209)
# The same steps by torch.cuda.max_memory_allocated.
ALLOCATED_GB = 45.57
LAUNCHED = (_h200(1, 32, "sp=dp", "train.cuda_graphs=off"), 69.13, 0.4535)

# Tokens a step, its milliseconds by train.matmul: gla_1b on an H200, replayed (lab/results/model_1xh200_*.txt).
STEPS = {2048: (42.22, 41.71), 4096: (66.15, 60.75), 16384: (214.55, 176.93)}


@pytest.mark.parametrize(
    ("arguments", "peak_gb", "seconds"), [REPLAYED, pytest.param(*LAUNCHED, marks=pytest.mark.slow)]
)
def test_plan_agrees_with_measured_memory_and_time(arguments: list[str], peak_gb: float, seconds: float | None) -> None:
    case = make_case(*arguments)
    rel = 0.1 if "train.cuda_graphs=off" in arguments else 0.05
    memory = plan_memory(case, 0.05)
    # `bench model` counts all of the graphs' pool, with the fragments in it.
    assert memory.peak / 1e9 / (1 + rel) <= peak_gb <= (memory.peak + memory.fragments) / 1e9 * (1 + rel)
    if arguments == REPLAYED[0]:
        assert memory.peak / 1e9 == pytest.approx(ALLOCATED_GB, rel=0.02)
    if seconds is not None:
        assert plan_step(case).total == pytest.approx(seconds, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", STEPS)
def test_plan_agrees_with_measured_speeds_of_both_products(tokens: int) -> None:
    arguments = [*GLA_1B, "gpu=h200", "sp=dp", "world_size=1", f"data.seq_len={tokens}"]
    steps = [1e3 * planned(*arguments, f"train.matmul={matmul}").time.total for matmul in ("bf16", "fp8")]
    assert steps == pytest.approx(STEPS[tokens], rel=0.1)
    assert steps[1] < steps[0]


@pytest.mark.slow
def test_plan_of_fp8_needs_a_device_with_it() -> None:
    """CPUs emulate its products, at a rate that is not known; what rounding moves is counted."""
    with pytest.raises(ConfigError, match=r"^train\.matmul=fp8: a100 has no products in fp8; take bf16"):
        make_case(*GLA_1B, "gpu=a100", "train.matmul=fp8")
    tiny = "model=gla_tiny", "gpu=cpu", "sp=dp"
    emulated, plain = (plan_step(make_case(*tiny, f"train.matmul={matmul}")) for matmul in ("fp8", "bf16"))
    assert emulated.seconds["elementwise"] > plain.seconds["elementwise"]
    assert emulated.seconds | {"elementwise": 0.0} == plain.seconds | {"elementwise": 0.0}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("heads", "tokens", "exposed_us"), [(16, 16384, 1362), (16, 32768, 2457), (32, 16384, 2494), (32, 32768, 4655)]
)
def test_exposed_scan_time_agrees_with_measurement(
    heads: int, tokens: int, exposed_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 H200s, one layer alone, at full clocks (lab/results/operator_4xh200.txt); All-Scan is hidden there."""
    monkeypatch.setattr(calibration, "IN_STEP", 1.0)
    # The kernels of that run took 1.427 ms for 16,384 tokens and 16 heads.
    measured = dataclasses.replace(OPERATORS["gla"], time=OperatorTime("gla", 5.44e-9, 0.30, 64, 128))
    monkeypatch.setitem(OPERATORS, "gla", measured)
    shape = ["model.num_layers=1", f"model.num_heads={heads}", f"model.hidden_size={128 * heads}"]
    case = make_case(*GLA_1B, EAGER, *shape, "world_size=4", f"data.seq_len={4 * tokens}")
    assert exposed_scan_seconds(case.by(BACKENDS["lasp1"])) == pytest.approx(exposed_us * 1e-6, rel=0.1)
    assert exposed_scan_seconds(case.by(BACKENDS["zeco"])) == 0
    assert exposed_scan_seconds(case.by(BACKENDS["dp"])) == 0


@pytest.mark.parametrize(("setting", "beside"), [("model.use_gate=true", 2048 * 3072), ("model.use_gate=false", 0)])
def test_scan_of_matrices_is_hidden_by_the_gate_and_by_its_weights_gradient(setting: str, beside: int) -> None:
    """And in the backward pass by the walk for the states."""
    split = ["sp.all_scan.transport=p2p", "world_size=64", f"data.seq_len={4096 * 64}"]
    case = make_case("model=gated_deltanet_1b", *GLA_1B[1:], EAGER, setting, *split).by(
        BACKENDS["zeco"], SCANS["chain"]
    )
    (block,), choice = [*case.spec.blocks.values()], scan_choice(case)
    assert choice is not None
    assert block.flops_beside == 2 * beside
    product = 4096 * 2 * beside / case.machine.flops[case.config.train.dtype]
    _, backward = operator_seconds(case, block)
    hidden = product, product + calibration.OVERLAP_MATRICES * backward
    lates, drift = [max(0.0, choice.seconds - each) for each in hidden], drift_seconds(case)
    expected = sum(block.count * max(0, each - drift) + min(each, drift) for each in lates)
    assert exposed_scan_seconds(case) == pytest.approx(expected) != 0


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.campaign), 64])
def test_chain_and_lasp1_wait_by_one_rule(ranks: int) -> None:
    """Of two layers and of twenty: what exceeds the drift in every layer, the rest once a pass."""
    for backend, scan in ((BACKENDS["zeco"], SCANS["chain"]), (BACKENDS["lasp1"], SCANS["serial"])):
        exposed, late = [], 0.0
        for layers in (2, 20):
            split = [f"model.num_layers={layers}", f"world_size={ranks}", f"data.seq_len={16384 * ranks}"]
            case = make_case(*GLA_1B, "sp.all_scan.transport=p2p", *split).by(backend, scan)
            choice, work = scan_choice(case), operator_seconds(case, next(iter(case.spec.blocks.values())))
            assert choice is not None
            if scan.in_series:
                lates = [choice.seconds + (ranks - 1) * calibration.LASP1_SERIAL * each for each in work]
            else:
                shares = calibration.OVERLAP_FORWARD, calibration.OVERLAP_BACKWARD
                lates = [max(0, choice.seconds - share * each) for share, each in zip(shares, work, strict=True)]
            drift, late = drift_seconds(case), max(lates)
            expected = sum(layers * max(0, each - drift) + min(each, drift) for each in lates)
            exposed.append(exposed_scan_seconds(case))
            assert exposed[-1] == pytest.approx(expected), (scan.name, layers)
        # Within the drift once, however many layers; far beyond it in each.
        assert (exposed[1] == pytest.approx(exposed[0], rel=0.2)) is (late < drift), scan.name
