"""HGRN in fla."""

from __future__ import annotations

from typing import Any

from models.formats.fla import OTHER_LAYER, read_common, write_common
from models.formats.format import ModelFormat
from models.formats.keys import Keys
from models.mixers.hgrn import HGRN as HGRNLayer
from models.mixers.hgrn import HGRNConfig


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "num_heads": (1, OTHER_LAYER),
            "use_lower_bound": (True, "no lower bounds of the forget gates"),
            "use_short_conv": (False, "short convolutions before the operator"),
        }
    )
    return {**read_common(keys), "num_heads": 1, "expand_ratio": keys.value("expand_ratio", int, 1)}


def _write(model: HGRNConfig, seq_len: int) -> dict[str, Any]:
    own = {"expand_ratio": model.expand_ratio, "use_lower_bound": True, "use_short_conv": False}
    return {**write_common(model, seq_len), **own}


HGRN = ModelFormat(
    model_type="hgrn",
    architecture="HGRNForCausalLM",
    library="fla",
    mixer=HGRNLayer,
    read=_read,
    write=_write,
)
