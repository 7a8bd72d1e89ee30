"""HGRN2 in fla. Its layers take the heads from `expand_ratio`, whatever `num_heads` says beside it."""

from __future__ import annotations

from typing import Any

from models.formats.fla import read_common, write_common
from models.formats.format import Keys, ModelFormat
from models.mixers.hgrn2 import HGRN2 as HGRN2Layer
from models.mixers.hgrn2 import HGRN2Config


def _read(keys: Keys) -> dict[str, Any]:
    keys.only(
        {
            "use_lower_bound": (True, "no lower bounds of the forget gates"),
            "use_short_conv": (False, "short convolutions before the operator"),
        }
    )
    common = read_common(keys)
    heads, ratio, width = keys.optional("num_heads"), keys.optional("expand_ratio", default=128), common["hidden_size"]
    if ratio is not None:
        heads = width // ratio if ratio > 0 and width % ratio == 0 else None
    if heads is None:
        raise keys.refusal("expand_ratio", ratio, "must divide hidden_size, or be null beside num_heads")
    return {**common, "num_heads": heads, "expand_ratio": ratio}


def _write(model: HGRN2Config, seq_len: int) -> dict[str, Any]:
    own = {"num_heads": model.num_heads, "expand_ratio": model.expand_ratio}
    return {**write_common(model, seq_len), **own, "use_lower_bound": True, "use_short_conv": False}


HGRN2 = ModelFormat(
    model_type="hgrn2",
    architecture="HGRN2ForCausalLM",
    library="fla",
    mixer=HGRN2Layer,
    read=_read,
    write=_write,
)
