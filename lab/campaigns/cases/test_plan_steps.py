"""Bytes that autograd keeps, planned and real: all forms of a block, launched and compiled."""

from __future__ import annotations

import pytest

from tests.plan.test_steps import check_activations
from zeco_train.ops.recompute import Recompute
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.none])
@pytest.mark.parametrize(("dtype", "compiled"), [(Dtype.fp32, False), (Dtype.bf16, False), (Dtype.bf16, True)])
@pytest.mark.parametrize("variant", [[], ["model.num_kv_heads=1", "model.use_output_gate=false"]])
def test_activation_bytes_equal_saved_tensors(
    variant: list[str], dtype: Dtype, compiled: bool, recompute: Recompute
) -> None:
    check_activations(variant, dtype, recompute, compiled=compiled)
