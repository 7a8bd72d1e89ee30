"""Gated DeltaNet in fla. Hybrids of transformers with the same mixer: `olmo_hybrid`, `qwen3_5`."""

from __future__ import annotations

from models.formats.fla import OTHER_LAYER, plain
from models.formats.format import ModelFormat, Names
from models.mixers.gated_deltanet import GatedDeltaNet

GATED_DELTANET = ModelFormat(
    model_type="gated_deltanet",
    architecture="GatedDeltaNetForCausalLM",
    library="fla",
    mixer=GatedDeltaNet,
    names=Names({".attn.decay.": ".attn."}),
    **plain(
        {
            "num_heads": 6,
            "head_dim": 256,
            "expand_v": 2.0,
            "conv_size": 4,
            "use_gate": True,
            "allow_neg_eigval": False,
        },
        optional=("num_v_heads",),
        only={
            "conv_bias": (False, "convolutions with a bias"),
            "o_norm_eps": (None, OTHER_LAYER),
            "output_gate_activation": ("swish", "another function of the output gate"),
            "use_short_conv": (True, "layers without short convolutions"),
        },
        written=("output_gate_activation", "use_short_conv"),
        layers=21,
    ),
)
