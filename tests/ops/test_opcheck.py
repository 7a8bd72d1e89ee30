"""What the custom operators promise a compiler: shapes, dtypes and strides, and no aliases."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import zeco_train.ops.attend  # noqa: F401 - registers zeco::attend
from tests.support.operator_cases import NAMES, doc_ids_of, in_dtype, make, operands_of
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition, stack_borders
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

PROMISES = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


# Quick, and slow; lab/campaigns/cases/test_compile.py has GLA's with all arguments.
QUICK, SLOW = "short_conv", ("hgrn", "fixed_decay")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow if name in SLOW else pytest.mark.campaign)
        for name in NAMES
    ],
)
def test_operators_keep_their_promises(name: str) -> None:
    """Forward with a carry, documents and a linear layer beside it, and backward; of one operator by rows."""
    scan, batch = local_exchange(), 2 if name == "fixed_decay" else 1
    values = in_dtype(name, make(name, 9, B=batch), torch.bfloat16)
    doc_ids = doc_ids_of((4, 5), 0, 9)
    assert doc_ids is not None
    place = scan.handle(torch.device("cpu")), doc_ids if batch == 1 else doc_ids.repeat(batch, 1)
    operands = [x.requires_grad_(key != "log_decay") for key, x in operands_of(name, values).items()]
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((1, 9, 3), (4, 3), (4,)))
    aside = [x.detach(), weight, bias], torch.zeros(1, 9, 4, requires_grad=True)
    arguments = operands, name, 1.0, *place, None, values["carry_in"].requires_grad_(), True, *aside
    opcheck(torch.ops.zeco.mix.default, arguments, test_utils=PROMISES)
    with torch.no_grad():
        _, received, _, transition, saved, (y,) = torch.ops.zeco.mix(*arguments)
    kept = [x.detach() for x in operands], values["do"], saved, transition, received, values["dcarry_out"]
    opcheck(torch.ops.zeco.mix_backward.default, (*kept, name, 1.0, *place, True, [y, x.detach()]))


@pytest.mark.slow
def test_softmax_attention_keeps_its_promises() -> None:
    """Of three sequences with documents of their own."""
    borders = [torch.tensor(row) for row in ([0, 13], [0, 2, 3, 6, 13], [0, 1, 13])]
    place = SequencePosition((0, 13), documents=borders, exchange=local_exchange())
    leaves = [torch.randn(3, 13, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (6, 3, 3)]
    arguments = *leaves, None, None, 0.5, 1, place.handle, list(place.bounds), 0
    opcheck(torch.ops.zeco.attend.default, (*arguments, stack_borders(borders), 3), test_utils=PROMISES)
    with pytest.raises(ValueError, match=r"^borders: documents of 2 sequences, for a batch of 3$"):
        torch.ops.zeco.attend(*arguments, stack_borders(borders[:2]), None)


def test_second_derivatives_are_refused() -> None:
    operands = [torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3)]
    o, _ = mix("unmasked", operands, SequencePosition((0, 9), exchange=local_exchange()))
    (dq,) = torch.autograd.grad(o.square().sum(), operands[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        (dq.sum() + operands[0].sum()).backward()
