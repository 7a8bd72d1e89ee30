"""Widths of keys and values as multiples of the model's width, for configurations of mixers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.config import LanguageModelConfig
from zeco_train.errors import ConfigError


@dataclass
class ExpandedHeadsConfig(LanguageModelConfig):
    """A model whose heads of keys and of values each divide a multiple of its width.

    Attributes:
        num_heads: H; it divides both hidden_size · expand_k = H·K and hidden_size · expand_v = H·V.
        expand_k, expand_v: width of all keys and of all values, as multiples of hidden_size.
    """

    expand_k: float = 1.0
    expand_v: float = 1.0

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range, or heads that do not divide the width."""
        super().validate()
        self._require_finite("expand_k", "expand_v")
        for field in ("expand_k", "expand_v"):
            self._require_whole_width(field)
        widths = {"hidden_size · expand_k": self.key_dim, "hidden_size · expand_v": self.value_dim}
        self._require_heads_divide(widths)

    def _require_whole_width(self, field: str) -> None:
        """`field` is a multiple of hidden_size: their product must be a whole number."""
        width = self.hidden_size * getattr(self, field)
        # The factor is a float, so an exact product may still differ from a whole number in its last digits.
        if round(width) < 1 or not math.isclose(width, round(width)):
            nearest = max(1, round(width / self.num_heads)) * self.num_heads / self.hidden_size
            allowed = f"hidden_size ({self.hidden_size}) times it must be a multiple of num_heads ({self.num_heads})"
            raise ConfigError(f"model.{field}", getattr(self, field), f"{allowed}; nearest: {nearest}")

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
