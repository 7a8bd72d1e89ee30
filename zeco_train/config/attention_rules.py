"""Rules between the softmax layers of a model and the settings of its training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from models.attn import AttnConfig
from models.config import LanguageModelConfig
from zeco_train.errors import ConfigError
from zeco_train.sp.registry import SPConfig
from zeco_train.training.connect import check_softmax

# Of section `model.attn`: they choose the layers; the others shape them.
_CHOOSING = ("every", "offset", "layers")
# Layers that a message names.
_NAMED = 4


def check_attention(model: LanguageModelConfig, sp: SPConfig, segments: int) -> None:
    """Check that nothing cuts what softmax layers read, and that their heads can be spread over `sp.size` ranks.

    Args:
        model: its shape.
        sp: settings of sequence parallelism.
        segments: `train.segments`.

    Raises:
        ConfigError: names the first setting that does not fit.
    """
    if not model.attn.chosen(model.num_layers):
        return
    where = f"the model has softmax attention at {_layers(model)}"
    if not model.causal:
        raise ConfigError("model.causal", "false", f"softmax layers are causal for now, and {where}")
    if segments > 1:
        allowed = f"must be 1: segments need layers with a state of constant size, and {where}"
        raise ConfigError("train.segments", segments, allowed)
    if sp.size > 0:
        check_softmax(sp, model, sp.size)


def needs(model: LanguageModelConfig) -> Iterator[tuple[str, str, bool]]:
    """Keys of several sections that have an effect only with softmax layers, as `needs` of one section."""
    has_softmax = bool(model.attn.chosen(model.num_layers))
    for name in ("sp.attention", *(f"model.attn.{field.name}" for field in dataclasses.fields(AttnConfig))):
        if name.rpartition(".")[2] not in _CHOOSING:
            yield name, "model.attn.every", has_softmax


def _layers(model: LanguageModelConfig) -> str:
    chosen = model.attn.chosen(model.num_layers)
    # The first ones, since a mistyped number of layers can be huge.
    named = ", ".join(map(str, itertools.islice(chosen, _NAMED)))
    return f"layer{'s' if len(chosen) > 1 else ''} {named}{', …' if len(chosen) > _NAMED else ''}"
