"""Operators against code that is not this project's: HGRN's, GSA's, transformers' rule for Qwen3-Next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.distributed import on_ranks
from tests.support.fla_reference import use_fp64
from tests.support.operator_cases import expected, make, operands_of, sharded
from tests.support.sp_reference import build_scans
from tests.support.transformers_alone import in_transformers
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# fp32, other chunks of other sums; measured 1.6e-6.
TOLERANCE = 4e-6
# Their scale is K^-1/2.
_THEIRS = """
import sys, torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
(q, k, v, g, beta, state), do, grad = torch.load(sys.argv[1])
leaves = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
o, end = torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
found = torch.autograd.grad([o, end], leaves, [do, grad])
torch.save([o.detach(), end.detach(), *found], sys.argv[2])
"""
# Their scan of Mamba by tokens: x, dt, B and C are [B, D, T], and rounded to fp32 inside.
_THEIR_SCAN = """
import sys, torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
leaves, do = torch.load(sys.argv[1])
x, dt, A_log, B, C, D, bias = leaves = [x.requires_grad_() for x in leaves]
tensors = x.mT, dt.mT, -A_log.exp(), B.mT, C.mT
o = mamba_selective_scan(*tensors, D=D, delta_bias=bias, delta_softplus=True).mT
torch.save([o.detach(), *torch.autograd.grad(o, leaves, do)], sys.argv[2])
"""


def test_weak_and_strong_decays_of_hgrn_have_all_digits() -> None:
    """Each channel relative to its own: where decays are e^-50, dg is 1e-22 of dx."""
    values = make("hgrn", 200, H=1, K=4)
    values["g"][..., 3] = -50.0
    found, wanted = sharded("hgrn", values, [0, 200]), expected("hgrn", values)
    for key in ("o", "dx", "dg"):
        for channel in range(4):
            off = (found[key] - wanted[key])[..., channel].norm()
            assert off <= 1e-13 * wanted[key][..., channel].norm(), (key, channel)


@pytest.mark.slow
def test_hgrn_equals_fla() -> None:
    """fla's plain recurrence, in fp32: it has no other dtype."""
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    values = {key: x.float() for key, x in make("hgrn", 90, B=2).items()}
    x, g, start = values["x"].flatten(2), values["g"].flatten(2), values["carry_in"].flatten(1)
    o, end = naive_recurrent_hgrn(x, g, initial_state=start, output_final_state=True)
    shard = SequencePosition((0, 90), exchange=local_exchange())
    found, carry = mix("hgrn", [values["x"], values["g"]], shard, carry_in=values["carry_in"], want_carry=True)
    assert carry is not None
    torch.testing.assert_close(found.flatten(2), o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(carry.flatten(1), end, rtol=1e-5, atol=1e-5)


# Borders of the ranks, by their number.
EDGES = {1: (0, 70), 2: (0, 69, 70), 3: (0, 5, 6, 70), 4: (0, 33, 34, 66, 70)}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.campaign) for n in (1, 2, 4))])
@on_ranks()
def test_gated_slot_attention_and_gradients_equal_fla(rank: int, world_size: int) -> None:
    """Both passes, the softmax between them and both states, over ranks; theirs is the plain recurrence."""
    from fla.ops.gsa.naive import naive_recurrent_gsa

    bounds = EDGES[world_size]
    tokens = slice(*bounds[rank : rank + 2])
    values, generator = make("gsa", bounds[-1], B=2, H=3), torch.Generator().manual_seed(0)
    leaves = {name: values[name] for name in ("q", "k", "s", "g")}
    of_tokens, of_states = [*leaves["k"].shape[:3], 4], [*values["carry_in"].shape[:3], 4]
    leaves["v"], do, value_state, dvalues = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (of_tokens, of_tokens, of_states, of_states)
    )
    ends, states = (do, values["dcarry_out"], dvalues), (values["carry_in"], value_state)

    whole = [x.clone().requires_grad_() for x in (*leaves.values(), *states)]
    q, k, s, g, v, *before = whole
    with pytest.MonkeyPatch.context() as patch:
        use_fp64(patch)
        o, after = naive_recurrent_gsa(q, k, v, s, g, 0.7, (before[0].mT, before[1]), True)
        wanted = [o, after[0].mT, after[1], *torch.autograd.grad([o, after[0].mT, after[1]], whole, ends)]

    (scan,) = build_scans(tuple(range(world_size)), "two_shot").values()
    own = [x[:, tokens].clone().requires_grad_() for x in leaves.values()]
    own += [x.clone().requires_grad_() for x in states]
    q, k, s, g, v, *before = own
    position = SequencePosition(bounds, rank, exchange=scan)
    scores, keys = mix("gsa", [q, k, s, g], position, scale=0.7, carry_in=before[0], want_carry=True)
    operands = [scores.softmax(-1), s, v, g]
    o, values_end = mix("gla", operands, position, scale=1.0, carry_in=before[1], want_carry=True)
    outputs = [o, keys, values_end]
    found = [*outputs, *torch.autograd.grad(outputs, own, [ends[0][:, tokens], *ends[1:]])]  # type: ignore[arg-type]
    scan.drain()
    names = ("o", "keys", "values", *(f"d{name}" for name in leaves), "dkeys", "dvalues")
    for name, x, y in zip(names, found, wanted, strict=True):
        assert x is not None
        y = y if x.shape == y.shape else y[:, tokens]
        # fp64: sums of 70 tokens in another order.
        assert (x - y).norm() <= 1e-12 * max(1.0, float(y.norm())), name


# Importing transformers' model takes 8 s of CPU time.
@pytest.mark.slow
def test_rule_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """Also over simulated ranks, which their function does not know."""
    # Their heads share nothing, and their decays must not underflow.
    values = make("gated_delta", 200, "weak", G=4)
    narrow = {key: x.float() for key, x in values.items()}
    given, results = tmp_path / "given.pt", tmp_path / "results.pt"
    operands = [*operands_of("gated_delta", narrow).values(), narrow["carry_in"]]
    torch.save((operands, narrow["do"], narrow["dcarry_out"]), given)
    in_transformers(_THEIRS, str(given), str(results))
    names = ("o", "carry_out", "dq", "dk", "dv", "dg", "dbeta", "dcarry_in")
    theirs = dict(zip(names, torch.load(results), strict=True))
    ours, exact = sharded("gated_delta", narrow, [0, 30, 128, 200]), expected("gated_delta", values)
    for name, x in theirs.items():
        assert (ours[name] - x).norm() <= TOLERANCE * x.norm(), name
        assert (x - exact[name]).norm() <= TOLERANCE * exact[name].norm(), name


@pytest.mark.slow
def test_selective_scan_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """In fp64, of operands without other digits than fp32 has; over simulated ranks."""
    values = {key: x.float().double() for key, x in make("mamba1", 150, B=2, H=6, K=5).items()}
    values |= {key: torch.zeros_like(values[key]) for key in ("carry_in", "dcarry_out")}
    given, results = tmp_path / "given.pt", tmp_path / "results.pt"
    torch.save(([*operands_of("mamba1", values).values()], values["do"]), given)
    in_transformers(_THEIR_SCAN, str(given), str(results))
    ours = sharded("mamba1", values, [0, 30, 128, 150])
    names = ("o", *(f"d{name}" for name in operands_of("mamba1", values)))
    for name, theirs in zip(names, torch.load(results), strict=True):
        # Gradients of what they round are rounded.
        limit = 1e-6 if name in ("dx", "dB") else 1e-12
        assert (ours[name] - theirs).norm() <= limit * theirs.norm(), name
