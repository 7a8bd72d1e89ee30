"""Kimi Delta Attention in fla."""

from __future__ import annotations

from models.formats.fla import plain
from models.formats.format import ModelFormat, Names
from models.mixers.kda import KimiDeltaAttention

KDA = ModelFormat(
    model_type="kda",
    architecture="KDAForCausalLM",
    library="fla",
    mixer=KimiDeltaAttention,
    names=Names({".attn.decay.": ".attn."}),
    **plain(
        {"num_heads": 16, "head_dim": 128, "expand_v": 1.0, "conv_size": 4, "allow_neg_eigval": False},
        optional=("num_v_heads",),
        only={
            "conv_bias": (False, "convolutions with a bias"),
            "lower_bound": (None, "decays with a lower bound"),
            "safe_gate": (False, "decays with a lower bound"),
            "use_short_conv": (True, "layers without short convolutions"),
        },
        written=("lower_bound", "safe_gate", "use_short_conv"),
    ),
)
