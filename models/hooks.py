"""What a trainer needs to know of a model besides its forward pass: sharding units, decay groups, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

from models.gla import GLAConfig, GLAForCausalLM
from zeco_train.ops import CHUNK


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
    """Floating-point operations of one token, forward and backward, a multiply-add counting as two.

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


def flops_per_token(config: GLAConfig, *, backward: bool = True) -> TokenFLOPs:
    """The model's FLOPs for one token; the sequence's length does not enter. Matrix products only.

        linear    = 2 · layers · (2·D·HK + 3·D·HV + r·(D + HK) + 3·D·I)
        operator  = layers · H · (2·KV + 2·KV + (C+1)·K + (C+1)·V)
        head      = 2 · D · vocab

    The operator's terms, for a chunk of C = 64 tokens: adding kᵀv to the state, applying q to the state, scores q kᵀ,
    and scores times v. Of the last two only the causal half is counted, (C+1)/2 pairs a token, although kernels compute
    the whole square. With `backward` all is tripled, since each product has two in the backward pass (the operator's:
    dq = do Sᵀ, dk = v dSᵀ, dv = k dS and dS itself for the states; dA, dq, dk and dv inside chunks). What is computed
    a second time (states in the backward pass, recomputed activations) is not counted: this is the numerator of model
    FLOPs utilisation. The embedding is a look-up, elementwise work and the scan over ranks count as nothing.

    Args:
        config: the model's shape.
        backward: count the backward pass as well.
    """
    width, keys, values = config.hidden_size, config.key_dim, config.value_dim
    rank, inner = config.gate_low_rank_dim, config.intermediate_size
    linear = 2 * (2 * width * keys + 3 * width * values + rank * (width + keys) + 3 * width * inner)
    key, value = config.head_k_dim, config.head_v_dim
    operator = config.num_heads * (4 * key * value + (CHUNK + 1) * (key + value))
    passes = 3 if backward else 1
    return TokenFLOPs(
        linear=float(passes * config.num_layers * linear),
        operator=float(passes * config.num_layers * operator),
        head=float(passes * 2 * width * config.vocab_size),
    )
