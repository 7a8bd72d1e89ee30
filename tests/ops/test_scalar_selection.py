"""Scalar and fixed decays: which passes serve which operands, and operands that are refused."""

from __future__ import annotations

import pytest
import torch

from tests.support.recurrence import naive_of
from tests.support.scalar_cases import HEADS, KEY_DIM, VALUE_DIM, make
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.scalar_decay import FIXED_DECAY, SCALAR_DECAY
from zeco_train.ops.scalar_decay.chunked import CHUNKED_FIXED, CHUNKED_SCALAR
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cpu_selects_pytorch_passes(dtype: torch.dtype) -> None:
    operands = [torch.zeros(1, dtype=dtype)] * 3 + [torch.zeros(1)]
    assert OPERATORS["scalar_decay"].select(operands) is CHUNKED_SCALAR
    assert OPERATORS["fixed_decay"].select(operands) is CHUNKED_FIXED


def test_fixed_decay_that_requires_a_gradient_is_refused() -> None:
    operands, *_ = make(FIXED_DECAY, 4)
    operands[0].requires_grad_()
    shard = SequencePosition((0, 4), exchange=local_exchange())
    o, _ = mix("fixed_decay", operands, shard)
    o.sum().backward()
    operands[3].requires_grad_()
    with pytest.raises(ValueError, match=r"^log_decay: expected a constant, got a tensor that requires a gradient"):
        mix("fixed_decay", operands, shard)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (1, 4, 4, KEY_DIM), r"k: expected shape \[B, T, G, K\]"),
        (2, (1, 4, 5, VALUE_DIM), r"q: expected a number of groups that divides the 5 heads of v, got 2"),
        (2, (1, 3, HEADS, VALUE_DIM), r"v: expected shape \[B, T, H, V\]"),
        (3, (1, 4, HEADS, KEY_DIM), r"g: expected shape \[B, T, H\], got"),
        (3, (1, 4, 5), r"g: expected shape \[B, T, H\] = "),
    ],
)
def test_invalid_shapes_are_named(position: int, shape: tuple[int, ...], message: str) -> None:
    operands, *_ = make(SCALAR_DECAY, 4)
    if message.startswith("q"):
        operands[3] = torch.zeros(1, 4, 5, dtype=torch.float64)
    operands[position] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^{message}"):
        naive_of(SCALAR_DECAY)(*operands)
    with pytest.raises(ValueError, match=f"^{message}"):
        mix("scalar_decay", operands, SequencePosition((0, 4), exchange=local_exchange()))


def test_log_decays_of_other_heads_or_dtypes_are_refused() -> None:
    operands, *_ = make(FIXED_DECAY, 4)
    for wrong, message in (
        (operands[3][:5], r"log_decay: expected shape \[H\] = \[6\], got \[5\]"),
        (operands[3].bfloat16(), "log_decay: expected float32 or float64"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            mix("fixed_decay", [*operands[:3], wrong], SequencePosition((0, 4), exchange=local_exchange()))
