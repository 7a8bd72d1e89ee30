"""HGRN in fla."""

from __future__ import annotations

from models.formats.fla import OTHER_LAYER, plain
from models.formats.format import ModelFormat
from models.mixers.hgrn import HGRN as HGRNLayer

HGRN = ModelFormat(
    model_type="hgrn",
    architecture="HGRNForCausalLM",
    library="fla",
    mixer=HGRNLayer,
    **plain(
        {"expand_ratio": 1},
        only={
            "num_heads": (1, OTHER_LAYER),
            "use_lower_bound": (True, "no lower bounds of the forget gates"),
            "use_short_conv": (False, "short convolutions before the operator"),
        },
        written=("use_lower_bound", "use_short_conv"),
    ),
)
