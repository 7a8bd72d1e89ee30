"""OLMo Hybrid (transformers' `OlmoHybridForCausalLM`): Gated DeltaNet and softmax layers, 3:1 in the published models.

Its softmax layers normalise the outputs of attention and MLP, and all heads of queries, and of keys, at once. The norm
of a Gated DeltaNet layer's output has an eps of its own in the code. Files have the names of the published ones, not
those of the class's parameters; `save_pretrained` cuts the convolution's rows into three equal parts, whatever the
widths of queries, keys and values are, and names a norm of softmax layers as one of the others.
"""

from __future__ import annotations

from models.fla import FlaFormat, Rows, SoftmaxLayers

_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")

OLMO_HYBRID = FlaFormat(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    title="OLMo Hybrid: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464) and softmax attention",
    library="transformers",
    defaults={"vocab_size": 100352, "hidden_size": 3840, "num_hidden_layers": 32},
    keys={
        "norm_eps": "rms_norm_eps",
        "num_heads": "linear_num_key_heads",
        "num_v_heads": "linear_num_value_heads",
        "head_dim": "linear_key_head_dim",
        "conv_size": "linear_conv_kernel_dim",
        "allow_neg_eigval": "linear_allow_neg_eigval",
    },
    needed={"num_heads": int, "num_v_heads": int, "head_dim": int},
    ratios={"expand_v": ("linear_value_head_dim", "head_dim")},
    computed={
        "linear_num_value_heads": lambda model: model.heads.values,
        "linear_value_head_dim": lambda model: model.heads.value_dim,
    },
    numbers={"conv_size": 4},
    optional_defaults={"intermediate_size": 11008},
    switches={"allow_neg_eigval": True},
    fixed={"use_gate": True, "o_norm_eps": 1e-5},
    refused={
        "attention_bias": (False, "biases in softmax layers"),
        "attention_dropout": (0.0, "dropout"),
        "hidden_act": ("silu", "another activation"),
    },
    written={"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
    softmax=SoftmaxLayers(
        fixed={"window": None, "qk_norm": True, "qk_norm_all_heads": True, "gate": False, "norm_after": True},
        num_heads=30,
        num_kv_heads=None,
        head_dim=None,
        always_rotates=False,
        rotates_parts=False,
        parts={
            "model.embeddings.": "model.embed_tokens.",
            ".attn_norm.": ".post_attention_layernorm.",
            ".mlp_norm.": ".post_feedforward_layernorm.",
            ".attn.": ".self_attn.",
        },
    ),
    rows=(
        Rows(
            tuple(f"attn.{name}" for name in _CONVOLUTIONS),
            tuple(f"linear_attn.{name}" for name in _CONVOLUTIONS),
        ),
    ),
    former={
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    },
    parts={
        "model.embeddings.": "model.embed_tokens.",
        ".attn_norm.": ".attention_layer_norm.",
        ".mlp_norm.": ".feedforward_layer_norm.",
        ".attn.decay.": ".linear_attn.",
        ".attn.": ".linear_attn.",
    },
)
