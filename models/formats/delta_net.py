"""DeltaNet in fla."""

from __future__ import annotations

from models.formats.fla import plain
from models.formats.format import ModelFormat
from models.mixers.delta_net import DeltaNet

DELTA_NET = ModelFormat(
    model_type="delta_net",
    architecture="DeltaNetForCausalLM",
    library="fla",
    mixer=DeltaNet,
    **plain(
        {
            "num_heads": 16,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "conv_size": 4,
            "use_gate": False,
            "allow_neg_eigval": False,
        },
        only={
            "conv_bias": (False, "convolutions with a bias"),
            "qk_activation": ("silu", "another function of queries and keys"),
            "qk_norm": ("l2", "keys of another norm, with which the state may grow without bound"),
            "use_beta": (True, "a rule that writes all of each value"),
            "use_output_norm": (True, "layers without a norm"),
            "use_short_conv": (True, "layers without short convolutions"),
        },
        written=("qk_activation", "qk_norm", "use_beta", "use_output_norm", "use_short_conv"),
    ),
)
