"""Unmasked linear attention over ranks, with every backend, against attention over all pairs of tokens on one rank."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import run_distributed
from tests.support.positions import position_of
from tests.support.recurrence import naive_of
from tests.support.sp_reference import RecordedExchange, build_scans
from zeco_train.errors import ConfigError
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.unmasked import UNMASKED
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 6, 5
SCALE = 0.7
LENGTHS = (17, 9, 1, 20, 14)
NAMES = ("q", "k", "v")
# Sums of up to 61 terms near 1, each rounded by 2^-53.
TOLERANCE = 1e-13


def tensors(num_tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    widths = {"q": KEY_DIM, "k": KEY_DIM, "v": VALUE_DIM, "do": VALUE_DIM}
    shapes = {name: (BATCH, num_tokens, HEADS, width) for name, width in widths.items()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def expected(num_tokens: int) -> dict[str, Tensor]:
    """Scores of all pairs without a mask and without a softmax, and autograd."""
    values = tensors(num_tokens)
    q, k, v = (values[name].requires_grad_() for name in NAMES)
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    o = SCALE * torch.einsum("bhij,bjhv->bihv", scores, v)
    grads = torch.autograd.grad(o, (q, k, v), values["do"])
    return {"o": o.detach(), **dict(zip(NAMES, grads, strict=True))}


def of_rank(scan: RecordedExchange, start: int, stop: int, num_tokens: int) -> dict[str, Tensor]:
    """The same on the tokens [start, stop) of a rank, checked against a replay, which must not communicate forward."""
    values = tensors(num_tokens)
    results: list[dict[str, Tensor]] = []
    for replay in (False, True):
        scan.events.clear()
        leaves = [values[name][:, start:stop].clone().requires_grad_() for name in NAMES]
        incoming = results[0]["R"] if replay else None
        shard = position_of(scan, start, stop)
        o, carry_out = mix("unmasked", leaves, shard, scale=SCALE, incoming_state=incoming)
        assert carry_out is None
        state = o.grad_fn.saved_tensors[-2]  # type: ignore[union-attr]
        grads = torch.autograd.grad(o, leaves, values["do"][:, start:stop])
        assert scan.events.count("launch forward") == (not replay)
        assert scan.events.count("launch reverse") == 1
        results.append({"R": state, "o": o.detach(), **dict(zip(NAMES, grads, strict=True))})
    for what, x in results[1].items():
        assert torch.equal(x, results[0][what]), f"{what} of a replay"
    return results[0]


def suite(rank: int, world_size: int) -> None:
    scans = build_scans(tuple(range(world_size)))
    borders = [*itertools.accumulate(LENGTHS[:world_size], initial=0)]
    start, stop = borders[rank : rank + 2]
    whole = expected(borders[-1])
    for backend, scan in scans.items():
        found = of_rank(scan, start, stop, borders[-1])
        state = found.pop("R")
        states = [torch.empty_like(state) for _ in range(world_size)]
        dist.all_gather(states, state)
        assert all(torch.equal(state, other) for other in states), f"R differs between ranks: {backend}"
        for what, x in found.items():
            error = (x - whole[what][:, start:stop]).abs().max().item() / whole[what].abs().max().item()
            assert error <= TOLERANCE, f"{what} off by {error:.1e}: {backend}"
    for scan in scans.values():
        scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.campaign) for n in (1, 2, 4, 5))])
def test_unmasked_attention_equals_attention_over_all_pairs(world_size: int) -> None:
    run_distributed(suite, world_size)


def test_unmasked_outputs_of_early_tokens_depend_on_late_ones() -> None:
    values = tensors(12)
    shard = SequencePosition((0, 12), exchange=local_exchange())
    operands = [values[name].clone().requires_grad_() for name in NAMES]
    o, _ = mix("unmasked", operands, shard)
    dk, dv = torch.autograd.grad(o[:, 0].sum(), operands[1:])
    assert dk[:, -1].abs().min() > 0
    assert dv[:, -1].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unmasked_passes_sum_the_state_in_float32(dtype: torch.dtype) -> None:
    operands = [tensors(200, dtype)[name] for name in NAMES]
    wide = [x.double() for x in operands]
    forward = UNMASKED.select(operands).forward(operands, SCALE, None)
    assert (forward.state.dtype, forward.transition.dtype) == (torch.float32, torch.float32)
    o, state = naive_of(UNMASKED)(*wide, scale=SCALE)
    torch.testing.assert_close(forward.state.double(), state, rtol=1e-5, atol=1e-4)
    found = forward.outputs(forward.state)
    assert found.dtype == dtype
    # A bf16 output is rounded once, by 2^-9 of itself.
    torch.testing.assert_close(found.double(), o, rtol=2**-8 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_naive_unmasked_attention_equals_state_form() -> None:
    values = tensors(30)
    q, k, v = (values[name] for name in NAMES)
    o, state = naive_of(UNMASKED)(q, k, v)
    expected_state = torch.einsum("bjhk,bjhv->bhkv", k, v)
    torch.testing.assert_close(state, expected_state)
    torch.testing.assert_close(o, KEY_DIM**-0.5 * torch.einsum("bihk,bhkv->bihv", q, expected_state))


def test_documents_segments_and_generation_are_refused_by_name() -> None:
    values, scan = tensors(8), local_exchange()
    operands = [values[name][:1] for name in NAMES]
    state = torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    documents = SequencePosition((0, 8), documents=[torch.tensor([0, 3, 8])], exchange=scan)
    with pytest.raises(ValueError, match=r"^doc_ids: .*data\.reset_state_at_document must be off$"):
        mix("unmasked", operands, documents)
    for name, given in (("carry_in", {"carry_in": state}), ("want_carry", {"want_carry": True})):
        with pytest.raises(ValueError, match=rf"^{name}: .* whole sequence at once, not by train\.segments$"):
            mix("unmasked", operands, SequencePosition((0, 8), exchange=scan), **given)
    with pytest.raises(ConfigError, match=r"^model\.causal=false: .*generation needs model\.causal=true$"):
        OPERATORS["unmasked"].step(*(x[:, :1] for x in operands), state)
    with pytest.raises(ValueError, match=re.escape("initial_state: ")):
        naive_of(UNMASKED)(*operands, initial_state=state)


@pytest.mark.parametrize("position", [1, 2])
def test_operands_of_other_shapes_are_refused_by_name(position: int) -> None:
    operands = [tensors(8)[name] for name in NAMES]
    operands[position] = operands[position][:, :-1]
    with pytest.raises(ValueError, match=rf"^{NAMES[position]}: expected shape"):
        mix("unmasked", operands, SequencePosition((0, 8), exchange=local_exchange()))
