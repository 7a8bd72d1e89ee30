"""Softmax layers in numbers: kept activations to the byte, FLOPs that grow with length, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.attn import AttnConfig
from models.config import SOFTMAX
from models.mixer_registry import MIXERS
from models.mixers.gla import GLAConfig
from models.spec import AttentionSpec, spec_of
from tests.support.planning import case_of, kept_by_token
from zeco_train.ops.recompute import Recompute
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, no positions": {"num_kv_heads": 1, "rope_theta": None},
    "normed and gated": {"qk_norm": True, "gate": True},
    "wide window": {"head_dim": 48, "num_heads": 6, "num_kv_heads": 2, "window": 64, "qk_norm": True},
    "gated, no positions": {"gate": True, "rope_theta": None},
    "normed over all heads, a part rotated, norms after": {
        "qk_norm": True,
        "qk_norm_all_heads": True,
        "num_kv_heads": 2,
        "rotary_dim": 8,
        "norm_after": True,
    },
}


def _config(**attn: Any) -> GLAConfig:
    return GLAConfig(num_layers=1, attn=AttnConfig(**{"every": 1, **attn}))


@pytest.mark.few(quick=1)
@pytest.mark.parametrize(
    ("variant", "dtype", "compiled", "recompute"),
    [
        *((variant, Dtype.bf16, False, Recompute.none) for variant in ("plain", "wide window")),
        *(
            pytest.param(variant, Dtype.bf16, False, Recompute.none, marks=pytest.mark.campaign)
            for variant in VARIANTS
            if variant not in ("plain", "wide window")
        ),
        ("normed over all heads, a part rotated, norms after", Dtype.fp32, False, Recompute.selective),
        # Slow: compiled for each case.
        *(
            pytest.param(variant, Dtype.bf16, True, Recompute.none, marks=pytest.mark.campaign)
            for variant in ("grouped, no positions", "normed and gated")
        ),
    ],
)
def test_activations_of_softmax_are_what_autograd_keeps(
    variant: str, dtype: Dtype, compiled: bool, recompute: Recompute
) -> None:
    torch._dynamo.reset()
    config = _config(**VARIANTS[variant])
    settings = "gpu=cpu", f"train.dtype={dtype.value}", f"train.recompute={recompute.value}"
    case = case_of(config, *settings, compiled=compiled)
    # Compiled code keeps the positions in place of a table: 8 bytes per token, for all layers together.
    positions = 8 * (compiled and config.attn.rope_theta is not None)
    assert kept_by_token(config, dtype.compute, recompute, compiled) == (
        case.measured(SOFTMAX).kept.by_token + positions
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.fp32])
def test_full_recompute_keeps_input_output_and_sums(dtype: Dtype) -> None:
    config = _config(num_kv_heads=2)
    case = case_of(config, "gpu=cpu", f"train.dtype={dtype.value}", "train.recompute=full")
    kept = case.measured(SOFTMAX).kept.by_token
    assert kept == 2 * 128 * dtype.compute.itemsize + 4 * 4
    # Positions, 8 bytes per token of all layers together, are not saved by a layer: their record holds them.
    assert kept_by_token(config, dtype.compute, Recompute.full) == kept


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MIXERS)
def test_layers_of_a_hybrid_are_counted_by_kind(name: str) -> None:
    config = MIXERS[name].config_class(num_layers=6, attn=AttnConfig(every=3, num_heads=4, num_kv_heads=2, window=7))
    blocks = spec_of(config).blocks
    plain = spec_of(MIXERS[name].config_class(num_layers=4))
    assert {kind: block.count for kind, block in blocks.items()} == {name: 4, SOFTMAX: 2}
    assert blocks[SOFTMAX].attention == AttentionSpec(4, 2, 32, 7)
    assert (blocks[SOFTMAX].state_shapes, blocks[SOFTMAX].operators) == ((), [])
    assert blocks[name].attention is None
    assert spec_of(config).state_elements == plain.state_elements
    assert spec_of(config).num_parameters == sum(p.numel() for p in spec_of(config).build().parameters())


def test_flops_of_softmax_grow_with_length_up_to_the_window() -> None:
    def operator(seq_len: int, **attn: Any) -> float:
        return spec_of(_config(**attn)).flops_per_token(seq_len, backward=False).operator

    # Two products of 128 channels with the (seq_len + 1) / 2 keys that a query reads on average.
    assert operator(1000) == 4 * 128 * 1001 / 2
    assert operator(1000, head_dim=64) == 2 * operator(1000)
    pairs = sum(min(position + 1, 10) for position in range(1000))
    assert operator(1000, window=10) == pytest.approx(4 * 128 * pairs / 1000)
    assert operator(5, window=10) == operator(5)


def test_full_recompute_does_not_repeat_softmax_attention() -> None:
    spec = spec_of(_config())
    own = spec.flops_per_token(1000, backward=False).operator
    for recompute in Recompute:
        # Scores, which every backward pass computes again.
        assert spec.recomputed_flops_per_token(1000, recompute).operator == own / 2
