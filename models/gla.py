"""The gated linear attention language model (Yang et al., 2023, arXiv 2312.06635).

Names and shapes of its parameters equal those of `fla.models.GLAForCausalLM` 0.6.0 (with fused norms, no short
convolution, no attention layers), so a checkpoint maps one to one, in both directions (`zeco_train.hf`). fla's
configuration cannot express a `gate_low_rank_dim` or `gate_logit_normalizer` other than 16.

There is no positional embedding: order enters through the decays alone, so a model has no longest sequence and a
shard needs no positions. Where documents are packed (`shard.cu_seqlens`), only the state of the recurrence restarts at
each of them; everything else in the model acts on one token at a time.

The model knows nothing of ranks: all that crosses them lies in `zeco_train.ops.mix`, through the shard's scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.gla_config import GLAConfig
from models.modules import GatedRMSNorm, RMSNorm, swiglu
from models.projections import parallel_linear, unread_linear
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.loss import TokenLosses, TokenScores, linear_cross_entropy, linear_token_scores, token_losses
from zeco_train.ops.mix import mix_at
from zeco_train.ops.recompute import Recompute, recomputed
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import Boundary, Crossing, Place, SequenceShard
from zeco_train.ops.segments import LayerStates

_NO_STATES = Boundary()


class GatedLinearAttention(nn.Module):
    """One GLA layer: x [B, T, D] → [B, T, D].

    q, k, v   = x Wq, x Wk, x Wv, cut into heads
    g         = log σ(x W1 W2 + b) / gate_logit_normalizer        the log-decay, ≤ 0
    o         = GLA(q, k, v, g)                                   over the whole sequence, all shards
    y         = (RMSNorm over a head of o ⊙ swish(x Wg)) Wo

    As configured, a feature map on q and k, a lower bound of g, heads that share k, v and g, and no output gate.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        width, (queries, keys, values, gates) = config.hidden_size, config.projection_widths
        self.head_k_dim, self.head_v_dim = config.head_k_dim, config.head_v_dim
        self.gate_logit_normalizer, self.clamp_min = config.gate_logit_normalizer, config.clamp_min
        self.num_kv_groups, self.feature_map = config.num_kv_groups, config.feature_map
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        if gates:
            self.g_proj = nn.Linear(width, gates, bias=False)
        self.gk_proj = nn.Sequential(
            nn.Linear(width, config.gate_low_rank_dim, bias=False),
            nn.Linear(config.gate_low_rank_dim, keys, bias=True),
        )
        self.o_proj = nn.Linear(config.value_dim, width, bias=False)
        if gates:
            self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, config.norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, config.norm_eps)

    def forward(self, x: Tensor, place: Place, boundary: Boundary) -> tuple[Tensor, Crossing]:
        q, k, v, g, gate = self._operands(x)
        o, crossing = mix_at("gla", (q, k, v, g), self.head_k_dim**-0.5, place, boundary)
        return self._output(o, gate), crossing

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One more token of each sequence: x [B, 1, D] → [B, 1, D]; `state` [B, H, K, V] goes on in place."""
        q, k, v, g, gate = self._operands(x)
        return self._output(OPERATORS["gla"].step(q, k, v, g, state), gate)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, g [B, T, H, K] and v, gate [B, T, H, V]."""
        down, up = (cast(nn.Linear, projection) for projection in self.gk_proj)
        gates = (self.g_proj,) if hasattr(self, "g_proj") else ()
        projections = self.q_proj, self.k_proj, self.v_proj, *gates, down
        q, k, v, *gate, low_rank = parallel_linear(x, *(projection.weight for projection in projections))
        q, k = (tensor.unflatten(-1, (-1, self.head_k_dim)) for tensor in (q, k))
        v, *gate = (tensor.unflatten(-1, (-1, self.head_v_dim)) for tensor in (v, *gate))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        # The log-decays are summed over the whole shard: rounded to bf16, their errors would add up.
        logits = up(low_rank).to(accumulation_dtype(x.dtype))
        g = (F.logsigmoid(logits) / self.gate_logit_normalizer).unflatten(-1, (-1, self.head_k_dim))
        if self.clamp_min is not None:
            g = g.clamp_min(self.clamp_min)
        if self.num_kv_groups > 1:
            k, v, g = (tensor.repeat_interleave(self.num_kv_groups, dim=-2) for tensor in (k, v, g))
        return q, k, v, g, gate[0] if gate else None

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        normed = self.g_norm(o) if gate is None else self.g_norm_swish_gate(o, gate)
        return self.o_proj(normed.flatten(-2))


