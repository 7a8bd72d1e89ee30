"""`verify`: an exact model has a proof, and each fault of a rank is found and named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import on_ranks, run_distributed
from zeco_train.attach import AttachError, attach
from zeco_train.attach.proof import prove, verify

TOKENS = 150


def qwen(**changes: Any) -> nn.Module:
    """Qwen3-Next, linear and softmax layers, with weights that make every part of it matter."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(rows: int = 1, tokens: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (rows, tokens), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -100)
    return {"input_ids": ids, "labels": labels}


@pytest.mark.numeric
@on_ranks(2)
def test_an_exact_model_has_a_proof_and_is_left_as_it_was(rank: int, size: int) -> None:
    model = qwen(attention_dropout=0.1).bfloat16()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    attached = attach(model, dist.group.WORLD)
    for documents in (None, [[0, 1, 70, 71, 150], [0, 150]]):
        proof = verify(attached, batch_of(2), documents=documents, lengths=[97, 53])
        assert proof.is_exact, proof.problems
        assert [comparison.dtype for comparison in proof.comparisons] == ["float64", "bfloat16"]
        assert len(proof.comparisons[0].gradients) == len([*model.parameters()])
        assert max(each.error for each in proof.comparisons[0].gradients) < 1e-11
    assert len(proof.table().splitlines()) == 1 + 3 + 1
    state = model.state_dict()
    assert all(torch.equal(x, state[name]) and x.dtype == state[name].dtype for name, x in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.model.layers[1].self_attn.attention_dropout == 0.1


def drop_message(attached: Any, *, reverse: bool, number: int) -> None:
    """On rank 1 one state of a pass, the `number`-th, arrives as zeros."""
    scan, seen = attached._over.exchange.states, [0]
    launch = scan.launch

    def launched(request: Any) -> Any:
        found = launch(request)
        if request.reverse is reverse:
            seen[0] += 1
            if seen[0] % LINEAR == number:
                wait = found.wait
                found.wait = lambda: torch.zeros_like(wait())
        return found

    scan.launch = launched


def drop_forward(attached: Any) -> None:
    if attached.rank == 1:
        drop_message(attached, reverse=False, number=1)


def drop_reverse(attached: Any) -> None:
    if attached.rank == 0:
        drop_message(attached, reverse=True, number=0)


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
FAULTS: list[tuple[Callable[[Any], None], str, str]] = [
    (drop_forward, f"first wrong output: {FIRST}", "model.layers.0.linear_attn.in_proj_ba.weight"),
    (drop_reverse, f"first wrong gradient of an output: {FIRST}", "model.embed_tokens.weight"),
    (local_positions, "first wrong output: model.rotary_emb (Qwen3NextRotaryEmbedding)", "model.layers.1.self_attn.q_proj.weight"),
    (local_convolution, f"first wrong output: {FIRST}", "model.layers.0.linear_attn.conv1d.weight"),
    (local_labels, "wrong loss", "lm_head.weight"),
]


@pytest.mark.numeric
@on_ranks(2)
def test_each_fault_is_found_and_named(rank: int, size: int) -> None:
    for fault, line, parameter in FAULTS:
        attached = attach(qwen(), dist.group.WORLD)
        fault(attached)
        proof = verify(attached, batch_of())
        first = proof.problems[0]
        assert f"float64: {line}" in first, (fault.__name__, first)
        assert any(f"gradient of {parameter}" in each for each in proof.problems), (fault.__name__, proof.problems)
        attached.detach()
