"""From logits to the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.errors import ConfigError

# A generator's seed is a whole number of 64 bits; samples of a prompt count up from the one that is given.
_LARGEST_SEED = (1 << 63) - 1
# Logits divided by less than this may not be finite any more.
_LEAST_TEMPERATURE = 1e-9


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: of so many likeliest tokens only (and those as likely as the last of them); 0: of all.
        top_p: of the fewest likeliest tokens only whose probabilities sum to this; 1: of all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
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
    """Draws the tokens of a batch. Each row has a stream of random numbers of its own, so what it draws does not depend
    on the rows beside it; a row of seed s draws as transformers' `generate` does alone after `torch.manual_seed(s)`.

    Args:
        sampling: how.
        seeds: of each row.
        device: of the logits. Streams of one seed differ between kinds of devices.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], device: torch.device) -> None:
        self._sampling = sampling
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self._streams = [self._streams[row] for row in rows]

    def draw(self, logits: Tensor) -> Tensor:
        """[B] int64 of logits [B, vocab]; −1 for a row with logits that are not finite."""
        is_sound = logits.isfinite().all(-1)
        if self._sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            # A row of NaN would end the process on CUDA, far from here.
            weights = probabilities(logits.masked_fill(~is_sound[:, None], 0.0), self._sampling)
            draws = [torch.multinomial(row, 1, generator=g) for row, g in zip(weights, self._streams, strict=True)]
            tokens = torch.cat(draws)
        return tokens.masked_fill(~is_sound, -1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What the tokens are drawn with: logits [B, vocab] → [B, vocab] fp32, 0 for those that are left out."""
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        weights = ordered.softmax(-1)
        # A token stays if those before it do not reach top_p yet; so the first one always does.
        is_out = weights.cumsum(-1) - weights >= sampling.top_p
        logits = logits.masked_fill(is_out.scatter(-1, order, is_out), -torch.inf)
    return logits.softmax(-1)
