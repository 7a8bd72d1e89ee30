"""The Hugging Face format of a mixer's models, for `zeco_train.hf` to read and write.

Most are formats of flash-linear-attention (fla) 0.6.0; some models have a class in transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Derived:
    """A key that the library computes from others.

    Attributes:
        source: the key that decides it, for messages.
        value: the values by our names → the key's value, or None if they do not determine it.
        allowed: values of `source` that do.
    """

    source: str
    value: Callable[[Mapping[str, Any]], int | None]
    allowed: str


@dataclass(frozen=True)
class Rows:
    """Tensors of a file that together hold the rows of several of our parameters.

    Attributes:
        ours: our parameters in a layer, in the order of the rows, such as `attn.q_proj.weight`.
        theirs: the file's tensors in a layer, in the order of the rows. As many as ours: an export writes one for each,
            and a file may cut the rows elsewhere.
        by_heads: the rows of each head of queries lie together: of each head first those of the first parameter.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    by_heads: bool = False


@dataclass(frozen=True)
class SoftmaxLayers:
    """The softmax layers of a class of transformers: keys `layer_types`, `num_attention_heads`, `rope_parameters`, ….

    Attributes:
        fixed: fields of `model.attn` that the class decides, with their value.
        num_heads, num_kv_heads, head_dim: the class's defaults; null: those that other keys decide.
        always_rotates: whether `rope_theta` must not be null.
        rotates_parts: whether it reads `partial_rotary_factor`.
        parts, rows: as in `FlaFormat`, for these layers alone.
    """

    fixed: Mapping[str, Any]
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    always_rotates: bool
    rotates_parts: bool
    parts: Mapping[str, str]
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True)
class FlaFormat:
    """The class for a language model with this mixer, and the mixer-specific keys of its config.json.

    Keys have the same names as the fields of our configuration, except those in `keys`.

    Attributes:
        model_type, architecture: as in config.json.
        title: description of the model in the model card.
        library: that has the class, "fla" or "transformers".
        defaults: of keys that all models have, for missing ones, where they differ from fla's GLA.
        keys: fields with another name in config.json: ours → the file's.
        numbers: numeric keys, with the library's defaults for missing ones.
        pairs: keys that are a list of two numbers, with the library's defaults.
        optional: numeric keys that may be null, with their type.
        optional_defaults: the library's defaults of `optional` and of hidden_ratio, where they differ from null and 4.
        derived: `optional` keys that the library computes from others.
        switches: boolean keys, with the library's defaults.
        choices: keys that are null or the name of an Enum member.
        choice_defaults: fla's defaults of `choices`, where that is not null; null is refused then.
        aliases: alternative names for values of `choices`.
        fixed: fields that the library's model hard-codes and its configuration cannot change, with their value.
        refused: keys with the only value that our model supports, and the meaning of any other value.
        equals: keys of `refused` that may also have the value of another key, one of `numbers`.
        most: numbers of our model's shape that the library's model bounds, with the largest; on export.
        written: keys that are written to the file but not read.
        copies: keys that are written once more under a second name, for another library that reads the file.
        plain_norm: parameter name parts, ours → those of a file with `fuse_norm` false.
        parts: parameter name parts, ours → the file's, replaced one after the other.
        softmax: softmax layers of a class of transformers; None: it has none, and for fla the key `attn`.
        needed: numeric keys without a default.
        ratios: fields that are the quotient of a key and of one of `needed`, both whole numbers.
        computed: keys that an export takes from the model's shape, in place of its fields.
        remarks: field → (the value that all versions of the library compute alike, the model card's note on others).
        rows: tensors of other rows than our parameters.
        former: name parts that files may have in place of the library's own: the file's → the library's.
    """

    model_type: str
    architecture: str
    title: str
    library: str = "fla"
    defaults: Mapping[str, int | float] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    pairs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    optional: Mapping[str, type] = field(default_factory=dict)
    optional_defaults: Mapping[str, int | None] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    choices: Mapping[str, type[Enum]] = field(default_factory=dict)
    choice_defaults: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Enum] = field(default_factory=dict)
    fixed: Mapping[str, int | float | None] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    equals: Mapping[str, str] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    plain_norm: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    softmax: SoftmaxLayers | None = None
    needed: Mapping[str, type] = field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Any], int]] = field(default_factory=dict)
    remarks: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    rows: tuple[Rows, ...] = ()
    former: Mapping[str, str] = field(default_factory=dict)

    @property
    def decided(self) -> Mapping[str, Any]:
        """`fixed`, and the fields that all classes decide alike unless it says otherwise."""
        return {"zero_centred_norms": False, **self.fixed}

    @property
    def owner(self) -> str:
        """The library in the possessive, for messages."""
        return f"{self.library}'" if self.library.endswith("s") else f"{self.library}'s"

    @property
    def name(self) -> str:
        """Name of the model in the library's documentation."""
        return self.architecture.removesuffix("ForCausalLM")
