"""More mistakes about softmax layers."""

from __future__ import annotations

import pytest

from tests.config import test_attention_rules as gate
from tests.config.test_attention_rules import CONSTANT, HYBRID

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.attn.offset=1"], "model.attn.offset=1: needs model.attn.every"),
        ([HYBRID, "model.attn.layers=[1]"], "model.attn.layers=[1]: names layers in place of model.attn.every"),
        ([HYBRID, "model.attn.num_kv_heads=3"], "model.attn.num_kv_heads=3: must divide the 4 heads of queries"),
        ([HYBRID, "train.segments=2"], f"train.segments=2: {CONSTANT}s 1, 3"),
        (
            [HYBRID, "model.mixer=linear", "model.causal=false", "task=mlm"],
            "model.causal=false: softmax layers are causal for now, and the model has softmax attention at layers 1, 3",
        ),
        ([HYBRID, "sp.attention=rings"], "sp.attention=rings: must be one of auto, all_gather, ulysses, ring"),
        (
            [HYBRID, "sp=dp", "sp.attention=ring"],
            "sp.attention=ring: would be ignored; it needs sp=lasp1 or sp=lasp2 or sp=zeco",
        ),
    ],
)
def test_mistakes_name_field_value_and_allowed(overrides: list[str], line: str) -> None:
    gate.test_mistakes_name_field_value_and_allowed(overrides, line)
