"""The peer of case `model`: flash-linear-attention's (fla) model, trained as its users train it.

Their trainer, flame, wraps each block in FSDP2 with fp32 master weights and bf16 compute, takes the loss with fla's
fused linear cross-entropy, clips, and steps a fused AdamW; by default it neither compiles nor recomputes. This does the
same, on each rank alone: FSDP2 over one rank casts and communicates nothing. If there is a choice, this takes the
faster one: no host synchronisation for each step's norm, and no second cast of the weights for the backward pass.

`fla:no_optimizer` is only a forward and backward pass with bf16 weights. Labels are the tokens, which the model shifts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from models.config import LanguageModelConfig
from models.formats.format import ModelFormat
from models.formats.format_registry import formats_of
from models.parameters import ParameterRule, parameter_rules
from models.spec import spec_of
from zeco_train.bench.backends import RandomTokens
from zeco_train.bench.session import Session
from zeco_train.bench.variants import Variant
from zeco_train.config.schema import Config
from zeco_train.distributed.mesh import ProcessMesh, device_mesh
from zeco_train.distributed.parallelize import reshard
from zeco_train.errors import ConfigError
from zeco_train.hf.config_json import check_expressible, renamed
from zeco_train.training.config import Dtype
from zeco_train.training.optim.optimizer_registry import build_optimizer


@dataclass(frozen=True)
class Weights:
    """Our model's weights and reference logits, for the peer to match, on the host.

    Attributes:
        parameters: unsharded, by name.
        ids: [1, T] int64.
        logits: [1, T, vocab], our model's output for them.
    """

    parameters: dict[str, Tensor]
    ids: Tensor
    logits: Tensor


def check_peer(run: Config, session: Session) -> None:
    """Raise `ConfigError` if fla's model cannot be measured here, or cannot represent this model."""
    session.import_fla("fla.models")
    if run.train.dtype is not Dtype.bf16:
        raise ConfigError("variants", "fla", "is trained in bf16; take dtype=bf16")
    form = _format(run.model)
    if run.model.attn.chosen(run.model.num_layers):
        raise ConfigError("variants", "fla", "is measured without softmax layers: fla's need the package flash-attn")
    check_expressible(run.model, form)


class Peer:
    """fla's model with our weights, trained on each rank alone; `variant` is `fla` with its settings. Collective."""

    def __init__(self, variant: Variant, weights: Weights, run: Config, mesh: ProcessMesh) -> None:
        self.model = _build(run.model, weights.parameters, mesh.device)
        if variant.compiled:
            for index, block in enumerate(self.model.model.layers):
                self.model.model.layers[index] = torch.compile(block)
        self._grad_clip = run.optim.grad_clip
        self._optimizer: torch.optim.Optimizer | None = None
        if variant.updates:
            _shard(self.model, run, mesh)
            self._optimizer = build_optimizer(_rules(self.model, run), run.optim, run.train.dtype.compute)
        else:
            self.model.to(run.train.dtype.compute)
        self.model.train()

    def step(self, tokens: RandomTokens, number: int) -> Tensor:
        """Step of this number on a rank's own tokens; returns the mean loss, on the device."""
        total = torch.zeros((), device=tokens.session.device)
        for ids in map(tokens.own, tokens.numbers(number)):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / tokens.micro_batches
            loss.backward()
            total += loss.detach()
        if self._optimizer is not None:
            if self._grad_clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_clip)
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return total

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """[1, T] → [1, T, vocab]."""
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=None).logits
        reshard(self.model)
        return logits


def _build(config: LanguageModelConfig, parameters: dict[str, Tensor], device: torch.device) -> Any:
    import fla.models

    form = _format(config)
    peer_model = getattr(fla.models, form.architecture)
    with torch.device("meta"), warnings.catch_warnings():
        # Silence the warning that the fused loss rounds differently: fla's users train with the fused loss.
        warnings.simplefilter("ignore", UserWarning)
        settings = {**form.write(config, 2048), "num_hidden_layers": config.num_layers}
        settings |= {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}
        model = peer_model(peer_model.config_class(**settings))
    model.to_empty(device=device)
    if config.tie_word_embeddings:
        # `to_empty` replaces each module's parameters separately.
        model.lm_head.weight = model.model.embeddings.weight
    # `to_empty` leaves buffers without values, such as a rotary embedding's frequencies.
    for name, module in model.named_modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            reset: Any = getattr(module, "reset_parameters", None)
            assert reset is not None, (name, [*buffers])
            # Of a module with parameters it would set these, too.
            assert not dict(module.named_parameters()), name
            reset()
    own = dict(model.named_parameters())
    ours = {renamed(name, form.names.parts): value for name, value in parameters.items()}
    assert own.keys() == ours.keys(), own.keys() ^ ours.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(ours[name])
    return model


def _format(config: LanguageModelConfig) -> ModelFormat:
    form = next((one for one in formats_of(config) if one.library == "fla"), None)
    if form is None:
        raise ConfigError("variants", "fla", f"has no model with {config.mixer} here")
    return form


def _rules(model: nn.Module, run: Config) -> Iterator[tuple[str, nn.Parameter, ParameterRule]]:
    form = _format(run.model)
    with torch.device("meta"):
        rules = parameter_rules(spec_of(run.model).build())
        ours = {renamed(name, form.names.parts): rule for name, _, rule in rules}
    for name, parameter in model.named_parameters():
        # A compiled block adds a prefix to parameter names.
        name = name.replace("_orig_mod.", "")
        yield name, parameter, ours[name]


def _shard(model: Any, run: Config, mesh: ProcessMesh) -> None:
    # FSDP2 over this rank alone: master weights are cast in each step.
    policy = MixedPrecisionPolicy()
    if run.train.dtype is Dtype.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one = device_mesh(mesh.device.type, (mesh.world_size, 1), ("other", "own"), mesh.timeout)["own"]
    modules: list[nn.Module] = [*model.model.layers, model]
    for module in modules:
        fully_shard(module, mesh=one, mp_policy=policy, reshard_after_forward=False)
