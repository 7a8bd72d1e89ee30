"""The shape of the gated linear attention language model, and how many parameters it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco_train.errors import ConfigError


class FeatureMap(Enum):
    """What is applied to each number of queries and keys; the names are those of flash-linear-attention."""

    relu = "relu"
    sqrelu = "sqrelu"
    silu = "silu"
    sigmoid = "sigmoid"

    def __call__(self, x: Tensor) -> Tensor:
        match self:
            case FeatureMap.relu:
                return F.relu(x)
            case FeatureMap.sqrelu:
                return F.relu(x).square()
            case FeatureMap.silu:
                return F.silu(x)
            case FeatureMap.sigmoid:
                return torch.sigmoid(x)


@dataclass
class GLAConfig:
    """Shape of the model; the fields of `configs/model/*.yaml`. The defaults are those of `gla_tiny`.

    Attributes:
        name: shown in logs.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width D of the residual stream.
        num_layers: blocks, each of a GLA layer and an MLP.
        num_heads: H; it divides both hidden_size · expand_k = H·K and hidden_size · expand_v = H·V.
        expand_k, expand_v: width of all keys and of all values, as multiples of hidden_size.
        intermediate_size: width of the SwiGLU MLP.
        gate_low_rank_dim: rank of the projection that makes the decays.
        gate_logit_normalizer: the log-decay is log-sigmoid of the projection, divided by this.
        norm_eps: added to the mean square in every norm.
        tie_word_embeddings: the head uses the embedding's weight.
        initializer_range: standard deviation of the initial matrices.
        num_kv_heads: heads of keys, values and decays; each serves num_heads / num_kv_heads heads of queries. None: as
            many as num_heads.
        feature_map: of queries and keys; None: none.
        clamp_min: no log-decay is less than this; None: no bound.
        use_output_gate: whether a layer's output is gated, by swish of a projection, after its norm.

    """

    name: str = "gla_tiny"
    vocab_size: int = 259
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0
    intermediate_size: int = 384
    gate_low_rank_dim: int = 16
    gate_logit_normalizer: int = 16
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    num_kv_heads: int | None = None
    feature_map: FeatureMap | None = None
    clamp_min: float | None = None
    use_output_gate: bool = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range, or heads that do not divide the width."""
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
            self._require_positive(field)
        for field in ("gate_low_rank_dim", "gate_logit_normalizer"):
            self._require_positive(field)
        for field in ("expand_k", "expand_v", "norm_eps", "initializer_range"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"model.{field}", value, "must be finite and > 0")
        for field in ("expand_k", "expand_v"):
            self._require_whole_width(field)
        common = math.gcd(self.key_dim, self.value_dim)
        if common % self.num_heads:
            nearest = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - self.num_heads))
            widths = f"hidden_size · expand_k = {self.key_dim} and hidden_size · expand_v = {self.value_dim}"
            raise ConfigError("model.num_heads", self.num_heads, f"must divide {widths}; nearest: {nearest}")
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            divisors = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            allowed = f"must divide num_heads={self.num_heads}: {', '.join(divisors)}"
            raise ConfigError("model.num_kv_heads", self.num_kv_heads, allowed)
        if self.clamp_min is not None and not (math.isfinite(self.clamp_min) and self.clamp_min < 0):
            raise ConfigError("model.clamp_min", self.clamp_min, "bounds log-decays from below: must be finite and < 0")

    def _require_positive(self, field: str) -> None:
        if getattr(self, field) < 1:
            raise ConfigError(f"model.{field}", getattr(self, field), "must be a whole number ≥ 1")

    def _require_whole_width(self, field: str) -> None:
        width = self.hidden_size * getattr(self, field)
        if round(width) < 1 or not math.isclose(width, round(width)):
            nearest = max(1, round(width / self.num_heads)) * self.num_heads / self.hidden_size
            allowed = f"hidden_size ({self.hidden_size}) times it must be a multiple of num_heads ({self.num_heads})"
            raise ConfigError(f"model.{field}", getattr(self, field), f"{allowed}; nearest: {nearest}")

    @property
    def key_dim(self) -> int:
        """H·K, the width of all heads' keys."""
        return round(self.hidden_size * self.expand_k)

    @property
    def value_dim(self) -> int:
        """H·V, the width of all heads' values."""
        return round(self.hidden_size * self.expand_v)

    @property
    def head_k_dim(self) -> int:
        """K."""
        return self.key_dim // self.num_heads

    @property
    def head_v_dim(self) -> int:
        """V."""
        return self.value_dim // self.num_heads

    @property
    def num_kv_groups(self) -> int:
        """Heads of queries that share keys, values and decays."""
        return self.num_heads // (self.num_kv_heads or self.num_heads)

    @property
    def projection_widths(self) -> tuple[int, int, int, int]:
        """Columns of a layer's projections of queries, keys (and decays), values, and output gates."""
        groups = self.num_kv_groups
        return self.key_dim, self.key_dim // groups, self.value_dim // groups, self.value_dim * self.use_output_gate


def num_parameters(config: GLAConfig) -> int:
    """Trainable parameters, in closed form; a tied head counts once."""
    width, (queries, keys, values, gates) = config.hidden_size, config.projection_widths
    decays = config.gate_low_rank_dim * (width + keys) + keys
    attention = width * (queries + keys + values + gates + config.value_dim) + decays + config.head_v_dim
    block = attention + 3 * width * config.intermediate_size + 2 * width
    vocabulary = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * block + vocabulary + width
