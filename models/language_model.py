"""The language model: embedding, blocks of a token mixer and an MLP, norm, head.

With packed documents only the mixer's state restarts at each document; the rest of the model acts on each token
separately. All communication happens in `zeco_train.ops.mix`, through the position's `Exchange`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from models.config import LanguageModelConfig
from models.initial_values import initialise
from models.mixers.base import LayerState, Mixer, Shared
from models.modules import Embedding, RMSNorm, swiglu
from models.parameters import MATRIX, ParameterRule, parameter_rules
from models.projections import Projection, project
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.layer_states import LayerStates, StateInput, StateOutput
from zeco_train.ops.loss import LossParts, TokenScores, linear_cross_entropy, linear_token_scores
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute, recomputed


class MLP(nn.Module):
    """SwiGLU: x [B, T, D] → (swish(x Wgate) ⊙ x Wup) Wdown."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, output_needed: bool = True) -> Tensor:
        inner = swiglu(*project(x, self.gate_proj, self.up_proj))
        return self.down_proj(inner, output_needed)


class Block(nn.Module):
    """Pre-norm residual block: h = x + attn(norm(x)), y = h + mlp(norm(h)). Without an MLP y = h.

    If the mixer asks for it, with norms after instead: h = x + norm(attn(x)), y = h + norm(mlp(h)).

    Attributes:
        attn: the mixer.
        recompute: what the backward pass recomputes.
        num_states: what the mixer keeps between tokens (`Mixer.states`).
        wide_residual: whether x, h and y are fp32 even if the block computes in bf16.
    """

    def __init__(self, config: LanguageModelConfig, mixer: type[Mixer], layer: int) -> None:
        super().__init__()
        self.recompute = Recompute.none
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centred_norms)
        self.attn = mixer(config, layer)
        self.norm_after = self.attn.norm_after
        self.num_states = len(self.attn.states)
        self.wide_residual = config.has_wide_residual
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centred_norms)
            self.mlp = MLP(config)

    def compile_compute(self, **options: Any) -> None:
        """Compile the block's compute; hooks and recomputation stay outside of the compiled region."""
        self._compute = torch.compile(self._compute, fullgraph=True, **options)  # type: ignore[method-assign]

    def forward(
        self,
        x: Tensor,
        position: SequencePosition,
        state_inputs: Sequence[StateInput] = (),
        shared: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Map x [B, T, D] → y [B, T, D], then the tensors of each state's `StateOutput`."""
        state_inputs = state_inputs or (StateInput(),) * self.num_states
        if self.recompute is Recompute.full and torch.is_grad_enabled():
            return recomputed(self._compute, x, position, state_inputs, shared)
        return self._compute(x, position, state_inputs, shared)

    def _compute(
        self,
        x: Tensor,
        position: SequencePosition,
        state_inputs: Sequence[StateInput],
        shared: Tensor | None,
        output_needed: bool = True,
    ) -> tuple[Tensor, ...]:
        y, state_outputs = self.attn(self._before(self.attn_norm, x), position, state_inputs, shared)
        x = x + self._after(self.attn_norm, y)
        states = [tensor for state_output in state_outputs for tensor in state_output]
        if self.has_mlp and self.recompute is Recompute.selective and torch.is_grad_enabled():
            # `output_needed` is False only where a whole block is recomputed, which this mode does not do.
            return checkpoint(self._mlp, x, use_reentrant=False, preserve_rng_state=False), *states
        return self._mlp(x, output_needed), *states

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """One more token of each sequence: x [B, 1, D] → y [B, 1, D]."""
        y = self.attn.step(self._before(self.attn_norm, x), states, positions, shared)
        return self._mlp(x + self._after(self.attn_norm, y))

    def _mlp(self, x: Tensor, output_needed: bool = True) -> Tensor:
        if not self.has_mlp:
            return x
        # A norm after the MLP reads its output for the gradients, too.
        y = self.mlp(self._before(self.mlp_norm, x), output_needed or self.norm_after)
        return x + self._after(self.mlp_norm, y)

    # The residual stream as mixer and MLP read it, in the compute dtype.
    def _before(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if self.norm_after:
            return x.to(norm.weight.dtype) if self.wide_residual else x
        return norm(x, norm.weight.dtype if self.wide_residual else None)

    def _after(self, norm: RMSNorm, y: Tensor) -> Tensor:
        return norm(y) if self.norm_after else y


class Backbone(nn.Module):
    """Embedding, blocks and final norm: input_ids [B, T] → hidden [B, T, D]."""

    def __init__(self, config: LanguageModelConfig, mixers: Sequence[type[Mixer]]) -> None:
        super().__init__()
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mixer, layer) for layer, mixer in enumerate(mixers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centred_norms)
        self.wide_residual = config.has_wide_residual
        self._shared: dict[str, Shared] = {}
        for mixer in mixers:
            if (shared := mixer.shared) is not None and shared.name not in self._shared:
                self._shared[shared.name] = shared
                self.register_parameter(shared.name, Parameter(torch.zeros(shared.shape(config))))

    def blocks(self) -> list[Block]:
        return [cast(Block, layer) for layer in self.layers]

    def forward(self, input_ids: Tensor, position: SequencePosition, states: LayerStates | None = None) -> Tensor:
        """Map input_ids [B, T] → hidden [B, T, D]."""
        with_positions = any(layer.attn.reads_positions for layer in self.blocks())
        position = position.on(input_ids, with_positions=with_positions)
        x, first = self._embedded(input_ids), 0
        for layer, part in zip(self.blocks(), self.shared_parts(), strict=True):
            state_inputs = () if states is None else states.state_inputs(first, layer.num_states)
            x, *state_outputs = layer(x, position, state_inputs, part)
            if states is not None:
                for received, carry_out in zip(state_outputs[::2], state_outputs[1::2], strict=True):
                    states.keep(StateOutput(received, carry_out))
            first += layer.num_states
        return self._normed(x)

    def step(self, input_ids: Tensor, states: Sequence[Tensor], positions: Tensor) -> Tensor:
        """The next token of each sequence: input_ids [B] → hidden [B, D]."""
        x, remaining = self._embedded(input_ids[:, None]), iter(states)
        for layer, part in zip(self.blocks(), self.shared_parts(), strict=True):
            x = layer.step(x, list(itertools.islice(remaining, layer.num_states)), positions, part)
        return self._normed(x).squeeze(1)

    def _embedded(self, input_ids: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        return x.to(accumulation_dtype(x.dtype)) if self.wide_residual else x

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm(x, self.norm.weight.dtype if self.wide_residual else None)

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {name: shared.rule for name, shared in self._shared.items()}

    def shared_parts(self) -> list[Tensor | None]:
        """Each layer's part of the shared parameter that its mixer reads, or its own wide parameters."""
        parts = dict[str, Tensor]()
        for name, whole in self._shared.items():
            parameter = self.get_parameter(name)
            parts[name] = whole.parts(parameter.to(accumulation_dtype(parameter.dtype)))
        found: list[Tensor | None] = []
        for index, mixer in enumerate(layer.attn for layer in self.blocks()):
            own = mixer.wide_parameters
            assert own is None or mixer.shared is None, "a layer gets one tensor"
            shared = None if mixer.shared is None else parts[mixer.shared.name][index]
            found.append(shared if own is None else own())
        return found


class LMHead(nn.Linear):
    """The LM head and its loss, which is computed inside `forward` so that FSDP2 unshards the weight around it."""

    loss_parts = LossParts()

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        return {"weight": MATRIX}

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None, scores: bool = False
    ) -> Tensor | TokenScores:
        """Map hidden [B, T, D] → logits [B, T, vocab] in its dtype; with labels [B, T] → the summed loss, or scores."""
        if labels is None:
            return super().forward(hidden)
        if scores:
            return linear_token_scores(hidden, self.weight, labels)
        return linear_cross_entropy(hidden, self.weight, labels, parts=self.loss_parts)


class LanguageModel(nn.Module):
    """The language model, with a mixer class for each layer.

    Order of construction: `ModelSpec.build`, on the meta device then `to_empty`, `init_weights(seed)`, sharding.
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
        position: SequencePosition,
        labels: Tensor | None = None,
        states: LayerStates | None = None,
        states_only: bool = False,
        scores: bool = False,
    ) -> Tensor | TokenScores:
        """Loss, or logits, of this rank's tokens.

        Collective: all ranks of a sequence call together.

        Args:
            input_ids: [B, T] int64.
            position: of the tokens, with an exchange.
            labels: [B, T] int64, the *next* token of each (shifted before sharding), or of a masked token the original
                one; −100 for ignored tokens.
            states: of a segment of a longer sequence; the layers' results are written into it.
            states_only: return the input of the head, [B, T, D].
            scores: return `TokenScores` of [B, T] instead of the sum, without gradients; needs labels.

        Returns:
            With labels the SUM of the tokens' cross-entropies, a scalar in fp32 (fp64 for fp64 parameters): the caller
            divides by the token count of the global batch. Otherwise logits [B, T, vocab] in the parameters' dtype.
        """
        hidden = self.model(input_ids, position, states)
        return hidden if states_only else self.lm_head(hidden, labels, scores)

    @torch.no_grad()
    def step(self, input_ids: Tensor, states: Sequence[Tensor], positions: Tensor, states_only: bool = False) -> Tensor:
        """Recurrent form: process one more token of each sequence. Only softmax layers read more for more context.

        Not for models sharded by FSDP2: their parameters are gathered around `forward` only.

        Args:
            input_ids: [B] int64.
            states: after the previous tokens (`zero_states`, or `LayerStates.carry_out`); updated in place.
            positions: [B] int64, of these tokens in their sequences.
            states_only: return the input of the head, [B, D], instead of logits of the next tokens, [B, vocab].
        """
        hidden = self.model.step(input_ids, states, positions)
        return hidden if states_only else self.lm_head(hidden)

    @property
    def states(self) -> list[LayerState]:
        """What the layers keep between tokens, layer by layer."""
        return [state for layer in self.model.blocks() for state in layer.attn.states]

    def zero_states(self, batch_size: int, device: torch.device, capacity: int | None = None) -> list[Tensor]:
        """Initial states of B sequences, layer by layer: [B, H, K, V] each, caches [B, G, tokens, D].

        `capacity` is that of the caches of softmax layers, in tokens of a sequence; needed if the model has some.
        """
        # Under FSDP2 the weight's dtype alternates between master and compute dtype; states have the same for both.
        compute = self.model.norm.weight.dtype
        wide = accumulation_dtype(compute)
        return [
            torch.zeros(batch_size, *state.shape(capacity), dtype=compute if state.is_cache else wide, device=device)
            for state in self.states
        ]

    def grown(self, states: Sequence[Tensor], capacity: int) -> list[Tensor]:
        """Copies of states, with caches of at least as much capacity as theirs."""
        copies = self.zero_states(len(states[0]), states[0].device, capacity)
        for copy, state in zip(copies, states, strict=True):
            copy[:, :, : state.shape[2]] = state
        return copies

    def cache_bytes(self, capacity: int) -> int:
        """Bytes of the caches of softmax layers, for one sequence of at most `capacity` tokens."""
        itemsize = self.model.norm.weight.dtype.itemsize
        return sum(itemsize * math.prod(state.shape(capacity)) for state in self.states if state.is_cache)

    def sharding_units(self) -> list[nn.Module | list[nn.Module]]:
        """Modules to shard as separate FSDP2 units, in forward order; the layers' wide parameters are one, a list.

        Shard the model itself last: the final norm and, if tied, the embedding with the head.
        """
        wide = [module for layer in self.model.blocks() if (module := layer.attn.wide_parameters) is not None]
        units: list[nn.Module | list[nn.Module]] = [wide] if wide else []
        units += self.model.layers
        return units if self.config.tie_word_embeddings else [self.model.embeddings, *units, self.lm_head]

    def set_recompute(self, recompute: Recompute) -> None:
        for layer in self.model.blocks():
            layer.recompute = recompute

    def compile_parts(self, **options: Any) -> None:
        """Compile the blocks (once, since they are identical), the final norm and the loss, by `torch.compile`.

        The model as a whole is not compiled, since FSDP2 gathers parameters between its parts.
        """
        # One compilation per way a block is run: with or without gradients, replayed states, carries.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in self.model.blocks():
            layer.compile_compute(**options)
        self.model.norm.compile(fullgraph=True, **options)
        self.lm_head.loss_parts = LossParts.compiled(**options)

    def tie_weights(self) -> None:
        """Make the head share the embedding's parameter if the configuration ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialise every parameter by the rule of its module.

        Random values come from one generator, in parameter order, so they depend only on the seed and the shapes. Must
        run before sharding: drawing into shards would make the weights depend on the number of ranks.
        """
        # `to_empty` replaces each module's parameters separately, which unties them.
        self.tie_weights()
        initialise(parameter_rules(self), self.config.initializer_range, seed)
