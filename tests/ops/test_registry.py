"""Registry of operators: selection of passes by device, and errors."""

from __future__ import annotations

import pytest
import torch

from zeco_train.ops.gla.chunked import CHUNKED
from zeco_train.ops.mix import operator_of
from zeco_train.ops.registry import OPERATORS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cpu_selects_pytorch_passes(dtype: torch.dtype) -> None:
    assert OPERATORS["gla"].select([torch.zeros(1, dtype=dtype)] * 3 + [torch.zeros(1)]) is CHUNKED


def test_unknown_operator_and_wrong_operands_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^operator: must be one of gla.*; got 'gala'$"):
        operator_of("gala", [])
    with pytest.raises(ValueError, match=r"^operands: gla takes q, k, v, g; got 3 tensors$"):
        operator_of("gla", [torch.zeros(1)] * 3)
