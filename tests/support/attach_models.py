"""Models of transformers as their configuration classes make them by default, with sizes reduced, in fp64."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.support.fla_reference import use_decay_references, use_delta_references
from zeco_train.attach import attach
from zeco_train.sp.attention.method import LocalAttention

VOCABULARY = 97
IGNORED = -100


class InDouble(TorchFunctionMode):
    """Casts to fp32 that a model writes out stay in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


@dataclass(frozen=True)
class Model:
    """A class of transformers, and sizes of its configuration."""

    name: str  # of the class and its configuration, without what follows
    sizes: Mapping[str, Any] = field(default_factory=dict)
    head: str = "ForCausalLM"
    config: str = "Config"


_WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MODELS: dict[str, Model] = {
    "qwen3_next": Model(
        "Qwen3Next",
        _WIDTHS | _HEADS | _DELTA | _EXPERTS | {"num_hidden_layers": 8, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": Model("Qwen3_5", _WIDTHS | _HEADS | _DELTA | {"num_hidden_layers": 8}, config="TextConfig"),
    "qwen3_5_moe": Model(
        "Qwen3_5Moe",
        _WIDTHS | _HEADS | _DELTA | _EXPERTS | {"num_hidden_layers": 8, "shared_expert_intermediate_size": 16},
        config="TextConfig",
    ),
    "olmo_hybrid": Model("OlmoHybrid", _WIDTHS | _HEADS | _DELTA | _TOKENS | {"num_hidden_layers": 8}),
    "mamba2": Model(
        "Mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "nemotron_h": Model(
        "NemotronH",
        _WIDTHS
        | _HEADS
        | _TOKENS
        | {
            "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 12,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "bamba": Model("Bamba", _WIDTHS | _HEADS | _MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "falcon_h1": Model(
        "FalconH1", _WIDTHS | _HEADS | _MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "pad_token_id": 0}
    ),
    "zamba2": Model(
        "Zamba2",
        _WIDTHS
        | {
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "attention_head_dim": 16,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 12,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
        },
    ),
    "granite_hybrid": Model(
        "GraniteMoeHybrid",
        _WIDTHS
        | _HEADS
        | _MAMBA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "lfm2": Model(
        "Lfm2",
        _WIDTHS
        | _HEADS
        | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ),
    "kimi_linear": Model(
        "KimiLinear",
        _WIDTHS
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
            "pad_token_id": 0,
        },
    ),
    "minimax": Model(
        "MiniMax",
        _WIDTHS | _HEADS | {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16},
    ),
    "qwen3": Model("Qwen3", _WIDTHS | _HEADS | {"num_hidden_layers": 2}),
    "qwen3_window": Model(
        "Qwen3",
        _WIDTHS
        | _HEADS
        | {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt2": Model(
        "GPT2",
        # Dropout of attention is refused, that of other places would differ from one device's.
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        head="LMHeadModel",
    ),
    "gemma2": Model(
        "Gemma2",
        # Soft caps are refused.
        _WIDTHS | _HEADS | {"num_hidden_layers": 4, "sliding_window": 9, "attn_logit_softcapping": None},
    ),
}


def hide_fla() -> None:
    """Before the first import of transformers: its models then compute in PyTorch, not by fla's kernels."""
    sys.modules["fla"] = None  # type: ignore[assignment]


def build(name: str | Model, **changes: Any) -> nn.Module:
    """A model in fp64, in training mode, with weights that make all parts matter; the same at each call."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = MODELS[name] if isinstance(name, str) else name
    config = getattr(transformers, kind.name + kind.config)(**{**kind.sizes, **changes})
    config._attn_implementation = config._experts_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of buffers, which are computed when they are made
    try:
        model: nn.Module = getattr(transformers, kind.name + kind.head)(config).double().train()
    finally:
        torch.set_default_dtype(before)
    fill(model)
    return model


def checkpoint_in_double(model: Any, *, reentrant: bool) -> None:
    """Gradient checkpointing whose recomputation is in fp64: the backward pass leaves the mode of the forward pass."""

    def call(function: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            with InDouble():
                return function(*args)

        return checkpoint(run, *args, use_reentrant=reentrant)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=call)


def fill(model: nn.Module) -> None:
    """Weights from a seed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            if "A_log" in part:
                x.copy_(noise.tanh() + 0.5)
            elif "dt_bias" in part:
                x.copy_(noise.tanh() - 2)
            elif x.dim() >= 2:
                x.copy_(0.1 * noise)
            else:
                x.add_(0.1 * noise)


def padded(batch: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The batch with padding from a position on in its last row."""
    mask = torch.ones_like(batch["input_ids"])
    mask[-1, tokens:] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}


def make_batch(rows: int, length: int) -> dict[str, Tensor]:
    """Tokens and labels, of which a tenth is ignored."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, IGNORED)
    return {"input_ids": ids, "labels": labels}


class Errors(NamedTuple):
    """Of an attached model beside the same one on one device."""

    loss: float  # relative
    gradient: float  # the largest, each relative to its norm or 1e-3 of the largest gradient's, whichever is larger
    parameter: str  # whose it is


def compare(
    build: Callable[[], nn.Module],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    lengths: Sequence[int] | None = None,
    attention: str = "auto",
    prepare: Callable[[Any], None] = lambda attached: None,
) -> Errors:
    """Losses and gradients of all ranks, of batches whose forward passes come before all backward passes.

    Collective. With documents one device has each of them alone, as a batch of its own.
    """
    size = dist.get_world_size()
    with InDouble():
        alone = build()
        wanted = sum(run_alone(alone, batch, documents) for batch in batches)
        model = build()
        names = [*model.state_dict()]
        attached = attach(model, attention=attention)
        prepare(attached)
        losses = [model(**attached.shard(batch, documents, lengths)).loss for batch in batches]
        for loss in losses:
            loss.backward()
    attached.reduce_gradients()
    found = torch.stack([loss.detach() for loss in losses]).sum()
    if size > 1:
        dist.all_reduce(found)
    assert [*model.state_dict()] == names
    attached.detach()
    return errors_of(model, float(found), alone, wanted)


def errors_of(model: nn.Module, loss: float, alone: nn.Module, wanted: float) -> Errors:
    """Of the loss and the gradients of a model beside those of one on one device, which has no other gradients."""
    grads = {name: x.grad for name, x in alone.named_parameters() if x.grad is not None}
    largest = max(float(grad.norm()) for grad in grads.values())
    errors = {}
    for part, x in model.named_parameters():
        name = part.replace("g_norm_swish_gate", "g_norm")  # fla's name of the norm that is fused with its gate
        if x.grad is not None:
            grad = grads.get(name, torch.zeros_like(x))
            errors[name] = float((x.grad.to(grad) - grad).norm()) / max(float(grad.norm()), 1e-3 * largest)
    assert errors.keys() >= grads.keys(), f"no gradient: {sorted(grads.keys() - errors.keys())}"
    worst = max(errors, key=lambda name: errors[name])
    return Errors(abs(loss - wanted) / abs(wanted), errors[worst], worst)


def run_alone(model: Any, batch: Mapping[str, Tensor], documents: Sequence[Sequence[int]] | None) -> float:
    """The loss of whole rows, or of each document alone, with its gradients in the model's parameters."""
    if documents is None:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return float(loss.detach())
    parts = [(row, *ends) for row, borders in enumerate(documents) for ends in itertools.pairwise(borders)]
    count = sum(int((batch["labels"][row, start + 1 : stop] != IGNORED).sum()) for row, start, stop in parts)
    total = 0.0
    for row, start, stop in parts:
        part = {name: x[row : row + 1, start:stop] for name, x in batch.items()}
        loss = model(**part, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        total += float(loss.detach())
    return total


def drop_a_state(attached: Any) -> None:
    """On rank 1 nothing arrives in the first scans of states; without such, on no rank keys of others."""
    over = attached._over
    if attached.layers["linear"] and attached.rank != 1:
        return
    if attached.layers["linear"]:
        for scan in (over.exchange.states, over.exchange.halo):
            drop_message(scan, lambda request, number: number == 0 and not request.reverse)
    else:
        alone = over.exchange.replaced(attention=LocalAttention())
        over.for_softmax = lambda *_: alone


def drop_message(scan: Any, is_dropped: Callable[[Any, int], bool]) -> None:
    """What a scan's requests receive arrives as zeros, where so by the request and its number in this direction."""
    launch, seen = scan.launch, {False: 0, True: 0}

    def dropping(request: Any) -> Any:
        found = launch(request)
        if is_dropped(request, seen[request.reverse]):
            wait = found.wait
            found.wait = lambda: torch.zeros_like(wait())
        seen[request.reverse] += 1
        return found

    scan.launch = dropping


_FLA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    # Their fused forms are kernels.
    "fuse_norm": False,
    "fuse_cross_entropy": False,
}
_FLA_MLP = {"intermediate_size": 48, "fuse_swiglu": False}
# By the name of the class in fla, without what follows.
FLA_MODELS: dict[str, dict[str, Any]] = {
    "GLA": {**_FLA, **_FLA_MLP, "num_heads": 4, "use_short_conv": True},
    "RetNet": {**_FLA, **_FLA_MLP, "num_heads": 4},
    "HGRN": {**_FLA, **_FLA_MLP},
    "HGRN2": {**_FLA, **_FLA_MLP, "expand_ratio": 8},
    "GatedDeltaNet": {**_FLA, **_FLA_MLP, "head_dim": 8, "num_heads": 2, "num_v_heads": 4},
    "KDA": {**_FLA, **_FLA_MLP, "head_dim": 8, "num_heads": 2, "num_v_heads": 4},
    "DeltaNet": {**_FLA, **_FLA_MLP, "num_heads": 4},
    "Mamba2": {**_FLA, "head_dim": 8, "state_size": 12, "n_groups": 2, "chunk_size": 16},
}


def build_fla(name: str, **changes: Any) -> nn.Module:
    """As `build`, of fla."""
    import fla.models

    config = getattr(fla.models, f"{name}Config")(**{**FLA_MODELS[name], **changes})
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model: nn.Module = getattr(fla.models, f"{name}ForCausalLM")(config).double().train()
    finally:
        torch.set_default_dtype(before)
    fill(model)
    return model


def use_plain_fla(patch: pytest.MonkeyPatch) -> None:
    """fla's functions, norms and convolutions on kernels replaced by its plain ones, and its layers as they are."""
    forward = importlib.import_module("fla.modules").ShortConvolution.forward
    use_decay_references(patch)
    use_delta_references(patch)
    gated = importlib.import_module("fla.layers.gated_deltanet")
    patch.setattr(importlib.import_module("fla.modules").ShortConvolution, "forward", forward)
    patch.setattr(importlib.import_module("fla.modules.causal_conv1d.ops"), "causal_conv1d", gated.causal_conv1d)
    for layer, rules in {
        "gla": ("gla",),
        "hgrn": ("hgrn",),
        "hgrn2": ("gla",),
        "multiscale_retention": ("retention",),
        "delta_net": ("delta_rule",),
        "gated_deltanet": ("gated_delta_rule",),
        "kda": ("kda",),
    }.items():
        module = importlib.import_module(f"fla.layers.{layer}")
        for rule in rules:
            plain = getattr(module, f"fused_recurrent_{rule}")
            patch.setattr(module, f"chunk_{rule}", functools.partial(_with_decays, plain))
    norm = importlib.import_module("fla.modules.norm.layernorm_gated")
    patch.setattr(norm, "rmsnorm_fn", norm.rms_norm_ref)
    patch.setitem(importlib.import_module("fla.layers.mamba2").ACT2FN, "silu", F.silu)


def _with_decays(plain: Any, **options: Any) -> Any:
    # The chunked function of `gla` calls its decays g.
    if "gk" in inspect.signature(plain).parameters:
        options["gk"] = options.pop("g")
    return plain(**options)


def save(rank: int, size: int, name: str, changes: Mapping[str, Any], folder: str) -> None:
    """Store a model in fp32 as a folder of Hugging Face; by `run_distributed`, whose ranks have transformers."""
    hide_fla()
    build(name, **changes).float().save_pretrained(folder)
