"""Softmax attention (Vaswani et al., 2017; grouped queries: Ainslie et al., 2023), as a layer of a hybrid.

Parameters have the names and shapes of fla's `Attention` layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.mixers.base import LayerState, Mixer, OperatorFLOPs
from models.modules import RMSNorm, rotate
from models.projections import Projection, project
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.softmax.attention import attend_next


class SoftmaxAttention(Mixer):
    """One softmax layer: x [B, T, D] → [B, T, D].

    q, k, v   = x Wq, x Wk, x Wv, cut into H heads of queries and G of keys and values; q and k normed, if the model
                does so, by heads or before they are cut, and rotated by the tokens' positions
    o         = softmax(scale · q kᵀ) v over the tokens before, of the whole sequence, all shards
    y         = (o ⊙ sigmoid(x Wg)) Wo, or without gate o Wo
    """

    def __init__(self, config: LanguageModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        attn = config.attn
        self.state_shapes = ()
        self.shape = shape = AttnShape.of(attn, config.num_heads, config.hidden_size)
        self.window, self.rope_theta, self.rotary_dim = attn.window, attn.rope_theta, attn.rotary_dim
        self.reads_positions, self.norm_after = attn.rope_theta is not None, attn.norm_after
        width, queries, keys = config.hidden_size, shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = Projection(width, queries)
        self.k_proj = Projection(width, keys)
        self.v_proj = Projection(width, keys)
        self.o_proj = Projection(queries, width)
        self.g_proj = Projection(width, queries) if attn.gate else None
        self.all_heads = attn.qk_norm_all_heads
        widths = (queries, keys) if self.all_heads else (shape.head_dim, shape.head_dim)
        self.q_norm, self.k_norm = (
            RMSNorm(width, config.norm_eps, config.zero_centred_norms) if attn.qk_norm else None for width in widths
        )

    def forward(
        self, x: Tensor, position: SequencePosition, state_inputs: Sequence[StateInput], shared: Tensor | None
    ) -> tuple[Tensor, tuple[StateOutput, ...]]:
        """Mix this rank's tokens, see `Mixer`; returns the output and its log-sum-exp besides."""
        q, k, v, gate = self._operands(x, position.positions)
        o, state_outputs = attend_at(q, k, v, self.shape.head_dim**-0.5, position, state_inputs, self.window)
        return self._output(o, gate), state_outputs

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """One more token, see `Mixer`; reads the whole capacity of the caches."""
        q, k, v, gate = self._operands(x, positions[:, None])
        o = attend_next(q, k, v, states, positions, self.shape.head_dim**-0.5, self.window)
        return self._output(o, gate)

    def _operands(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj
        q, k, v, *gates = project(x, *(layer for layer in layers if layer is not None))
        if self.all_heads:
            q, k = self._normed(q, k)
        q, k, v = (tensor.unflatten(-1, (-1, self.shape.head_dim)) for tensor in (q, k, v))
        if not self.all_heads:
            q, k = self._normed(q, k)
        if self.rope_theta is not None:
            assert positions is not None, "the model asks for positions"
            q, k = rotate(q, k, positions, self.rope_theta, self.rotary_dim)
        return q, k, v, gates[0] if gates else None

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        o = o.flatten(-2)
        return self.o_proj(o if gate is None else o * gate.sigmoid())

    @property
    def states(self) -> tuple[LayerState, ...]:
        """Caches of keys, normed and rotated, and of values."""
        return (LayerState((self.shape.key_heads, self.window, self.shape.head_dim), is_cache=True),) * 2

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs of the pairs that queries read; the backward pass computes their scores again."""
        shape, window = self.shape, seq_len if self.window is None else min(self.window, seq_len)
        # The first queries of a window read fewer keys.
        keys = window - window * (window - 1) / (2 * seq_len)
        product = 2 * shape.heads * shape.head_dim * keys
        return OperatorFLOPs(2 * product, product)
