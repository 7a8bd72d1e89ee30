"""Bytes that autograd keeps, planned and real: all forms of a block, launched and compiled."""

from __future__ import annotations

import pytest

from tests.plan.test_steps import check_activations
from tests.support.planning import EAGER, GLA_1B, make_case
from zeco_train.ops.recompute import Recompute
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


def test_muon_takes_the_time_of_its_products() -> None:
    muon = make_case("model=gla_1b", "optim=muon", "world_size=8")
    products = muon.config.optim.spec.products(muon.spec.parameters, 8, muon.config.optim)
    for dtype in (Dtype.fp32, Dtype.bf16):
        sized = [GLA_1B[0], EAGER, f"train.dtype={dtype.value}", "world_size=8"]
        cases = (make_case(*sized, f"optim={name}") for name in ("adamw", "muon"))
        adamw_seconds, muon_seconds = (plan_step(case).seconds["optimizer"] for case in cases)
        assert muon_seconds - adamw_seconds == pytest.approx(products / muon.machine.flops[dtype], rel=1e-6)
