"""More settings of config.json that are refused, by key and value: other keys of the same mechanisms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hf import test_config_json as gate
from tests.hf.test_config_json import INFINITY, LIST

pytestmark = pytest.mark.campaign
# Format, a changed key and its value, and a part of the line.
REFUSED: list[tuple[str, str, Any, str]] = [
    ("gla", "gate_low_rank_dim", 32, "another one than fla's layer has: not supported, only 16"),
    ("gla", "architectures", 5, "only GLAForCausalLM can be read"),
    ("gla", "feature_map", ["relu"], "not supported, only relu"),
    ("gla", "clamp_min", -(10**350), "must be a number from −1,048,576 to 1,048,576"),
    ("gla", "expand_k", 1e30, "must be a number from −1,048,576 to 1,048,576"),
    ("gla", "vocab_size", 10**18, "must be a whole number from −1,048,576 to 1,048,576"),
    ("retnet", "attnres_block_size", 2, "residuals over blocks of layers: not supported, only None"),
    ("retnet", "elementwise_affine", False, "norms without weights: not supported, only True"),
    ("retnet", "hidden_act", "powlu", "another activation of the MLP and the output gate: not supported, only swish"),
    ("retnet", "fuse_norm", "yes", "must be true or false"),
    ("retnet", "tie_word_embeddings", None, "must be true or false"),
    ("retnet", "norm_eps", None, "must be a number"),
    ("retnet", "hidden_ratio", 2.5, "must be a whole number"),
    ("retnet", "feature_map", "relu", "a feature map of queries and keys: not supported, only None"),
    ("retnet", "use_output_gate", False, "no output gate: not supported, only True"),
    ("retnet", "use_short_conv", True, "short convolutions before the operator: not supported, only False"),
    ("retnet", "num_heads", 7, "must divide"),
    ("retnet", "expand_v", None, "must be a number"),
    ("hgrn", "use_short_conv", True, "short convolutions before the operator: not supported, only False"),
    ("hgrn", "expand_ratio", 1.5, "must be a whole number"),
    ("hgrn", "expand_ratio", None, "must be a whole number"),
    ("hgrn2", "use_lower_bound", False, "no lower bounds of the forget gates: not supported, only True"),
    ("hgrn2", "use_short_conv", True, "short convolutions before the operator: not supported, only False"),
    ("hgrn2", "expand_ratio", 12.5, "must be a whole number"),
    ("gated_deltanet", "use_short_conv", False, "layers without short convolutions: not supported, only True"),
    ("gated_deltanet", "output_gate_activation", "sigmoid", "another function of the output gate: not supported"),
    ("delta_net", "use_beta", False, "a rule that writes all of each value: not supported, only True"),
    ("delta_net", "qk_activation", "elu", "another function of queries and keys: not supported, only silu"),
    ("kda", "safe_gate", True, "decays with a lower bound: not supported, only False"),
    ("linear_attn", "feature_map", "dpfp", "not supported, only elu, relu, identity"),
    ("linear_attn", "norm_q", True, "queries divided by their sum"),
    ("linear_attn", "norm_k", True, "keys divided by their sum"),
    ("linear_attn", "num_kv_heads", 2, "shared heads of keys and values"),
    ("linear_attn", "norm_feature_map", 1, "must be true or false"),
    ("mamba2", "hidden_act", "gelu", "another activation: not supported"),
    ("mamba2", "expand", 1.5, "must be a whole number"),
    ("mamba2", "time_step_limit", INFINITY, "must be a list of two numbers"),
    ("mamba2", "time_step_limit", [0.0, "inf"], "must be a number"),
    ("mamba2", "residual_in_fp32", 1, "must be true or false"),
    ("mamba2", "rmsnorm", False, "layers without a norm: not supported"),
    ("mamba2", "norm_before_gate", True, "a norm before the gate: not supported"),
    ("mamba2", "D_has_hdim", True, "a skip connection by channel: not supported"),
    ("olmo_hybrid", "attention_bias", True, "biases in softmax layers: not supported"),
    ("qwen3_5_text", "hidden_act", "gelu", "another activation: not supported, only silu"),
    ("qwen3_5_text", LIST, ["full_attention"] * 4, "one a layer and both among them"),
    ("olmo_hybrid", "linear_value_head_dim", -1, "model.expand_v=-0.125: must be finite and > 0"),
    ("olmo_hybrid", "num_attention_heads", 0, "must be a whole number ≥ 1"),
]


@pytest.mark.parametrize(("name", "key", "value", "problem"), REFUSED, ids=lambda value: f"{value!s:.20}")
def test_unsupported_settings_are_refused_by_name(name: str, key: str, value: Any, problem: str) -> None:
    gate.test_unsupported_settings_are_refused_by_name(name, key, value, problem)
