"""Unmasked linear attention: its dtypes and refusals; `test_operators.py` compares it over ranks with its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.operator_cases import make
from tests.support.recurrence import naive_of
from zeco_train.errors import ConfigError
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.unmasked import UNMASKED
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

SCALE = 0.7
NAMES = ("q", "k", "v")


def operands_of(num_tokens: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    values = make("unmasked", num_tokens, "mild", B=batch)
    return [values[name].to(dtype) for name in NAMES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unmasked_passes_sum_the_state_in_float32(dtype: torch.dtype) -> None:
    operands = operands_of(200, dtype)
    forward = UNMASKED.select(operands).forward(operands, SCALE, None)
    assert (forward.state.dtype, forward.transition.dtype) == (torch.float32, torch.float32)
    o, state = naive_of(UNMASKED)(*(x.double() for x in operands), scale=SCALE)
    torch.testing.assert_close(forward.state.double(), state, rtol=1e-5, atol=1e-4)
    found = forward.outputs(forward.state)
    assert found.dtype == dtype
    # A bf16 output is rounded once, by 2^-9 of itself.
    torch.testing.assert_close(found.double(), o, rtol=2**-8 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_naive_unmasked_attention_equals_state_form() -> None:
    q, k, v = operands_of(30)
    o, state = naive_of(UNMASKED)(q, k, v)
    torch.testing.assert_close(state, torch.einsum("bjhk,bjhv->bhkv", k, v))
    torch.testing.assert_close(o, q.shape[-1] ** -0.5 * torch.einsum("bihk,bhkv->bihv", q, state))


def test_gradients_of_many_tokens() -> None:
    leaves, others = ([x.requires_grad_() for x in operands_of(700, batch=1)] for _ in range(2))
    o, _ = mix("unmasked", leaves, SequencePosition((0, 700), exchange=local_exchange()), scale=SCALE)
    wanted = SCALE * torch.einsum("bihk,bjhk,bjhv->bihv", *others)
    do = torch.sin(torch.arange(o.numel(), dtype=o.dtype)).view_as(o)
    pairs = zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, others, do), strict=True)
    for found, exact in pairs:
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-9)


def test_documents_segments_and_generation_are_refused_by_name() -> None:
    operands, scan = operands_of(8, batch=1), local_exchange()
    state = torch.zeros(UNMASKED.state_shape(operands), dtype=torch.float64)
    documents = SequencePosition((0, 8), documents=[torch.tensor([0, 3, 8])], exchange=scan)
    with pytest.raises(ValueError, match=r"^doc_ids: .*data\.reset_state_at_document must be off$"):
        mix("unmasked", operands, documents)
    for name, given in (("carry_in", {"carry_in": state}), ("want_carry", {"want_carry": True})):
        with pytest.raises(ValueError, match=rf"^{name}: .* whole sequence at once, not by train\.segments$"):
            mix("unmasked", operands, SequencePosition((0, 8), exchange=scan), **given)
    with pytest.raises(ConfigError) as raised:
        OPERATORS["unmasked"].step(*(x[:, :1] for x in operands), state)
    assert raised.value.field == "model.causal"
    with pytest.raises(ValueError, match=r"^initial_state: "):
        naive_of(UNMASKED)(*operands, initial_state=state)
