"""What a trainer needs to know of a model besides its forward pass: sharding units, decay groups, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

from models.gla import GLAConfig, GLAForCausalLM
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.registry import OPERATORS


def sharding_units(model: GLAForCausalLM) -> list[nn.Module]:
    """Modules that FSDP2 should gather one at a time, in the order of the forward pass; shard the model itself last.

    The root then holds the rest: the final norm and, where they are tied, the embedding with the head: one parameter
    can lie in one unit only.
    """
    if model.config.tie_word_embeddings:
        return [*model.model.layers]
    return [model.model.embeddings, *model.model.layers, model.lm_head]


def has_weight_decay(parameter: Parameter) -> bool:
    """Matrices decay, the embedding and the head among them; norms and biases, which are vectors, do not.

    It holds for sharded parameters too: they keep their dimensions.
    """
    return parameter.ndim >= 2


@dataclass(frozen=True)
class TokenFLOPs:
    """Floating-point operations of one token, a multiply-add counting as two.

    Attributes:
        linear: the blocks' linear layers.
        operator: gated linear attention itself.
        head: the logits.
    """

    linear: float
    operator: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.operator + self.head

    def __add__(self, other: TokenFLOPs) -> TokenFLOPs:
        return TokenFLOPs(self.linear + other.linear, self.operator + other.operator, self.head + other.head)


def flops_per_token(config: GLAConfig, *, backward: bool = True) -> TokenFLOPs:
    """The model's FLOPs for one token; the sequence's length does not enter. Matrix products only.

        linear    = 2 · layers · (2·D·HK + 3·D·HV + r·(D + HK) + 3·D·I)
        operator  = layers · H · (2·KV + 2·KV + (C+1)·K + (C+1)·V)
        head      = 2 · D · vocab

    The linear layers' line is that of a model with an output gate and keys and values of their own for each head.
    The operator's terms, for a chunk of C = 64 tokens: adding kᵀv to the state, applying q to the state, scores q kᵀ,
    and scores times v. Of the last two only the causal half is counted, (C+1)/2 pairs a token, although kernels compute
    the whole square. With `backward` all is tripled, since each product has two in the backward pass (the operator's:
    dq = do Sᵀ, dk = v dSᵀ, dv = k dS and dS itself for the states; dA, dq, dk and dv inside chunks). What is computed
    a second time is not counted (`recomputed_flops_per_token` is): this is the numerator of model FLOPs utilisation,
    MFU. The embedding is a look-up, elementwise work and the scan over ranks count as nothing.

    Args:
        config: the model's shape.
        backward: count the backward pass as well.
    """
    passes = 3 if backward else 1
    layers = _layer_flops(config)
    return TokenFLOPs(
        linear=float(passes * config.num_layers * layers.linear),
        operator=float(passes * config.num_layers * layers.operator),
        head=float(passes * 2 * config.hidden_size * config.vocab_size),
    )


def recomputed_flops_per_token(config: GLAConfig, recompute: Recompute, segments: int = 1) -> TokenFLOPs:
    """The FLOPs that an optimizer step spends on computing things a second time, for one token: with the model's own
    (`flops_per_token`) they are the numerator of hardware FLOPs utilisation, HFU.

        operator's backward pass    layers · H · 2·KV               always: the chunks' states, which it computes again
                                                                    rather than keep them
        recompute=selective         layers · 2 · 2·D·I              gate and up of the MLPs; what down gives, the
                                                                    backward pass does not read
        recompute=full              blocks, forward − 2·D·I         whole blocks, but for what down gives
        segments M > 1              (M−1)/M · blocks, forward       all segments but the last go through the model once
                                                                    more, for their states; without the head

    The blocks' forward pass is that of `flops_per_token` less the head, which is never computed again: its gradients
    are taken while the logits are there. The lines add up, for each is another pass.

    Counted as there: matrix products, and of the pairs inside chunks the causal half, not the whole square. What a
    kernel's tiles compute only to mask it is no use of the hardware, and differs from implementation to implementation;
    all of it, with the sums of decays that are made as products with ones, is under 1 % of `gla_1b`'s FLOPs. The
    operator is that of GPUs: in PyTorch it makes the scores, too, a second time.

    Args:
        config: the model's shape.
        recompute: `train.recompute`.
        segments: `train.segments`, M.
    """
    forward, dims = _layer_flops(config), (config.num_heads, config.head_k_dim, config.head_v_dim)
    linear, operator = 0.0, OPERATORS["gla"].recomputed_flops(*dims)
    if recompute is Recompute.selective:
        linear += 2 * 2 * config.hidden_size * config.intermediate_size
    elif recompute is Recompute.full:
        linear += forward.linear - 2 * config.hidden_size * config.intermediate_size
        operator += forward.operator
    again = (segments - 1) / segments
    return TokenFLOPs(
        linear=config.num_layers * (linear + again * forward.linear),
        operator=config.num_layers * (operator + again * forward.operator),
        head=0.0,
    )


def _layer_flops(config: GLAConfig) -> TokenFLOPs:
    """The forward pass of one block."""
    width, (queries, keys, values, gates) = config.hidden_size, config.projection_widths
    rank, inner = config.gate_low_rank_dim, config.intermediate_size
    columns = queries + keys + values + gates + config.value_dim
    linear = 2 * (width * columns + rank * (width + keys) + 3 * width * inner)
    key, value = config.head_k_dim, config.head_v_dim
    operator = OPERATORS["gla"].forward_flops(config.num_heads, key, value)
    return TokenFLOPs(float(linear), operator, 0.0)
