"""DeltaNet in fla."""

from __future__ import annotations

from typing import Any

from models.formats.fla import read_common, write_common
from models.formats.format import ModelFormat
from models.formats.keys import Keys
from models.mixers.delta_net import DeltaNet, DeltaNetConfig

_KEYS = {
    "num_heads": 16,
    "expand_k": 1.0,
    "expand_v": 1.0,
    "conv_size": 4,
    "use_gate": False,
    "allow_neg_eigval": False,
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "conv_bias": (False, "convolutions with a bias"),
            "qk_activation": ("silu", "another function of queries and keys"),
            "qk_norm": ("l2", "keys of another norm, with which the state may grow without bound"),
            "use_beta": (True, "a rule that writes all of each value"),
            "use_output_norm": (True, "layers without a norm"),
            "use_short_conv": (True, "layers without short convolutions"),
        }
    )
    return {**read_common(keys), **keys.values(_KEYS)}


def _write(model: DeltaNetConfig, seq_len: int) -> dict[str, Any]:
    return {
        **write_common(model, seq_len),
        **{key: getattr(model, key) for key in _KEYS},
        "qk_activation": "silu",
        "qk_norm": "l2",
        "use_beta": True,
        "use_output_norm": True,
        "use_short_conv": True,
    }


DELTA_NET = ModelFormat(
    model_type="delta_net",
    architecture="DeltaNetForCausalLM",
    library="fla",
    mixer=DeltaNet,
    read=_read,
    write=_write,
)
