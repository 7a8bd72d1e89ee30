"""A mixer without decays, for tests of unmasked models."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from models.mixers.base import Mixer, OperatorFLOPs
from models.mixers.gla import GLAConfig
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition


class UnmaskedMixer(Mixer):
    """Linear attention of positive features in both directions, with the shape of a GLA model; never causal.

    Patch it over GLA: `mock.patch.dict(MIXERS, gla=UnmaskedMixer)`.
    """

    config_class = GLAConfig
    can_be_unmasked = True

    def __init__(self, config: GLAConfig, layer: int) -> None:
        super().__init__(config, layer)
        width, self._config = config.hidden_size, config
        self.qkv_proj = nn.Linear(width, 2 * config.key_dim + config.value_dim, bias=False)
        self.o_proj = nn.Linear(config.value_dim, width, bias=False)

    def forward(
        self, x: Tensor, position: SequencePosition, state_inputs: Sequence[StateInput], shared: Tensor | None
    ) -> tuple[Tensor, tuple[StateOutput, ...]]:
        config, [state_input] = self._config, state_inputs
        widths = config.key_dim, config.key_dim, config.value_dim
        q, k, v = (y.unflatten(-1, (config.num_heads, -1)) for y in self.qkv_proj(x).split(widths, dim=-1))
        # Of order one over any length: the sum over all tokens is not normalised.
        o, state_output = mix_at("unmasked", (F.relu(q), F.relu(k), v), 0.1, position, state_input)
        return self.o_proj(o.flatten(-2)), (state_output,)

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        return OPERATORS["unmasked"].step(x, states)

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int], ...]:
        return ((self._config.num_heads, self._config.head_k_dim, self._config.head_v_dim),)

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        operator, [shape] = OPERATORS["unmasked"], self.state_shapes
        return OperatorFLOPs(operator.forward_flops(*shape), operator.recomputed_flops(*shape))
