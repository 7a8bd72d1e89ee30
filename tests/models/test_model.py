"""GLA model against a plain reference, in low precision and sharded; its FLOPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.mixers import base
from models.mixers.gla import GLAConfig
from models.spec import ModelSpec, spec_of
from tests.models.test_layers import SCAN, gla, reference_norm
from zeco_train.ops import CHUNK
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.position import SequencePosition

pytestmark = pytest.mark.numeric

# Odd sizes on purpose: no dimension equals another, so that a wrong transposition or reshape cannot pass.
SMALL = GLAConfig(
    vocab_size=29,
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    intermediate_size=20,
    expand_k=0.5,
    expand_v=1.25,
    gate_low_rank_dim=5,
    gate_logit_normalizer=2,
)


def whole(tokens: int) -> SequencePosition:
    """The shard of a single rank with the whole sequence."""
    return SequencePosition((0, tokens), exchange=SCAN)


def build(
    config: LanguageModelConfig = SMALL, dtype: torch.dtype = torch.float64, spread: float = 20.0
) -> LanguageModel:
    """A model whose matrices are `spread` times larger than initialised, so that every path matters."""
    model = ModelSpec(config).build().to(dtype)
    model.init_weights(0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= spread
    return model


def tokens_and_labels(batch: int = 2, tokens: int = 70) -> tuple[Tensor, Tensor]:
    ids = torch.randint(SMALL.vocab_size, (batch, tokens + 1), generator=torch.Generator().manual_seed(2))
    labels = ids[:, 1:].clone()
    labels[:, ::5] = -100
    return ids[:, :-1], labels


def reference_logits(parameters: dict[str, Tensor], config: GLAConfig, ids: Tensor) -> Tensor:
    """The whole model, [B, T] → [B, T, vocab], from a dictionary of fla's parameter names."""
    x = parameters["model.embeddings.weight"][ids]
    for i in range(config.num_layers):
        p = {name.removeprefix(f"model.layers.{i}."): value for name, value in parameters.items()}
        normed = reference_norm(x, p["attn_norm.weight"], config.norm_eps)
        x = x + gla(normed, {name.removeprefix("attn."): value for name, value in p.items()}, config, None)
        normed = reference_norm(x, p["mlp_norm.weight"], config.norm_eps)
        inner = F.silu(normed @ p["mlp.gate_proj.weight"].T) * (normed @ p["mlp.up_proj.weight"].T)
        x = x + inner @ p["mlp.down_proj.weight"].T
    head = parameters["model.embeddings.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return reference_norm(x, parameters["model.norm.weight"], config.norm_eps) @ head.T


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_equal_the_reference(tied: bool) -> None:
    config = dataclasses.replace(SMALL, tie_word_embeddings=tied)
    model = build(config)
    ids, labels = tokens_and_labels()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_logits(parameters, config, ids)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    expected_loss.backward()

    logits = model(ids, whole(ids.shape[1]))
    loss = model(ids, whole(ids.shape[1]), labels)
    (0.25 * loss).backward()
    # fp64; 70 tokens and 2 layers of reordered sums.
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=0)
    for name, parameter in model.named_parameters():
        grad = parameters[name].grad
        assert grad is not None
        assert grad.abs().max() > 1e-6, f"{name}: the reference does not exercise it"
        tolerance = 1e-10 * grad.abs().max().item()
        torch.testing.assert_close(
            parameter.grad, 0.25 * grad, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert sum(p.numel() for p in model.parameters()) == spec_of(config).num_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close_to_fp64(dtype: torch.dtype) -> None:
    model, (ids, labels) = build(spread=1.0).to(dtype), tokens_and_labels()
    loss = model(ids, whole(70), labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert model(ids, whole(70)).dtype == dtype
    wide = ModelSpec(SMALL).build().double()
    wide.load_state_dict(model.state_dict())
    expected = wide(ids, whole(70), labels)
    expected.backward()
    # Measured: at most 9 eps in fp32 (19 for a gate's bias, a sum of differences that cancel) and 2.0 in bf16, whose
    # norms, decays and states are fp32. Larger weights amplify.
    bound = 40 if dtype == torch.float32 else 4
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=4 * eps, atol=0)
    for ours, theirs in zip(model.parameters(), wide.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == dtype
        assert (ours.grad.double() - theirs.grad).norm() < bound * eps * theirs.grad.norm()


def test_decays_are_computed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def spy(
        operator: str, operands: Sequence[Tensor], scale: float, position: Any, state_input: StateInput, aside: None
    ) -> tuple[Tensor, StateOutput, None]:
        q, _, v, g = operands
        seen.extend((q.dtype, g.dtype))
        # bf16 has 8 significant bits: values that all survive it were rounded to it.
        assert (g.bfloat16() != g).any()
        assert g.max() <= 0
        return v, StateOutput(g, g), None

    monkeypatch.setattr(base, "mix_beside", spy)
    ids, _ = tokens_and_labels()
    build(dtype=torch.bfloat16)(ids, whole(70))
    assert seen == [torch.bfloat16, torch.float32] * SMALL.num_layers


def test_operator_flops_equal_counted_flops() -> None:
    """One head and one chunk, with a product for exactly the pairs of tokens that the formula counts."""
    key, value = SMALL.head_k_dim, SMALL.head_v_dim
    q, k, v, do = (torch.ones(CHUNK, size, requires_grad=True) for size in (key, key, value, value))
    state = torch.ones(key, value, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = (k.T @ v * do[0]).sum()
        for t in range(CHUNK):
            scores = q[t : t + 1] @ k[: t + 1].T
            loss = loss + ((q[t : t + 1] @ state + scores @ v[: t + 1]) * do[t]).sum()
        forward = counter.get_total_flops()
        loss.backward()
    for backward, counted in ((False, forward), (True, counter.get_total_flops())):
        expected = spec_of(SMALL).flops_per_token(70, backward=backward).operator / (SMALL.num_layers * SMALL.num_heads)
        assert counted == CHUNK * expected


@pytest.fixture
def one_rank_mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.few
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sharded_units_give_same_gradients(one_rank_mesh: Any, tied: bool, dtype: torch.dtype) -> None:
    """FSDP2 gathers and frees weights around each unit: the loss needs its whole weight, also if it is tied."""
    config = dataclasses.replace(SMALL, tie_word_embeddings=tied)
    master = torch.float64 if dtype == torch.float64 else torch.float32
    sharded, plain = build(config, master), build(config, master).to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master)
    for module in (*sharded.sharding_units(), sharded):
        fully_shard(module, mesh=one_rank_mesh, mp_policy=policy, reshard_after_forward=True)
    ids, labels = tokens_and_labels()
    for model in (sharded, plain):
        model(ids, whole(70), labels).backward()
    for (name, ours), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert ours.grad.dtype == master
        # Gathered weights lie elsewhere than a model's own, and a math library may add in another order then: some eps
        # in each product, as in `test_low_precision_stays_close_to_fp64`.
        error = (ours.grad.full_tensor() - theirs.grad.to(master)).norm() / theirs.grad.norm()
        assert error <= 8 * torch.finfo(dtype).eps, f"{name} is off by {error:.1e}"
