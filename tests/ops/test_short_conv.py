"""The short convolution's recurrence against torch's conv1d; `test_passes.py` and `test_kernels.py` have the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from tests.support.recurrence import naive_short_conv
from zeco_train.ops.position import find_doc_ids
from zeco_train.ops.short_conv import SHORT_CONV
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

CHANNELS = 5
WIDTHS = (2, 3, 4)
# Sums of at most a few hundred terms near 1, each rounded by 2^-53; measured at most 4e-15.
TOLERANCE = 1e-13
NAMES = ("x", "weight", "bias")


def tensors(batch: int, tokens: int, width: int, channels: int = CHANNELS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * tokens + width)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": random(batch, tokens, channels),
        "weight": random(channels, 1, width),
        "bias": random(channels),
        "do": random(batch, tokens, channels),
        **{name: random(batch, 1, width - 1, channels) for name in ("carry_in", "dcarry_out")},
    }


def convolution(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None = None) -> Tensor:
    """torch's own, [B, T, C], after zeros, or after the inputs `before`, [B, 1, w − 1, C]."""
    before = x.new_zeros(x.shape[0], weight.shape[2] - 1, x.shape[2]) if before is None else before[:, 0]
    joined = torch.cat([before, x], dim=1)
    return F.conv1d(joined.mT, weight, bias, groups=x.shape[2]).mT


def expected(values: dict[str, Tensor], documents: Sequence[int] | None, carry: bool) -> dict[str, Tensor]:
    """y, the last inputs and all gradients, document by document; the first one continues from the carry."""
    leaves = [values[name].clone().requires_grad_() for name in (*NAMES, "carry_in")]
    x, weight, bias, carry_in = leaves
    tokens, rows = x.shape[1], weight.shape[2] - 1
    y, last = [], x
    for start, stop in itertools.pairwise([*(documents or (0,)), tokens]):
        before = carry_in if carry and start == 0 else torch.zeros_like(carry_in)
        y.append(convolution(x[:, start:stop], weight, bias, before))
        last = torch.cat([before[:, 0], x[:, start:stop]], dim=1)[:, None, -rows:]
    pairs = [(torch.cat(y, dim=1), values["do"])] + ([(last, values["dcarry_out"])] if carry else [])
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    zero = torch.zeros_like(carry_in)
    results = {"y": outputs[0].detach(), "carry_out": last.detach()}
    gradients = zip((*NAMES, "carry_in"), found, strict=True)
    return results | {f"d{name}": zero if grad is None else grad for name, grad in gradients}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str, tolerance: float = TOLERANCE) -> None:
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape, f"{name} {list(tensor.shape)}: {where}"
        error = (tensor - wanted[name]).abs().max().item() / max(1.0, wanted[name].abs().max().item())
        assert error <= tolerance, f"{name} is off by {error:.1e}: {where}"


@pytest.mark.parametrize("width", WIDTHS)
def test_naive_recurrence_equals_conv1d(width: int) -> None:
    values = tensors(2, 11, width)
    y, state = naive_short_conv(*(values[name] for name in NAMES), initial_state=values["carry_in"])
    wanted = expected(values, None, carry=True)
    check({"y": y, "carry_out": state}, wanted, "naive")
    doc_ids = find_doc_ids(torch.tensor([0, 3, 4, 11]), 1, 11, y.device)
    values = tensors(1, 11, width)
    y, state = naive_short_conv(*(values[name] for name in NAMES), initial_state=values["carry_in"], doc_ids=doc_ids)
    check({"y": y, "carry_out": state}, expected(values, (0, 3, 4), carry=True), "naive, documents")


def test_shape_of_the_state_and_where_it_is_cut() -> None:
    operands = [torch.zeros(2, 3, 5), torch.zeros(5, 1, 4), torch.zeros(5)]
    assert SHORT_CONV.state_shape(operands) == (2, 1, 3, 5)
    assert SHORT_CONV.transition_shape(operands) == (2, 1, 3, 3)
    assert SHORT_CONV.cuts(operands)
    assert not SHORT_CONV.cuts([operands[0][:, :2], *operands[1:]])
    assert SHORT_CONV.forward_flops(1, 3, 5) == SHORT_CONV.recomputed_flops(1, 3, 5) == 0


@pytest.mark.parametrize("documents", [pytest.param(None, marks=pytest.mark.campaign), (0, 4, 5)])
def test_operator_passes_opcheck(documents: tuple[int, ...] | None) -> None:
    """Shapes, dtypes and strides that a compiler is promised, and no aliases."""
    values, scan = tensors(1, 9, 4), local_exchange()
    doc_ids = None if documents is None else find_doc_ids(torch.tensor([*documents, 9]), 1, 9, torch.device("cpu"))
    operands = [values["x"].float(), values["weight"].bfloat16(), values["bias"].float()]
    leaves = [tensor.requires_grad_() for tensor in operands]
    carry_in, place = values["carry_in"].float(), (scan.handle(torch.device("cpu")), doc_ids)
    arguments = (leaves, "short_conv", 1.0, *place, None, carry_in.requires_grad_(), True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    opcheck(torch.ops.zeco.mix.default, arguments, test_utils=tests)
    with torch.no_grad():
        _, received, _, transition, saved = torch.ops.zeco.mix(*arguments)
        kept = [x.detach() for x in operands], values["do"].float(), saved, transition, received
        dcarry_out = values["dcarry_out"].float()
        opcheck(torch.ops.zeco.mix_backward.default, (*kept, dcarry_out, "short_conv", 1.0, *place, True))
