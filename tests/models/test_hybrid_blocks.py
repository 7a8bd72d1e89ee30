"""Norms around zero, norms after attention and MLP, norms over all heads, heads rotated in part: against formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attn import AttnConfig
from models.mixers.gated_deltanet import GatedDeltaNetConfig
from models.mixers.gla import GLAConfig
from models.modules import RMSNorm, rotate
from models.parameters import parameter_rules
from models.spec import spec_of
from zeco_train.errors import ConfigError
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

TOKENS = 24
ATTN = AttnConfig(every=2, num_heads=4, num_kv_heads=2, qk_norm=True)
CONFIG = GLAConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=20, attn=ATTN)


def model_of(config: GLAConfig) -> Any:
    model = spec_of(config).build().double()
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def loss_and_grads(model: Any, documents: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(31, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    scan = local_exchange()
    loss = model(ids, SequencePosition((0, TOKENS), documents=documents, exchange=scan), ids)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_recomputed_blocks_know_the_documents() -> None:
    model, documents = model_of(CONFIG), [torch.tensor([0, 9, TOKENS]), torch.tensor([0, 1, TOKENS])]
    loss, wanted = loss_and_grads(model, documents)
    assert loss != loss_and_grads(model)[0]
    model.set_recompute(Recompute.full)
    again, grads = loss_and_grads(model, documents)
    assert again == loss
    assert all(torch.allclose(grads[name], grad, rtol=1e-10, atol=1e-12) for name, grad in wanted.items())


def test_zero_centred_norms_multiply_by_one_plus_their_weights() -> None:
    centred, plain = (model_of(dataclasses.replace(CONFIG, zero_centred_norms=value)) for value in (True, False))
    norms = {f"{name}.weight" for name, module in plain.named_modules() if isinstance(module, RMSNorm)}
    assert {name.rsplit(".", 2)[-2] for name in norms} == {"attn_norm", "mlp_norm", "norm", "q_norm", "k_norm"}
    plain.load_state_dict({n: x + 1 if n in norms else x for n, x in centred.state_dict().items()})
    (loss, grads), (expected, wanted) = loss_and_grads(centred), loss_and_grads(plain)
    assert abs(loss - expected) <= 1e-13 * expected
    assert all(torch.allclose(grads[name], grad, rtol=1e-10, atol=1e-12) for name, grad in wanted.items())


def test_zero_centred_norms_begin_at_zero_and_do_not_decay() -> None:
    model = spec_of(dataclasses.replace(CONFIG, zero_centred_norms=True)).build()
    model.init_weights(0)
    rules = {name: rule for name, _, rule in parameter_rules(model)}
    for name in ("model.norm.weight", "model.layers.1.attn.q_norm.weight"):
        assert not model.get_parameter(name).any()
        assert not rules[name].decays
    # In bf16 a weight of 2⁻⁹ counts, which 1 + 2⁻⁹ would lose.
    norm, x = RMSNorm(4, 1e-6, zero_centred=True).bfloat16(), torch.ones(1, 4, dtype=torch.bfloat16)
    torch.nn.init.constant_(norm.weight, 2**-9)
    assert torch.equal(norm(x, torch.float32), torch.full((1, 4), 1 + 2**-9) * (1 + 1e-6) ** -0.5)


@pytest.mark.few(quick=1)
@pytest.mark.parametrize("recompute", list(Recompute))
def test_norms_after_act_on_outputs(recompute: Recompute) -> None:
    """Against the formula, built of the block's own parts under plain autograd; recomputed ones alike."""
    config = dataclasses.replace(CONFIG, attn=dataclasses.replace(ATTN, norm_after=True))
    model = model_of(config)
    expected, wanted = loss_and_grads(model)
    before, after = model.model.blocks()
    assert (before.norm_after, after.norm_after) == (False, True)
    model.set_recompute(recompute)
    loss, grads = loss_and_grads(model)
    assert loss == expected
    assert all(torch.allclose(grads[name], grad, rtol=1e-12, atol=1e-13) for name, grad in wanted.items())
    x = torch.randn(1, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scan = local_exchange()
    place = SequencePosition((0, TOKENS), exchange=scan).on(x, with_positions=True)
    (found, *_), (mixed, _) = after(x, place), after.attn(x, place, [StateInput()] * 2, None)
    middle = x + after.attn_norm(mixed)
    assert torch.allclose(found, middle + after.mlp_norm(after.mlp(middle)), rtol=1e-13)


def test_norm_over_all_heads_and_partial_rotation() -> None:
    attn = dataclasses.replace(ATTN, qk_norm_all_heads=True, rotary_dim=2)
    layer = model_of(dataclasses.replace(CONFIG, attn=attn)).model.blocks()[1].attn
    x = torch.randn(1, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(TOKENS)
    q, k, *_ = layer._operands(x, positions)
    for found, projection, norm in ((q, layer.q_proj, layer.q_norm), (k, layer.k_proj, layer.k_norm)):
        y = projection(x)
        y = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight).unflatten(-1, (-1, 4))
        cos, sin = positions.double().cos()[:, None], positions.double().sin()[:, None]
        turned = y[..., 0] * cos - y[..., 1] * sin, y[..., 0] * sin + y[..., 1] * cos, y[..., 2], y[..., 3]
        assert torch.allclose(found, torch.stack(turned, -1), rtol=1e-12)
    both = torch.randn(1, TOKENS, 2, 6, dtype=torch.float64)
    assert torch.equal(rotate(both, both, positions, 100.0, 6)[0], rotate(both, both, positions, 100.0)[0])


@pytest.mark.parametrize(
    ("attn", "problem"),
    [
        ({"rotary_dim": 3}, "model.attn.rotary_dim=3: must be even, from 2 to the 4 channels of a head, or null"),
        ({"rotary_dim": 6}, "model.attn.rotary_dim=6: must be even, from 2 to the 4 channels of a head, or null"),
        ({"rotary_dim": 2, "rope_theta": None}, "model.attn.rotary_dim=2: needs model.attn.rope_theta"),
        ({"qk_norm": False, "qk_norm_all_heads": True}, "model.attn.qk_norm_all_heads=true: needs model.attn.qk_norm"),
    ],
)
def test_values_out_of_range(attn: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(CONFIG, attn=dataclasses.replace(ATTN, **attn))
    assert problem in caught.value.line


def test_canonical_form_drops_what_changes_nothing() -> None:
    attn = dataclasses.replace(ATTN, rotary_dim=4)
    assert dataclasses.replace(CONFIG, attn=attn).canonical() == CONFIG.canonical()
    model = GatedDeltaNetConfig(norm_eps=1e-5, o_norm_eps=1e-5, head_dim=3, expand_v=1.3333333333)
    assert model.canonical().o_norm_eps is None
    assert model.canonical().expand_v == 4 / 3