class MLP(nn.Module):
    """SwiGLU: x [B, T, D] → (swish(x Wgate) ⊙ x Wup) Wdown."""

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, is_read: bool = True) -> Tensor:
        """With `is_read=False` the output is NaN, and only good for its gradients."""
        inner = swiglu(*parallel_linear(x, self.gate_proj.weight, self.up_proj.weight))
        return self.down_proj(inner) if is_read else unread_linear(inner, self.down_proj.weight)


class GLABlock(nn.Module):
    """Pre-norm residual block: h = x + attn(norm(x)), y = h + mlp(norm(h)).

    Attributes:
        recompute: what the backward pass computes again.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.recompute = Recompute.none
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = GatedLinearAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def compile_compute(self, **options: Any) -> None:
        """Compile what the block computes; hooks and recomputation stay around it."""
        self._compute = torch.compile(self._compute, fullgraph=True, **options)  # type: ignore[method-assign]

    def forward(self, x: Tensor, place: Place, boundary: Boundary = _NO_STATES) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] → y [B, T, D], and the two tensors of the layer's `Crossing`."""
        if self.recompute is Recompute.full and torch.is_grad_enabled():
            return recomputed(self._compute, x, place, boundary)
        return self._compute(x, place, boundary)

    def _compute(
        self, x: Tensor, place: Place, boundary: Boundary, is_read: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, crossing = self.attn(self.attn_norm(x), place, boundary)
        x = x + y
        if self.recompute is Recompute.selective and torch.is_grad_enabled():
            return checkpoint(self._mlp, x, use_reentrant=False, preserve_rng_state=False), *crossing
        return self._mlp(x, is_read), *crossing

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """x [B, 1, D] → y [B, 1, D]; see `GLAForCausalLM.step`."""
        return self._mlp(x + self.attn.step(self.attn_norm(x), state))

    def _mlp(self, x: Tensor, is_read: bool = True) -> Tensor:
        return x + self.mlp(self.mlp_norm(x), is_read)


class GLAModel(nn.Module):
    """Embedding, blocks and final norm: input_ids [B, T] → hidden [B, T, D]."""

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GLABlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def blocks(self) -> list[GLABlock]:
        """The layers, by their type."""
        return [layer for layer in self.layers if isinstance(layer, GLABlock)]

    def forward(self, input_ids: Tensor, shard: SequenceShard, states: LayerStates | None = None) -> Tensor:
        """See `GLAForCausalLM.forward`."""
        place = shard.place(input_ids.shape[1], input_ids.device)
        x = self.embeddings(input_ids)
        for index, layer in enumerate(self.layers):
            if states is None:
                x, *_ = layer(x, place)
            else:
                x, *crossing = layer(x, place, states.boundary(index))
                states.keep(Crossing(*crossing))
        return self.norm(x)


class LMHead(nn.Linear):
    """The head and its loss. The loss is taken inside `forward`, so that FSDP2 unshards the weight around it.

    Attributes:
        token_losses: see `zeco_train.ops.loss`; compiled, or not.
    """

    token_losses: TokenLosses = staticmethod(token_losses)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None, scores: bool = False
    ) -> Tensor | TokenScores:
        """hidden [B, T, D] → logits [B, T, vocab] in its dtype; with labels [B, T] → the summed loss, or the scores."""
        if labels is None:
            return super().forward(hidden)
        if scores:
            return linear_token_scores(hidden, self.weight, labels)
        return linear_cross_entropy(hidden, self.weight, labels, token_losses=self.token_losses)


