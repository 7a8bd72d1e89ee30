"""Model specs: parameter shapes and counts from the meta device, parameter rules, layer patterns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from models.mixer_registry import MIXERS
from models.mixers.base import OperatorFLOPs
from models.mixers.gla import GatedLinearAttention, GLAConfig
from models.parameters import ParameterRule, parameter_rules
from models.spec import ModelSpec, spec_of
from tests.models.test_model import SMALL, tokens_and_labels, whole

pytestmark = pytest.mark.numeric


@dataclass
class _HybridConfig(GLAConfig):
    """Every second layer uses another mixer."""

    def mixer_of(self, layer: int) -> str:
        return "scaled" if layer % 2 else "gla"

    def mixer_counts(self) -> Mapping[str, int]:
        return {"gla": self.num_layers - self.num_layers // 2, "scaled": self.num_layers // 2}


class _Scaled(GatedLinearAttention):
    """GLA with a parameter of the mixer itself that has its own initialisation."""

    def __init__(self, config: GLAConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gain = nn.Parameter(torch.empty(config.num_heads))

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        def init(parameter: Tensor, deviation: float, generator: torch.Generator) -> None:
            parameter.copy_(torch.rand(parameter.shape, generator=generator))

        return {"gain": ParameterRule(init, decays=False)}

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        return OperatorFLOPs(float(seq_len), 0.0)


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> _HybridConfig:
    monkeypatch.setitem(MIXERS, "scaled", _Scaled)
    return _HybridConfig(**{**vars(SMALL), "num_layers": 5})


def test_hybrid_layers_set_counts_flops_states_and_rules(hybrid: _HybridConfig) -> None:
    """A mixer needs only an entry in the registry; counts, FLOPs, states and rules follow."""
    spec = ModelSpec(hybrid)
    model = spec.build()
    kinds = [type(layer.attn) for layer in model.model.blocks()]
    assert kinds == [GatedLinearAttention, _Scaled, GatedLinearAttention, _Scaled, GatedLinearAttention]
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert [block.count for block in spec.blocks.values()] == [3, 2]
    gla = dataclasses.replace(SMALL, num_layers=3)
    assert spec.flops_per_token(100, backward=False).operator == (
        spec_of(gla).flops_per_token(100, backward=False).operator + 2 * 100
    )
    model.init_weights(0)
    scale = dict(model.named_parameters())["model.layers.1.attn.gain"]
    assert 0 < scale.min() < scale.max() < 1
    assert not next(rule for name, _, rule in parameter_rules(model) if name.endswith("1.attn.gain")).decays
    ids, labels = tokens_and_labels(tokens=20)
    assert model(ids, whole(20), labels).isfinite()
    assert [state.shape[1:] for state in model.zero_states(2, ids.device)] == [spec.state_shape] * 5


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_belongs_to_one_unit(hybrid: _HybridConfig, tied: bool) -> None:
    spec = ModelSpec(dataclasses.replace(hybrid, tie_word_embeddings=tied))
    embedding, norm = (hybrid.vocab_size, hybrid.hidden_size), (hybrid.hidden_size,)
    layers = [14, 15, 14, 15, 14]
    assert [len(unit) for unit in spec.units] == ([*layers, 2] if tied else [1, *layers, 1, 1])
    assert [shape for shape, _ in spec.units[-1]] == ([embedding, norm] if tied else [norm])
    assert sum(math.prod(shape) for unit in spec.units for shape, _ in unit) == spec.num_parameters
    assert sum(map(len, spec.units)) == len(spec.parameter_shapes)
    assert ("lm_head.weight" in spec.parameter_shapes) is not tied


def test_parameter_without_rule_is_refused() -> None:
    model = ModelSpec(SMALL).build()
    model.model.blocks()[0].attn.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(KeyError, match="extra"):
        model.init_weights(0)


def test_counting_parameters_does_not_iterate_over_layers() -> None:
    """A mistyped number of layers is refused for its memory, so counting has to be fast for any number."""
    many = ModelSpec(dataclasses.replace(SMALL, num_layers=10**12))
    one, two = (ModelSpec(dataclasses.replace(SMALL, num_layers=layers)).num_parameters for layers in (1, 2))
    assert many.num_parameters == one + (10**12 - 1) * (two - one)


def test_spec_lists_projections_of_grouped_heads_without_gate() -> None:
    config = dataclasses.replace(SMALL, num_heads=6, num_kv_heads=2, use_output_gate=False)
    (block,) = ModelSpec(config).blocks.values()
    projections, gate, output = block.mixer_products
    assert projections == [(24, 12), (24, 4), (24, 10), (24, 5)]
    assert (gate, output) == ([(5, 4)], [(30, 24)])
    assert block.mlp_products == [[(24, 20), (24, 20)], [(20, 24)]]
    assert math.prod(block.state_shape) == 6 * 2 * 5
