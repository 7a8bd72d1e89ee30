"""OLMo Hybrid in transformers: Gated DeltaNet and softmax layers, 3:1 in the published models.

Its softmax layers normalise the outputs of attention and MLP, and all heads of queries, and of keys, at once. The norm
of a Gated DeltaNet layer's output has an eps of its own in the code. Files have the names of the published ones, not
those of the class's parameters; `save_pretrained` cuts the convolution's rows into three equal parts, whatever the
widths of queries, keys and values are, and names a norm of softmax layers as one of the others.
"""

from __future__ import annotations

from typing import Any

from models.formats.format import Keys, ModelFormat, Names, Rows
from models.formats.hybrids import SoftmaxLayers, read_common, write_common
from models.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig

_SOFTMAX = SoftmaxLayers(
    fixed={"window": None, "qk_norm": True, "qk_norm_all_heads": True, "gate": False, "norm_after": True},
    num_heads=30,
    num_kv_heads=None,
    head_dim=None,
    always_rotates=False,
    rotates_parts=False,
)
_DEFAULTS = {"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008}
_FIXED = {"use_gate": True, "o_norm_eps": 1e-5, "zero_centred_norms": False}
_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")


def _read(keys: Keys) -> dict[str, Any]:
    common = read_common(keys, _SOFTMAX, _DEFAULTS, _FIXED)
    return {**common, "allow_neg_eigval": keys.value("linear_allow_neg_eigval", bool, True)}


def _write(model: GatedDeltaNetConfig, seq_len: int) -> dict[str, Any]:
    common = write_common(model, _SOFTMAX, OLMO_HYBRID.label, seq_len)
    return {**common, "linear_allow_neg_eigval": model.allow_neg_eigval}


OLMO_HYBRID = ModelFormat(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    library="transformers",
    mixer=GatedDeltaNet,
    title="OLMo Hybrid: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464) and softmax attention",
    read=_read,
    write=_write,
    names=Names(
        {
            "model.embeddings.": "model.embed_tokens.",
            ".attn_norm.": ".attention_layer_norm.",
            ".mlp_norm.": ".feedforward_layer_norm.",
            ".attn.decay.": ".linear_attn.",
            ".attn.": ".linear_attn.",
        },
        rows=(
            Rows(
                tuple(f"attn.{name}" for name in _CONVOLUTIONS), tuple(f"linear_attn.{name}" for name in _CONVOLUTIONS)
            ),
        ),
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