class GLAForCausalLM(nn.Module):
    """The language model. Construct it, `init_weights(seed)`, then shard; in this order.

    On the meta device: construct under `torch.device("meta")`, `to_empty(device=...)`, `init_weights(seed)`.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GLAModel(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(
        self,
        input_ids: Tensor,
        shard: SequenceShard,
        labels: Tensor | None = None,
        states: LayerStates | None = None,
        states_only: bool = False,
        scores: bool = False,
    ) -> Tensor | TokenScores:
        """Loss, or logits, of this rank's tokens.

        Args:
            input_ids: [B, T] int64, this rank's tokens.
            shard: where they lie in the sequence. All ranks of a sequence must call together.
            labels: [B, T] int64, the *next* token of each (shifted before sharding), −100 where it does not count.
            states: of a segment of a longer sequence, what crosses its borders; the layers' part is filled in.
            states_only: leave the head out.
            scores: each token's loss and prediction in place of the sum, without gradients; needs labels.

        Returns:
            With labels the SUM of the tokens' cross-entropies, a scalar in fp32 (fp64 for fp64 parameters): the caller
            divides by the token count of the global batch. Otherwise logits [B, T, vocab] in the parameters'
            dtype; with `states_only` what the head would take, [B, T, D]; with `scores` `TokenScores` of [B, T].
        """
        hidden = self.model(input_ids, shard, states)
        return hidden if states_only else self.lm_head(hidden, labels, scores)

    @torch.no_grad()
    def step(self, input_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """The recurrent form: one more token of each sequence, at a cost that does not depend on those before it.

        Not for a model whose parameters FSDP2 has sharded: they are gathered around `forward` only.

        Args:
            input_ids: [B] int64.
            states: by layer, [B, H, K, V] after the tokens before (`zero_states`, or `LayerStates.carry_out`); they are
                moved on in place.

        Returns:
            Logits of the tokens after these, [B, vocab].
        """
        x = self.model.embeddings(input_ids[:, None])
        for layer, state in zip(self.model.blocks(), states, strict=True):
            x = layer.step(x, state)
        return self.lm_head(self.model.norm(x)).squeeze(1)

    def zero_states(self, batch_size: int, device: torch.device) -> list[Tensor]:
        """The states before a sequence, [B, H, K, V] by layer, fp32 (fp64 for an fp64 model)."""
        config = self.config
        shape = batch_size, config.num_heads, config.head_k_dim, config.head_v_dim
        # FSDP2 shows weights in the master dtype at one time and in the compute dtype at another.
        dtype = accumulation_dtype(self.model.norm.weight.dtype)
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def set_recompute(self, recompute: Recompute) -> None:
        """What the backward pass computes again, in every block."""
        for layer in self.model.blocks():
            layer.recompute = recompute

    def compile_parts(self, **options: Any) -> None:
        """Compile the blocks (once, since they are alike), the final norm and the loss, with `torch.compile`'s options.

        The model as a whole is left as it is, since FSDP2 gathers parameters between its parts.
        """
        # A block is compiled for each way in which it is run: with and without gradients, states to replay, or carries.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in self.model.blocks():
            layer.compile_compute(**options)
        self.model.norm.compile(fullgraph=True, **options)
        self.lm_head.token_losses = torch.compile(token_losses, fullgraph=True, **options)

    def tie_weights(self) -> None:
        """Make the head use the embedding's parameter, where the configuration ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter: matrices and embeddings normal(0, initializer_range), norms 1, biases 0, as fla does.

        The values are drawn whole, in fp32, from one generator on the CPU, in the order of the parameters: they depend
        on the seed and the shape only, not on device, dtype (but for rounding) or number of ranks. Must run before
        sharding: drawing into shards would make the weights depend on the number of ranks.
        """
        # `to_empty` replaces each module's parameters on their own, which unties them.
        self.tie_weights()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1)
            else:
                values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(values.normal_(0, self.config.initializer_range, generator=generator))
