"""Random operands of scalar and fixed decays, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.operator import Operator
from zeco_train.ops.scalar_decay import FIXED_DECAY

HEADS, KEY_DIM, VALUE_DIM = 6, 5, 7

# q, k, v, g or log_decay; R; do; D_in.
Case = tuple[list[Tensor], Tensor, Tensor, Tensor]


def log_decays(decay: str, *shape: int, generator: torch.Generator) -> Tensor:
    strength = torch.rand(*shape, generator=generator, dtype=torch.float64)
    match decay:
        case "none":
            return torch.zeros_like(strength)
        case "weak":
            return -0.02 * strength
        case "strong":
            return -50.0 * strength
        case "underflow":  # about every third token forgets all: its decay is 0 in fp64
            return -0.1 * strength - 2000.0 * (strength < 0.3)
        case _:  # from none through e^-50 a token, another strength for every head
            return -torch.tensor([0.0, 0.05, 1.0, 50.0, 0.3, 4.0], dtype=torch.float64)[: shape[-1]] * strength


def make(
    operator: Operator, num_tokens: int, decay: str = "mixed", groups: int = 2, batch: int = 1, heads: int = HEADS
) -> Case:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, state = (batch, num_tokens), (batch, heads, KEY_DIM, VALUE_DIM)
    q, k = (random(*tokens, groups, KEY_DIM) for _ in range(2))
    v, do = (random(*tokens, heads, VALUE_DIM) for _ in range(2))
    of_decay = (heads,) if operator is FIXED_DECAY else (*tokens, heads)
    return [q, k, v, log_decays(decay, *of_decay, generator=generator)], random(*state), do, random(*state)
