"""The language model: embedding, blocks of a token mixer and an MLP, norm, head. Which mixer is at which layer, the
configuration says.

Where documents are packed (`shard.cu_seqlens`), only the state of a mixer restarts at each of them; everything else in
the model acts on one token at a time.

The model knows nothing of ranks: all that crosses them lies in `zeco_train.ops.mix`, through the shard's scan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.activations import Activations, Part, TokenTensor, Traffic
from models.config import LanguageModelConfig
from models.mixers.base import Mixer
from models.modules import RMSNorm, swiglu
from models.parameters import MATRIX, ParameterRule, parameter_rules
from models.projections import parallel_linear, unread_linear
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.loss import TokenLosses, TokenScores, linear_cross_entropy, linear_token_scores, token_losses
from zeco_train.ops.recompute import Recompute, recomputed
from zeco_train.ops.seam import Boundary, Crossing, Place, SequenceShard
from zeco_train.ops.segments import LayerStates

_NO_STATES = Boundary()


class MLP(nn.Module):
    """SwiGLU: x [B, T, D] → (swish(x Wgate) ⊙ x Wup) Wdown."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, is_read: bool = True) -> Tensor:
        """With `is_read=False` the output is NaN, and only good for its gradients."""
        inner = swiglu(*parallel_linear(x, self.gate_proj.weight, self.up_proj.weight))
        return self.down_proj(inner) if is_read else unread_linear(inner, self.down_proj.weight)

    def activations(self) -> Activations:
        """Of `forward`, its input and output aside. Compiled code can write the gradients of gate and up over two
        others, and by the peaks measured on H200s (recompute=selective and full) it does: they would be 22 kB a token
        of gla_1b higher otherwise."""
        inner = self.up_proj.out_features
        return Activations(
            (TokenTensor("mlp's gate", inner), TokenTensor("mlp's up", inner), TokenTensor("their product", inner)),
            (
                TokenTensor("gradient of the product", inner),
                TokenTensor("gradient of mlp's gate", inner, compiled=False),
                TokenTensor("gradient of mlp's up", inner, compiled=False),
            ),
            (Traffic("SwiGLU", inner, 3, 6),),
        )


class Block(nn.Module):
    """Pre-norm residual block: h = x + attn(norm(x)), y = h + mlp(norm(h)).

    Args:
        config: of the model.
        mixer: the class of `attn`.

    Attributes:
        recompute: what the backward pass computes again.
    """

    def __init__(self, config: LanguageModelConfig, mixer: type[Mixer]) -> None:
        super().__init__()
        self.recompute = Recompute.none
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = mixer(config)
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
        """x [B, 1, D] → y [B, 1, D]; see `LanguageModel.step`."""
        return self._mlp(x + self.attn.step(self.attn_norm(x), state))

    def activations(self) -> Mapping[Part, Activations]:
        """The block's tensors; norms and residual sums are its own."""
        width = self.attn_norm.weight.shape[0]
        return {
            Part.input: Activations((TokenTensor("x, the block's input", width),)),
            Part.mixer: Activations(
                (
                    TokenTensor("1 / rms of x", 1, wide=True),
                    TokenTensor("x normed", width),
                    TokenTensor("x in the middle", width),
                ),
                (TokenTensor("gradient in the middle", width),),
                (Traffic("residual sum and norm before the mixer", width, 4, 5),),
            )
            + self.attn.activations(),
            Part.mlp: Activations(
                (TokenTensor("1 / rms in the middle", 1, wide=True), TokenTensor("x in the middle, normed", width)),
                (TokenTensor("gradient of the block's output", width),),
                (Traffic("residual sum and norm before the mlp", width, 4, 5),),
            )
            + self.mlp.activations(),
        }

    def _mlp(self, x: Tensor, is_read: bool = True) -> Tensor:
        return x + self.mlp(self.mlp_norm(x), is_read)


class Backbone(nn.Module):
    """Embedding, blocks and final norm: input_ids [B, T] → hidden [B, T, D]."""

    def __init__(self, config: LanguageModelConfig, mixers: Sequence[type[Mixer]]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in mixers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def blocks(self) -> list[Block]:
        """The layers, by their type."""
        return [cast(Block, layer) for layer in self.layers]

    def forward(self, input_ids: Tensor, shard: SequenceShard, states: LayerStates | None = None) -> Tensor:
        """See `LanguageModel.forward`."""
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

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """See `models.parameters`."""
        return {"weight": MATRIX}

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None, scores: bool = False
    ) -> Tensor | TokenScores:
        """hidden [B, T, D] → logits [B, T, vocab] in its dtype; with labels [B, T] → the summed loss, or the scores."""
        if labels is None:
            return super().forward(hidden)
        if scores:
            return linear_token_scores(hidden, self.weight, labels)
        return linear_cross_entropy(hidden, self.weight, labels, token_losses=self.token_losses)


class LanguageModel(nn.Module):
    """The language model. Build it (`models.spec.ModelSpec.build`), `init_weights(seed)`, then shard; in this order.

    Args:
        config: its shape.
        mixers: of each layer.

    On the meta device: construct under `torch.device("meta")`, `to_empty(device=...)`, `init_weights(seed)`.
    """

    def __init__(self, config: LanguageModelConfig, mixers: Sequence[type[Mixer]]) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, mixers)
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
        # FSDP2 shows weights in the master dtype at one time and in the compute dtype at another.
        dtype = accumulation_dtype(self.model.norm.weight.dtype)
        shapes = [layer.attn.state_shape for layer in self.model.blocks()]
        return [torch.zeros(batch_size, *shape, dtype=dtype, device=device) for shape in shapes]

    def sharding_units(self) -> list[nn.Module]:
        """What FSDP2 should gather one at a time, in the order of the forward pass; shard the model itself last.

        The root then holds the rest: the final norm and, where they are tied, the embedding with the head: one
        parameter can lie in one unit only.
        """
        if self.config.tie_word_embeddings:
            return [*self.model.layers]
        return [self.model.embeddings, *self.model.layers, self.lm_head]

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
        """Set every parameter as the rule of the module that it lies in has it.

        Random values come from one generator, in the order of the parameters: they depend on the seed and the shapes
        only. Must run before sharding: drawing into shards would make the weights depend on the number of ranks.
        """
        # `to_empty` replaces each module's parameters on their own, which unties them.
        self.tie_weights()
        generator = torch.Generator().manual_seed(seed)
        for _, parameter, rule in parameter_rules(self):
            rule.init(parameter, self.config.initializer_range, generator)
