"""Qwen3.5's text model in transformers: Gated DeltaNet and gated softmax layers, 3:1 as published.

Its norms multiply by 1 + weight, but for those of the Gated DeltaNet layers' outputs. A quarter of each head of queries
and keys is rotated. Positions have three axes, for pictures; those of text are equal, and `mrope_section` decides
nothing.
"""

from __future__ import annotations

from typing import Any

from models.formats.format import Keys, ModelFormat, Names, Rows
from models.formats.hybrids import SoftmaxLayers, read_common, write_common
from models.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig

_SOFTMAX = SoftmaxLayers(
    fixed={"window": None, "qk_norm": True, "qk_norm_all_heads": False, "gate": True, "norm_after": False},
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    always_rotates=True,
    rotates_parts=True,
)
_DEFAULTS = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
_FIXED = {"use_gate": True, "o_norm_eps": None, "allow_neg_eigval": False, "zero_centred_norms": True}
_PARTS = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
}


def _read(keys: Keys) -> dict[str, Any]:
    return read_common(keys, _SOFTMAX, _DEFAULTS, _FIXED)


def _write(model: GatedDeltaNetConfig, seq_len: int) -> dict[str, Any]:
    return write_common(model, _SOFTMAX, QWEN3_5.label, seq_len)


QWEN3_5 = ModelFormat(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    library="transformers",
    mixer=GatedDeltaNet,
    title="Qwen3.5: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464) and gated softmax attention",
    read=_read,
    write=_write,
    names=Names(
        {
            **_PARTS,
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
            Rows(
                ("attn.q_conv1d.weight", "attn.k_conv1d.weight", "attn.v_conv1d.weight"),
                ("linear_attn.conv1d.weight",),
            ),
        ),
    ),
    softmax_names=Names(
        {**_PARTS, ".attn.": ".self_attn."},
        rows=(Rows(("attn.q_proj.weight", "attn.g_proj.weight"), ("self_attn.q_proj.weight",), by_heads=True),),
    ),
)
