"""Which layers of a model are softmax attention, and their shape: section `attn` of a model's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zeco_train.errors import ConfigError


@dataclass
class AttnConfig:
    """Softmax layers of a hybrid; none by default. Layers are counted from 0.

    Attributes:
        every: one layer in this many, the last of them unless `offset` says which; or null.
        offset: the first of these layers; null: every − 1.
        layers: the layers, one by one, in place of `every`; or null.
        num_heads: heads of queries; null: those of the model.
        num_kv_heads: heads of keys and values; it divides num_heads, and each serves as many heads of queries in a row;
            null: num_heads.
        head_dim: width of a head; null: hidden_size / num_heads.
        window: keys that a query reads at most, itself among them; null: all before it.
        rope_theta: base of the frequencies of the rotary position embeddings; null: no position embeddings.
        rotary_dim: channels of a head that are rotated, the first ones; null: all.
        qk_norm: RMSNorm over each head of queries and of keys, before the rotation.
        qk_norm_all_heads: these norms are over all heads of queries, and over all of keys, at once.
        gate: outputs times the sigmoid of a projection of the layer's input.
        norm_after: the norms of such a block act on the outputs of attention and MLP; else on their inputs.
    """

    every: int | None = None
    offset: int | None = None
    layers: list[int] | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    rope_theta: float | None = 10000.0
    rotary_dim: int | None = None
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    gate: bool = False
    norm_after: bool = False

    def chosen(self, num_layers: int) -> range | list[int]:
        """The softmax layers, ascending. No loop over layers, since a mistyped `num_layers` can be huge."""
        if self.layers is not None:
            return self.layers
        if self.every is None:
            return range(0)
        return range(self.every - 1 if self.offset is None else self.offset, num_layers, self.every)

    def canonical(self, num_layers: int, num_heads: int, hidden_size: int) -> AttnConfig:
        """The same layers in canonical form, one by one: equal ones compare equal."""
        if not (chosen := self.chosen(num_layers)):
            return AttnConfig()
        shape = AttnShape.of(self, num_heads, hidden_size)
        return replace(
            self,
            every=None,
            offset=None,
            layers=list(chosen),
            num_heads=shape.heads,
            num_kv_heads=None if shape.key_heads == shape.heads else shape.key_heads,
            head_dim=None if shape.head_dim * shape.heads == hidden_size else shape.head_dim,
            rotary_dim=None if self.rotary_dim == shape.head_dim else self.rotary_dim,
        )

    def validate(self, num_layers: int, num_heads: int, hidden_size: int) -> None:
        """Raise `ConfigError` for a value out of range, in a model of that shape."""
        self._check_layers(num_layers)
        for field in ("num_heads", "num_kv_heads", "head_dim", "window"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"model.attn.{field}", value, "must be a whole number ≥ 1, or null")
        if not self.chosen(num_layers):
            return
        shape = AttnShape.of(self, num_heads, hidden_size)
        if self.head_dim is None and hidden_size % shape.heads:
            allowed = f"must divide hidden_size = {hidden_size}, or model.attn.head_dim be given"
            raise ConfigError("model.attn.num_heads", shape.heads, allowed)
        if shape.heads % shape.key_heads:
            allowed = f"must divide the {shape.heads} heads of queries"
            raise ConfigError("model.attn.num_kv_heads", shape.key_heads, allowed)
        if (rotated := self.rotary_dim) is not None:
            if self.rope_theta is None:
                raise ConfigError("model.attn.rotary_dim", rotated, "needs model.attn.rope_theta")
            if rotated % 2 or not 2 <= rotated <= shape.head_dim:
                allowed = f"must be even, from 2 to the {shape.head_dim} channels of a head, or null for all"
                raise ConfigError("model.attn.rotary_dim", rotated, allowed)
        check_rotation("model.attn.rope_theta", self.rope_theta, shape.head_dim if rotated is None else rotated)
        if self.qk_norm_all_heads and not self.qk_norm:
            raise ConfigError("model.attn.qk_norm_all_heads", "true", "needs model.attn.qk_norm=true")

    def _check_layers(self, num_layers: int) -> None:
        if self.layers is not None:
            if self.every is not None:
                raise ConfigError("model.attn.layers", self.layers, "names layers in place of model.attn.every")
            if sorted(set(self.layers)) != self.layers or any(not 0 <= layer < num_layers for layer in self.layers):
                allowed = f"must be ascending numbers of layers, from 0 to {num_layers - 1}"
                raise ConfigError("model.attn.layers", self.layers, allowed)
        if self.every is not None and not 1 <= self.every <= num_layers:
            raise ConfigError("model.attn.every", self.every, f"must be from 1 to model.num_layers = {num_layers}")
        if self.offset is not None:
            if self.every is None:
                raise ConfigError("model.attn.offset", self.offset, "needs model.attn.every")
            if not 0 <= self.offset < self.every:
                raise ConfigError("model.attn.offset", self.offset, f"must be from 0 to {self.every - 1}")


def check_rotation(field: str, theta: float | None, width: int) -> None:
    """Raise `ConfigError` if no frequencies of base `theta`, or None, rotate so many channels of a head."""
    if theta is not None and not (math.isfinite(theta) and theta > 1):
        raise ConfigError(field, theta, "must be finite and > 1, or null for no position embedding")
    if theta is not None and width % 2:
        allowed = f"rotates pairs of channels: heads must be of even width, not {width}; or null"
        raise ConfigError(field, theta, allowed)


@dataclass(frozen=True)
class AttnShape:
    """Heads of a model's softmax layers: of queries, of keys and values, and their width."""

    heads: int
    key_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: AttnConfig, num_heads: int, hidden_size: int) -> AttnShape:
        """In a model of this shape."""
        heads = num_heads if config.num_heads is None else config.num_heads
        key_heads = heads if config.num_kv_heads is None else config.num_kv_heads
        return cls(heads, key_heads, hidden_size // heads if config.head_dim is None else config.head_dim)
