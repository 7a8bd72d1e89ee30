"""What a file of this folder says of one class of language models in fla or transformers.

flash-linear-attention (fla) 0.6.0 has most of them, transformers itself the others. `zeco_train.hf` reads and writes
folders by it. The registry is `models.formats.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.formats.keys import Keys
from models.mixers.base import Mixer


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
class Names:
    """Names of a layer's tensors.

    Attributes:
        parts: parts of parameter names, ours → the file's, replaced one after the other.
        rows: tensors of other rows than our parameters.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True)
class ModelFormat:
    """A class of language models: its config.json, and the names of its tensors.

    Attributes:
        model_type, architecture: as in config.json.
        library: that has the class, "fla" or "transformers".
        mixer: of the models.
        read: config.json → the fields of `mixer.config_class`, without its name.
        write: (configuration, sequence length in training) → the keys of config.json that are not the same in all
            formats. A setting that `read` does not give back is refused without a check here.
        names: of layers with the mixer, and of what lies outside of layers.
        softmax_names: of softmax layers; null: the same.
        other_names: name parts that files may have in place of the library's own: the file's → the library's.
        title: of the model in the model card; null: the mixer's.
        remark: a sentence of the model card on what not all versions of the library compute alike, or "".
    """

    model_type: str
    architecture: str
    library: str
    mixer: type[Mixer]
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any, int], dict[str, Any]]
    names: Names = field(default_factory=Names)
    softmax_names: Names | None = None
    other_names: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None
    remark: Callable[[Any], str] = lambda config: ""

    @property
    def name(self) -> str:
        """Name of the model in the library's documentation."""
        return self.architecture.removesuffix("ForCausalLM")

    @property
    def label(self) -> str:
        """The class in messages, such as "fla's GLA"."""
        owner = "transformers'" if self.library == "transformers" else "fla's"
        return f"{owner} {self.name}"
