"""Bytes that autograd keeps, planned and real: all forms of a block, launched and compiled."""

from __future__ import annotations

import math

import pytest

from tests.plan.test_steps import check_activations
from tests.support.planning import EAGER, GLA_1B, make_case
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.memory import optimizer_bytes
from zeco_train.plan.step_time import plan_step
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.none])
@pytest.mark.parametrize(("dtype", "compiled"), [(Dtype.fp32, False), (Dtype.bf16, False), (Dtype.bf16, True)])
@pytest.mark.parametrize("variant", [[], ["model.num_kv_heads=1", "model.use_output_gate=false"]])
def test_activation_bytes_equal_saved_tensors(
    variant: list[str], dtype: Dtype, compiled: bool, recompute: Recompute
) -> None:
    check_activations(variant, dtype, recompute, compiled=compiled)


def test_muon_memory_and_products_are_counted() -> None:
    adamw, muon = (make_case("model=gla_1b", f"optim={name}", "world_size=8") for name in ("adamw", "muon"))
    projections = sum(math.prod(shape) for shape, rule in muon.spec.parameters if rule.is_projection)
    assert optimizer_bytes(adamw) - optimizer_bytes(muon) == pytest.approx(4 * projections / 8, rel=1e-3)
    one, eight = (muon.config.optim.spec.products(muon.spec.parameters, n, muon.config.optim) for n in (1, 8))
    assert eight == pytest.approx(one / 8, rel=0.02)
    # Five steps of 4 N² K + 2 N³ for a matrix [N, K] with N ≤ K.
    assert one == sum(
        5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
        for shape, rule in muon.spec.parameters
        if rule.is_projection
    )
    for dtype in (Dtype.fp32, Dtype.bf16):
        sized = [GLA_1B[0], EAGER, f"train.dtype={dtype.value}", "world_size=8"]
        cases = (make_case(*sized, f"optim={name}") for name in ("adamw", "muon"))
        adamw_seconds, muon_seconds = (plan_step(case).seconds["optimizer"] for case in cases)
        assert muon_seconds - adamw_seconds == pytest.approx(eight / muon.machine.flops[dtype], rel=1e-6)
