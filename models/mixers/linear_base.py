"""Linear attention with a feature map: what its mixers share, from the projections to the output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from models.mixers.base import Mixer, OperatorFLOPs
from models.modules import RMSNorm
from models.normaliser import COLUMNS, normalised, round_up, with_ones
from models.projections import Projection, project
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.mix import mix_at
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import StateInput, StateOutput


class HeadWidths(NamedTuple):
    """Widths of one head.

    Attributes:
        query: of queries and keys before the feature map.
        features: after it.
        key: K, with the features of zeros that a map may append for kernels.
        value: of values, without the normaliser's columns.
    """

    query: int
    features: int
    key: int
    value: int


class FeatureMapAttention(Mixer):
    """One layer: x [B, T, D] → [B, T, D]. A subclass has the feature map φ.

    q, k, v   = x Wq, x Wk, x Wv, cut into heads
    o_t       = scale · Σ_{s≤t} φ(q_t)ᵀφ(k_s) v_s             over the whole sequence, all shards
    o_t       = o_t / (scale · Σ_{s≤t} φ(q_t)ᵀφ(k_s))         with the normaliser
    y         = o Wo, or RMSNorm over a head of o, Wo

    Args:
        config: of the model.
        layer: number of the layer.
        head: widths of a head.
        scale: of the operator.
        has_normaliser: divide by the sum of the weights (`models.normaliser`).
        has_norm: norm the outputs.
    """

    can_be_unmasked = True

    def __init__(
        self, config: Any, layer: int, head: HeadWidths, *, scale: float, has_normaliser: bool, has_norm: bool
    ) -> None:
        super().__init__(config, layer)
        self.config, self.operator = config, "fixed_decay" if config.causal else "unmasked"
        self.head, self.num_heads, self.scale, self.has_normaliser = head, config.num_heads, scale, has_normaliser
        width, queries, values = config.hidden_size, self.num_heads * head.query, self.num_heads * head.value
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, queries)
        self.k_proj = Projection(width, queries)
        self.v_proj = Projection(width, values)
        self.norm = RMSNorm(head.value, config.norm_eps) if has_norm else None
        self.o_proj = Projection(values, width)

    @abstractmethod
    def map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The features of queries and keys.

        Args:
            q: queries, [B, T, H, `head.query`].
            k: keys, likewise.
            positions: [T] or [B, T] int64, of the tokens in the sequence; None if the caller does not know them.

        Returns:
            φ(q), φ(k): [B, T, H, `head.key`] in the dtype of q.
        """

    def forward(
        self, x: Tensor, position: SequencePosition, state_inputs: Sequence[StateInput], shared: Tensor | None
    ) -> tuple[Tensor, tuple[StateOutput, ...]]:
        """This rank's tokens x [B, T, D] → [B, T, D], and the states exchanged with other ranks."""
        (state_input,) = state_inputs
        operands = self._operands(x, position.positions)
        # Without a mask there is no order, and no decay.
        operands = operands if self.config.causal else operands[:3]
        o, state_output = mix_at(self.operator, operands, self.scale, position, state_input)
        return self._output(o), (state_output,)

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """One more token of each sequence: x [B, 1, D] → [B, 1, D]; updates the state [B, H, K, V] in place."""
        (state,) = states
        operands = self._operands(x, positions[:, None])
        return self._output(OPERATORS["fixed_decay"].step(*operands, state, self.scale))

    def _operands(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """φ(q), φ(k) [B, T, H, K], v [B, T, H, V] with the normaliser's columns, and log-decays [H] of zero."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in project(x, *projections))
        q, k = self.map_features(q, k, positions)
        v = with_ones(v) if self.has_normaliser else v
        return q, k, v, x.new_zeros(self.num_heads, dtype=accumulation_dtype(x.dtype))

    def _output(self, o: Tensor) -> Tensor:
        o = normalised(o, self.head.value) if self.has_normaliser else o
        o = o if self.norm is None else self.norm(o)
        return self.o_proj(o.flatten(-2))

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """H, K, V of the state, with the normaliser's columns and features of zeros."""
        value = round_up(self.head.value + 1, COLUMNS) if self.has_normaliser else self.head.value
        return ((self.num_heads, self.head.key, value),)

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs of the operator, without columns and features of zeros; independent of the sequence length."""
        shape = self.num_heads, self.head.features, self.head.value + self.has_normaliser
        operator = OPERATORS[self.operator]
        return OperatorFLOPs(operator.forward_flops(*shape), operator.recomputed_flops(*shape))
