"""Random operands of the delta rules, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

HEADS, KEY_DIM, VALUE_DIM = 4, 6, 5
RULES = ("delta", "gated_delta", "kda")
DECAYS = ("none", "weak", "mixed", "strong", "underflow")

# The operands; R; do; D_in.
Case = tuple[list[Tensor], Tensor, Tensor, Tensor]


def log_decays(decay: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    strength = torch.rand(shape, generator=generator, dtype=torch.float64)
    match decay:
        case "none":
            return torch.zeros_like(strength)
        case "weak":
            return -0.02 * strength
        case "strong":
            return -50.0 * strength
        case "underflow":  # about every third decay is 0 in fp64
            return -0.1 * strength - 2000.0 * (strength < 0.3)
        case _:  # from none through e^-5 a token, another strength for every head or channel
            rates = torch.tensor([0.0, 0.05, 1.0, 5.0, 0.3, 2.0], dtype=torch.float64)
            return -rates[: shape[-1]] * strength


def make(rule: str, num_tokens: int, decay: str = "mixed", groups: int = 2, batch: int = 1) -> Case:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, state = (batch, num_tokens), (batch, HEADS, KEY_DIM, VALUE_DIM)
    q = random(*tokens, groups, KEY_DIM)
    k = normalize(random(*tokens, groups, KEY_DIM), dim=-1)
    v, do = (random(*tokens, HEADS, VALUE_DIM) for _ in range(2))
    beta = 2 * random(*tokens, HEADS).sigmoid()
    of_decays = {"gated_delta": (*tokens, HEADS), "kda": (*tokens, HEADS, KEY_DIM)}
    g = [log_decays(decay, of_decays[rule], generator)] if rule in of_decays else []
    return [q, k, v, *g, beta], random(*state), do, random(*state)
