"""Configuration fields shared by all language models; each mixer adds its own (`models.mixers`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from models.attn import AttnConfig
from zeco_train.errors import ConfigError
from zeco_train.system.numbers import divisors

# Name of softmax layers, beside those of the mixers.
SOFTMAX = "softmax"


@dataclass
class LanguageModelConfig:
    """Shape of a language model. With the fields of its mixer these are the keys of `configs/model/*.yaml`.

    Attributes:
        mixer: the token mixer; each has keys of its own.
        mlp_optional: whether `intermediate_size` may be 0, for blocks without an MLP; of the class.
        name: name of the model, shown in logs.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width D of the residual stream.
        num_layers: blocks, each of a mixer and an MLP.
        num_heads: H, heads of a mixer.
        intermediate_size: width of the SwiGLU MLP; 0, with some mixers: no MLP.
        norm_eps: added to the mean square in every norm.
        zero_centred_norms: norms multiply by 1 + weight; those of the residual stream, and of queries and keys in
            softmax layers. With weights from 0 on bf16 resolves finer steps around 1.
        tie_word_embeddings: the head uses the embedding's weight.
        causal: a token reads the tokens before it only; false: it reads the whole sequence, for task=mlm. Needs mixers
            without decays.
        initializer_range: standard deviation of the initial matrices.
        attn: which layers are softmax attention instead, and their shape.
    """

    mlp_optional: ClassVar[bool] = False

    mixer: str = ""
    name: str = "gla_tiny"
    vocab_size: int = 259
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 384
    norm_eps: float = 1e-6
    zero_centred_norms: bool = False
    tie_word_embeddings: bool = False
    causal: bool = True
    initializer_range: float = 0.02
    attn: AttnConfig = field(default_factory=AttnConfig)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        if self.mixer != (own := type(self).mixer):
            raise ConfigError("model.mixer", self.mixer, f"must be {own} in a {type(self).__name__}")
        self._require_positive("vocab_size", "hidden_size", "num_layers", "num_heads")
        if not (self.mlp_optional and self.intermediate_size == 0):
            self._require_positive("intermediate_size")
        self._require_finite("norm_eps", "initializer_range")
        self.attn.validate(self.num_layers, self.num_heads, self.hidden_size)

    @property
    def has_wide_residual(self) -> bool:
        """Whether the residual stream is fp32 even if the model computes in bf16."""
        return False

    def mixer_of(self, layer: int) -> str:
        """Name of the mixer of a layer, counted from 0."""
        return SOFTMAX if layer in self.attn.chosen(self.num_layers) else self.mixer

    def mixer_counts(self) -> Mapping[str, int]:
        """Number of layers per mixer. Does not iterate over layers, since a mistyped `num_layers` can be huge."""
        softmax = len(self.attn.chosen(self.num_layers))
        counts = {self.mixer: self.num_layers - softmax, SOFTMAX: softmax}
        return {name: count for name, count in counts.items() if count}

    def canonical(self) -> Self:
        """The same model in canonical form: equal models compare equal."""
        return replace(self, attn=self.attn.canonical(self.num_layers, self.num_heads, self.hidden_size))

    def describe(self) -> Mapping[str, str]:
        """Model-card rows that are specific to this kind of model, by name."""
        variants = [*self._variants(), *["tied embeddings"] * self.tie_word_embeddings]
        return {**self._shape_rows(), "variants": "; ".join(variants) or "none"}

    def _shape_rows(self) -> Mapping[str, str]:
        return {}

    # What differs from the mixer's default model, in words.
    def _variants(self) -> list[str]:
        return []

    def _require_positive(self, *fields: str, least: int = 1) -> None:
        for name in fields:
            if getattr(self, name) < least:
                raise ConfigError(f"model.{name}", getattr(self, name), f"must be a whole number ≥ {least}")

    def _require_finite(self, *fields: str) -> None:
        for name in fields:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"model.{name}", value, "must be finite and > 0")

    # Null: as many as heads.
    def _require_divides_heads(self, field: str) -> None:
        value = getattr(self, field)
        if value is not None and (value < 1 or self.num_heads % value):
            allowed = f"must divide num_heads={self.num_heads}: {', '.join(map(str, divisors(self.num_heads)))}"
            raise ConfigError(f"model.{field}", value, allowed)

    # Total widths of all heads, by their names in the message.
    def _require_heads_divide(self, widths: Mapping[str, int]) -> None:
        common = math.gcd(*widths.values())
        if common % self.num_heads:
            nearest = min(divisors(common), key=lambda n: abs(n - self.num_heads))
            names = " and ".join(f"{name} = {width}" for name, width in widths.items())
            raise ConfigError("model.num_heads", self.num_heads, f"must divide {names}; nearest: {nearest}")


@dataclass
class ExpandedHeadsConfig(LanguageModelConfig):
    """A model whose heads of keys and of values each divide a multiple of its width.

    Attributes:
        num_heads: H, heads; it divides both hidden_size · expand_k = H·K and hidden_size · expand_v = H·V.
        expand_k, expand_v: width of all keys and of all values, as multiples of hidden_size.
    """

    expand_k: float = 1.0
    expand_v: float = 1.0

    def validate(self) -> None:
        super().validate()
        self._require_finite("expand_k", "expand_v")
        for name in ("expand_k", "expand_v"):
            factor = getattr(self, name)
            width = self.hidden_size * factor
            # The factor is a float, so an exact product may still differ from a whole number in its last digits.
            if round(width) < 1 or not math.isclose(width, round(width)):
                nearest = max(1, round(width / self.num_heads)) * self.num_heads / self.hidden_size
                allowed = f"hidden_size ({self.hidden_size}) times it must be a multiple of num_heads"
                raise ConfigError(f"model.{name}", factor, f"{allowed} ({self.num_heads}); nearest: {nearest}")
        widths = {"hidden_size · expand_k": self.key_dim, "hidden_size · expand_v": self.value_dim}
        self._require_heads_divide(widths)

    @property
    def key_dim(self) -> int:
        """H·K, total width of the keys."""
        return round(self.hidden_size * self.expand_k)

    @property
    def value_dim(self) -> int:
        """H·V, total width of the values."""
        return round(self.hidden_size * self.expand_v)

    @property
    def head_k_dim(self) -> int:
        """K."""
        return self.key_dim // self.num_heads

    @property
    def head_v_dim(self) -> int:
        """V."""
        return self.value_dim // self.num_heads

    def _shape_rows(self) -> Mapping[str, str]:
        return {"heads": f"{self.num_heads} of K {self.head_k_dim} and V {self.head_v_dim}"}
