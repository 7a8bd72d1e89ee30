"""Sampling of the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.errors import ConfigError

# A generator's seed has 64 bits; the samples of a prompt use consecutive seeds.
_LARGEST_SEED = (1 << 63) - 1
# Logits divided by less than this may overflow.
_LEAST_TEMPERATURE = 1e-9


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: divides the logits; 0 for greedy decoding.
        top_k: keep only the k likeliest tokens (and ties with the last of them); 0 keeps all.
        top_p: keep only the smallest set of likeliest tokens whose probabilities sum to this; 1 keeps all.
        seed: of the random numbers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def validate(self) -> None:
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature < math.inf:
            allowed = f"must be finite and ≥ {_LEAST_TEMPERATURE:g}; or 0, which takes the likeliest token"
            raise ConfigError("temperature", self.temperature, allowed)
        if self.top_k < 0:
            raise ConfigError("top_k", self.top_k, "must be ≥ 0; 0 leaves all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "must be > 0 and ≤ 1; 1 leaves all tokens")
        if not 0 <= self.seed < _LARGEST_SEED:
            raise ConfigError("seed", self.seed, f"must be ≥ 0 and < {_LARGEST_SEED}")


class Sampler:
    """Samples the next token of each row of a batch.

    Each row has its own random generator, so its tokens do not depend on the rest of the batch; a row with seed s draws
    as transformers' `generate` does alone after `torch.manual_seed(s)`, on a device of the same type.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], device: torch.device) -> None:
        self._sampling = sampling
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._streams = [self._streams[row] for row in rows]

    def draw(self, logits: Tensor) -> Tensor:
        """Sample [B] int64 from logits [B, vocab]; −1 for rows with non-finite logits."""
        is_sound = logits.isfinite().all(-1)
        if self._sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            # On CUDA, multinomial of NaN triggers a device-side assert, reported asynchronously.
            weights = probabilities(logits.masked_fill(~is_sound[:, None], 0.0), self._sampling)
            # Row by row: a call takes one generator.
            draws = [torch.multinomial(row, 1, generator=g) for row, g in zip(weights, self._streams, strict=True)]
            tokens = torch.cat(draws)
        return tokens.masked_fill(~is_sound, -1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Sampling probabilities: logits [B, vocab] → [B, vocab] fp32, 0 for excluded tokens."""
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        weights = ordered.softmax(-1)
        # Keep a token if those before it sum to less than top_p; so the first is always kept.
        is_out = weights.cumsum(-1) - weights >= sampling.top_p
        logits = logits.masked_fill(is_out.scatter(-1, order, is_out), -torch.inf)
    return logits.softmax(-1)
