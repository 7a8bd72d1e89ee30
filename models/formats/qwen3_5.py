"""Qwen3.5's text model (transformers' `Qwen3_5ForCausalLM`): Gated DeltaNet and gated softmax layers, 3:1 as published.

Its norms multiply by 1 + weight, but for those of the Gated DeltaNet layers' outputs. A quarter of each head of queries
and keys is rotated. Positions have three axes, for pictures; those of text are equal, and `mrope_section` decides
nothing.
"""

from __future__ import annotations

from models.fla import FlaFormat, Rows, SoftmaxLayers

_INPUTS = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight")
_CONVOLUTIONS = ("attn.q_conv1d.weight", "attn.k_conv1d.weight", "attn.v_conv1d.weight")
_NAMES = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
}

QWEN3_5 = FlaFormat(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    title="Qwen3.5: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464) and gated softmax attention",
    library="transformers",
    defaults={"vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 32},
    keys={
        "norm_eps": "rms_norm_eps",
        "num_heads": "linear_num_key_heads",
        "num_v_heads": "linear_num_value_heads",
        "head_dim": "linear_key_head_dim",
        "conv_size": "linear_conv_kernel_dim",
    },
    needed={"num_heads": int, "num_v_heads": int, "head_dim": int},
    ratios={"expand_v": ("linear_value_head_dim", "head_dim")},
    computed={
        "linear_num_value_heads": lambda model: model.heads.values,
        "linear_value_head_dim": lambda model: model.heads.value_dim,
    },
    numbers={"conv_size": 4},
    optional_defaults={"intermediate_size": 12288},
    fixed={"use_gate": True, "o_norm_eps": None, "allow_neg_eigval": False, "zero_centred_norms": True},
    refused={
        "attention_bias": (False, "biases in softmax layers"),
        "attention_dropout": (0.0, "dropout"),
        "hidden_act": ("silu", "another activation"),
    },
    written={"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
    softmax=SoftmaxLayers(
        fixed={"window": None, "qk_norm": True, "qk_norm_all_heads": False, "gate": True, "norm_after": False},
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        always_rotates=True,
        rotates_parts=True,
        parts={**_NAMES, ".attn.": ".self_attn."},
        rows=(Rows(("attn.q_proj.weight", "attn.g_proj.weight"), ("self_attn.q_proj.weight",), by_heads=True),),
    ),
    rows=(
        Rows(_INPUTS, ("linear_attn.in_proj_qkv.weight",)),
        Rows(_CONVOLUTIONS, ("linear_attn.conv1d.weight",)),
    ),
    parts={
        **_NAMES,
        ".attn.decay.": ".linear_attn.",
        ".attn.g_proj.": ".linear_attn.in_proj_z.",
        ".attn.b_proj.": ".linear_attn.in_proj_b.",
        ".attn.a_proj.": ".linear_attn.in_proj_a.",
        ".attn.o_proj.": ".linear_attn.out_proj.",
        ".attn.o_norm.": ".linear_attn.norm.",
    },
)
