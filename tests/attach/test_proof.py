"""`verify`: an exact model has a proof, and each fault of a rank is found and named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.attach_models import build, drop_message, hide_fla, make_batch
from tests.support.distributed import on_ranks, run_distributed
from zeco_train.attach import AttachError, attach, verify
from zeco_train.errors import ConfigError

TOKENS = 150


def qwen(**changes: Any) -> nn.Module:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    return build("qwen3_next", **{"num_hidden_layers": 3, "layer_types": layers, "num_experts": 0, **changes})


@pytest.mark.numeric
@on_ranks(2)
def test_an_exact_model_has_a_proof_and_is_left_as_it_was(rank: int, size: int) -> None:
    model = qwen(attention_dropout=0.1).bfloat16()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    attached = attach(model, dist.group.WORLD)
    for documents in (None, [[0, 1, 70, 71, 150], [0, 150]]):
        proof = verify(attached, make_batch(2, TOKENS), documents=documents, lengths=[97, 53])
        assert proof.is_exact, proof.problems
        assert [comparison.dtype for comparison in proof.comparisons] == ["float64", "bfloat16"]
        assert len(proof.comparisons[0].gradients) == len([*model.parameters()])
        assert max(each.error for each in proof.comparisons[0].gradients) < 1e-11
    assert len(proof.table().splitlines()) == 1 + 3 + 1
    state = model.state_dict()
    assert all(torch.equal(x, state[name]) and x.dtype == state[name].dtype for name, x in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.model.layers[1].self_attn.attention_dropout == 0.1


def drop_forward(attached: Any) -> None:
    """On rank 1 the first state of each pass."""
    if attached.rank == 1:
        drop_message(attached._over.exchange.states, lambda request, n: not request.reverse and n % LINEAR == 0)


def drop_reverse(attached: Any) -> None:
    if attached.rank == 0:
        drop_message(attached._over.exchange.states, lambda request, n: request.reverse and n % LINEAR == 1)


def local_positions(attached: Any) -> None:
    cut = attached.shard

    def shard(*args: Any, **kwargs: Any) -> dict[str, Any]:
        part = cut(*args, **kwargs)
        start = part["position_ids"][:, :1]
        return {**part, "position_ids": part["position_ids"] - start}

    attached.shard = shard


def local_convolution(attached: Any) -> None:
    space = vars(sys.modules[type(attached.model).__module__])
    space["causal_conv1d_fn"] = space["causal_conv1d_fn"].__wrapped__


def local_labels(attached: Any) -> None:
    cut = attached.shard

    def shard(*args: Any, **kwargs: Any) -> dict[str, Any]:
        part = cut(*args, **kwargs)
        if attached.rank == 0:
            part["shift_labels"] = part["labels"] = part["labels"].clone()
            part["labels"][:, -1] = -100
        return part

    attached.shard = shard


LINEAR = 2
FIRST = "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)"
POSITIONS = "model.rotary_emb (Qwen3NextRotaryEmbedding)"
FAULTS: list[tuple[Callable[[Any], None], str, str]] = [
    (drop_forward, f"first wrong output: {FIRST}", "model.layers.0.linear_attn.in_proj_ba.weight"),
    (drop_reverse, "wrong gradient of model.embed_tokens.weight", "model.embed_tokens.weight"),
    (local_positions, f"first wrong output: {POSITIONS}", "model.layers.1.self_attn.q_proj.weight"),
    (local_convolution, f"first wrong output: {FIRST}", "model.layers.0.linear_attn.conv1d.weight"),
    (local_labels, "wrong loss", "lm_head.weight"),
]


@pytest.mark.numeric
@on_ranks(2)
def test_each_fault_is_found_and_named(rank: int, size: int) -> None:
    for fault, line, parameter in FAULTS:
        attached = attach(qwen(), dist.group.WORLD)
        fault(attached)
        proof = verify(attached, make_batch(1, TOKENS))
        first = proof.problems[0]
        assert f"float64: {line}" in first, (fault.__name__, first)
        assert any(f"gradient of {parameter}" in each for each in proof.problems), (fault.__name__, proof.problems)
        attached.detach()


@pytest.mark.numeric
@on_ranks(4)
def test_olmo_hybrids_30_heads_over_4_ranks(rank: int, size: int) -> None:
    """Ulysses deals heads to at most 2 of 4 ranks, so `auto` takes another method."""
    hide_fla()
    heads = dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 30
    )
    changes = {"hidden_size": 60, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "head_dim": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = build("olmo_hybrid", **heads, **changes, **layers)
    proof = verify(model, make_batch(1, 70), dist.group.WORLD)
    assert proof.is_exact, proof.problems
    assert list(proof.layers.values()) == ["OlmoHybridGatedDeltaNet", "OlmoHybridAttention"]
    with pytest.raises(ConfigError, match="30"):
        verify(attach(model, attention="ulysses"), make_batch(1, 70))


@pytest.mark.numeric
@on_ranks(2)
def test_other_batches_and_models_have_proofs(rank: int, size: int) -> None:
    model = qwen().float()
    padded = make_batch(2, 40)
    padded["attention_mask"] = torch.ones(2, 40, dtype=torch.int64)
    for name, value in (("attention_mask", 0), ("labels", -100)):
        padded[name][1, 25:] = value
    attached = attach(model)
    for batch in (padded, {"input_ids": padded["input_ids"]}, make_batch(1, size)):
        assert not (problems := verify(attached, batch).problems), problems
    # While a step accumulates gradients, with checkpoints.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**attached.shard(make_batch(1, 30))).loss.backward()
    before = {name: x.grad.clone() for name, x in model.named_parameters()}
    assert verify(attached, make_batch(1, 40)).is_exact
    assert all(torch.equal(x.grad, before[name]) for name, x in model.named_parameters())
    with pytest.raises(AttachError, match="labels"):
        verify(attached, {**make_batch(1, 9), "labels": torch.full((1, 9), -100)})
    with pytest.raises(AttachError, match="group"):
        verify(qwen(), make_batch(1, 9))


def proves_on_gpus(rank: int, size: int) -> None:
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    attached = attach(qwen(**heads).bfloat16().cuda())
    batch = {name: x.cuda() for name, x in make_batch(1, 512).items()}
    for documents in (None, [0, 1, 300, 512]):
        assert not (problems := verify(attached, batch, documents=documents).problems), problems


@pytest.mark.gpu
def test_a_model_in_bf16_on_two_gpus_has_a_proof() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    run_distributed(proves_on_gpus, 2, backend="cpu:gloo,cuda:nccl")
