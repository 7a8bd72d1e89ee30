"""transformers' hybrids of Gated DeltaNet and softmax layers: OLMo Hybrid, and the text model of Qwen3.5.

`layer_types` names the kind of each layer; `num_attention_heads`, `num_key_value_heads` and `head_dim` are of softmax
layers, and `rope_parameters` has their rotation. The published models have three Gated DeltaNet layers for a softmax
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.attn import AttnConfig, AttnShape
from models.formats.format import Keys, ModelFormat, Names, Rows, is_number, not_exported
from models.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig

_LINEAR, _SOFTMAX = "linear_attention", "full_attention"
# Axes of the positions of pictures; in text all axes are equal.
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
# Keys by which older files say what `rope_parameters` does; accepted if both places agree.
_ELSEWHERE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_OTHER_LAYER = "another one than transformers' layer has"
# By the same name here, with the defaults.
_SAME = {"initializer_range": 0.02, "tie_word_embeddings": False}
_ONLY: Mapping[str, tuple[Any, str]] = {
    "attention_bias": (False, "biases in softmax layers"),
    "attention_dropout": (0.0, "dropout"),
    "attn": (None, "layers of softmax attention by fla's key"),
    "hidden_act": ("silu", "another activation"),
}


@dataclass(frozen=True)
class _Hybrid:
    # In messages.
    label: str
    # The class's defaults of `vocab_size`, `hidden_size` and `intermediate_size`.
    defaults: Mapping[str, int]
    # Fields of the model, and of `model.attn`, that the class decides, with their values.
    fixed: Mapping[str, Any]
    fixed_attn: Mapping[str, Any]
    # The class's defaults for softmax layers; None: those that other keys decide.
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    # Whether heads are rotated by the share `partial_rotary_factor`, always; else whole, unless `rope_theta` is null.
    rotates_parts: bool

    # The fields of a `GatedDeltaNetConfig`.
    def read(self, keys: Keys) -> dict[str, Any]:
        keys.only({**_ONLY, **{name: (value, _OTHER_LAYER) for name, value in self.fixed.items()}})
        same = keys.values({**self.defaults, **_SAME})
        head_dim, value_dim = (keys.value(f"linear_{name}_head_dim", int) for name in ("key", "value"))
        fields = {
            **same,
            "num_layers": keys.value("num_hidden_layers", int, 32),
            "norm_eps": keys.value("rms_norm_eps", float, 1e-6),
            "num_heads": keys.value("linear_num_key_heads", int),
            "num_v_heads": keys.value("linear_num_value_heads", int),
            "head_dim": head_dim,
            # A width below 1 is refused by the configuration.
            "expand_v": value_dim / max(1, head_dim),
            "conv_size": keys.value("linear_conv_kernel_dim", int, 4),
            "attn": self._read_attn(keys, same["hidden_size"]),
            **self.fixed,
        }
        if "allow_neg_eigval" not in self.fixed:
            fields["allow_neg_eigval"] = keys.value("linear_allow_neg_eigval", bool, True)
        return fields

    # The inverse of `read`, and `max_position_embeddings`.
    def write(self, model: GatedDeltaNetConfig, seq_len: int) -> dict[str, Any]:
        own = {} if "allow_neg_eigval" in self.fixed else {"linear_allow_neg_eigval": model.allow_neg_eigval}
        return {
            **{key: getattr(model, key) for key in (*self.defaults, *_SAME)},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "linear_conv_kernel_dim": model.conv_size,
            "linear_key_head_dim": model.head_dim,
            "linear_num_key_heads": model.num_heads,
            "linear_num_value_heads": model.heads.values,
            "linear_value_head_dim": model.heads.value_dim,
            "max_position_embeddings": seq_len,
            "rms_norm_eps": model.norm_eps,
            **self._written_attn(model),
            **own,
        }

    def _read_attn(self, keys: Keys, hidden_size: int) -> AttnConfig:
        record = keys.record
        inside = record.get("rope_parameters")
        for key in _ELSEWHERE:
            value = record.get(key)
            # Some versions of transformers write partial_rotary_factor in both places.
            if value is not None and not (isinstance(inside, Mapping) and inside.get(key) == value):
                raise keys.refusal(key, value, "not supported beside rope_parameters, which must have it")
        layers = _read_layers(keys)
        heads = keys.positive("num_attention_heads", self.num_heads)
        key_heads = keys.positive("num_key_value_heads", self.num_kv_heads, null=heads)
        width = keys.positive("head_dim", self.head_dim, null=hidden_size // heads)
        if not isinstance(inside, Mapping):
            raise keys.refusal("rope_parameters", inside, "must be a mapping with rope_theta")
        rotation = self._read_rotation(keys.inner("rope_parameters", inside), width)
        return AttnConfig(
            layers=layers, num_heads=heads, num_kv_heads=key_heads, head_dim=width, **rotation, **self.fixed_attn
        )

    # A missing value is refused: it would be another one in another version of transformers.
    def _read_rotation(self, keys: Keys, width: int) -> dict[str, Any]:
        record, in_parts = keys.record, self.rotates_parts
        keys.only_known("rope_type", "type", "rope_theta", "partial_rotary_factor", *(_OF_PICTURES if in_parts else ()))
        keys.only(dict.fromkeys(("rope_type", "type"), ("default", "another rotation")))
        theta, share = record.get("rope_theta"), record.get("partial_rotary_factor", None if in_parts else 1.0)
        if not (theta is None and "rope_theta" in record and not in_parts) and not is_number(theta, 1):
            null = "" if in_parts else ", or null for no rotation"
            raise keys.refusal("rope_theta", theta, f"must be finite and > 1{null}")
        if not is_number(share, 0) or share > 1 or (share != 1 and not in_parts):
            allowed = "must be above 0 and at most 1" if in_parts else "not supported, only 1"
            raise keys.refusal("partial_rotary_factor", share, allowed)
        rotated = None if theta is None or share == 1 else int(width * share)
        return {"rope_theta": None if theta is None else float(theta), "rotary_dim": rotated}

    def _written_attn(self, model: GatedDeltaNetConfig) -> dict[str, Any]:
        attn = model.canonical().attn
        chosen = attn.chosen(model.num_layers)
        if not 0 < len(chosen) < model.num_layers:
            raise not_exported("attn.layers", attn.layers, f"{self.label} has both kinds of layers")
        if self.rotates_parts and attn.rope_theta is None:
            raise not_exported("attn.rope_theta", None, f"{self.label} always rotates queries and keys")
        shape = AttnShape.of(attn, model.num_heads, model.hidden_size)
        rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": attn.rope_theta}
        if self.rotates_parts:
            rotated = shape.head_dim if attn.rotary_dim is None else attn.rotary_dim
            # transformers reads int(width · factor).
            share = rotated / shape.head_dim
            share = share if int(shape.head_dim * share) == rotated else math.nextafter(share, 2.0)
            rotation["partial_rotary_factor"] = share
        return {
            "layer_types": [_SOFTMAX if layer in chosen else _LINEAR for layer in range(model.num_layers)],
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_heads,
            "head_dim": shape.head_dim,
            "rope_parameters": rotation,
        }


def _read_layers(keys: Keys) -> list[int]:
    kinds = keys.record.get("layer_types")
    allowed = f"must be a list of {_LINEAR} and {_SOFTMAX}, one a layer and both among them"
    if not isinstance(kinds, list | tuple) or len(kinds) != keys.record.get("num_hidden_layers", len(kinds)):
        raise keys.refusal("layer_types", kinds, allowed)
    for kind in kinds:
        if kind not in (_LINEAR, _SOFTMAX):
            raise keys.refusal("layer_types", kind, allowed)
    chosen = [layer for layer, kind in enumerate(kinds) if kind == _SOFTMAX]
    if not 0 < len(chosen) < len(kinds):
        raise keys.refusal("layer_types", kinds, allowed)
    return chosen


# OLMo Hybrid. Its softmax layers normalise the outputs of attention and MLP, and all heads of queries, and of keys, at
# once. The norm of a Gated DeltaNet layer's output has an eps of its own in the code. Files have the names of the
# published ones, not those of the class's parameters; `save_pretrained` cuts the convolution's rows into three equal
# parts, whatever the widths of queries, keys and values are, and names a norm of softmax layers as one of the others.
_OLMO = _Hybrid(
    label="transformers' OlmoHybrid",
    defaults={"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008},
    fixed={"use_gate": True, "o_norm_eps": 1e-5, "zero_centred_norms": False},
    fixed_attn={"window": None, "qk_norm": True, "qk_norm_all_heads": True, "gate": False, "norm_after": True},
    num_heads=30,
    num_kv_heads=None,
    head_dim=None,
    rotates_parts=False,
)
_CONVOLUTIONS = ("attn.q_conv1d.weight", "attn.k_conv1d.weight", "attn.v_conv1d.weight")

OLMO_HYBRID = ModelFormat(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    library="transformers",
    mixer=GatedDeltaNet,
    title="OLMo Hybrid: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464) and softmax attention",
    read=_OLMO.read,
    write=_OLMO.write,
    names=Names(
        {
            "model.embeddings.": "model.embed_tokens.",
            ".attn_norm.": ".attention_layer_norm.",
            ".mlp_norm.": ".feedforward_layer_norm.",
            ".attn.decay.": ".linear_attn.",
            ".attn.": ".linear_attn.",
        },
        rows=(Rows(_CONVOLUTIONS, tuple(name.replace("attn.", "linear_attn.") for name in _CONVOLUTIONS)),),
    ),
    softmax_names=Names(
        {
            "model.embeddings.": "model.embed_tokens.",
            ".attn_norm.": ".post_attention_layernorm.",
            ".mlp_norm.": ".post_feedforward_layernorm.",
            ".attn.": ".self_attn.",
        }
    ),
    other_names={
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    },
)


# Qwen3.5's text model. Its norms multiply by 1 + weight, but for those of the Gated DeltaNet layers' outputs. A quarter
# of each head of queries and keys is rotated. Positions have three axes, for pictures; those of text are equal, and
# `mrope_section` decides nothing.
_QWEN = _Hybrid(
    label="transformers' Qwen3_5",
    defaults={"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288},
    fixed={"use_gate": True, "o_norm_eps": None, "allow_neg_eigval": False, "zero_centred_norms": True},
    fixed_attn={"window": None, "qk_norm": True, "qk_norm_all_heads": False, "gate": True, "norm_after": False},
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    rotates_parts=True,
)
_QWEN_PARTS = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
}

QWEN3_5 = ModelFormat(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    library="transformers",
    mixer=GatedDeltaNet,
    title="Qwen3.5: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464) and gated softmax attention",
    read=_QWEN.read,
    write=_QWEN.write,
    names=Names(
        {
            **_QWEN_PARTS,
            ".attn.decay.": ".linear_attn.",
            ".attn.g_proj.": ".linear_attn.in_proj_z.",
            ".attn.b_proj.": ".linear_attn.in_proj_b.",
            ".attn.a_proj.": ".linear_attn.in_proj_a.",
            ".attn.o_proj.": ".linear_attn.out_proj.",
            ".attn.o_norm.": ".linear_attn.norm.",
        },
        rows=(
            Rows(
                ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
                ("linear_attn.in_proj_qkv.weight",),
            ),
            Rows(_CONVOLUTIONS, ("linear_attn.conv1d.weight",)),
        ),
    ),
    softmax_names=Names(
        {**_QWEN_PARTS, ".attn.": ".self_attn."},
        rows=(Rows(("attn.q_proj.weight", "attn.g_proj.weight"), ("self_attn.q_proj.weight",), by_heads=True),),
    ),
)
