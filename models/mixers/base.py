"""Interface of a token mixer: for the block around it, and for FLOP and memory estimates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from models.activations import Activations
from models.config import LanguageModelConfig
from models.fla import FlaFormat
from models.parameters import ParameterRule
from zeco_train.ops.seam import Boundary, Crossing, Place


class OperatorFLOPs(NamedTuple):
    """FLOPs of a mixer's operator per token; matrix products only.

    Attributes:
        forward: of the forward pass. The backward pass has twice as many.
        again: FLOPs that the backward pass always recomputes.
    """

    forward: float
    again: float


class Mixer(nn.Module, ABC):
    """A layer's token mixer: x [B, T, D] → [B, T, D], with its static properties (shapes, FLOPs, activations).

    Attributes:
        config_class: configuration class of a language model with this mixer.
        can_be_unmasked: the mixer follows `LanguageModelConfig.causal`: without decays it has an unmasked form.
        fla: fla's format of such a model; None if fla has none, and the model cannot be exported.
    """

    config_class: ClassVar[type[LanguageModelConfig]]
    can_be_unmasked: ClassVar[bool] = False
    fla: ClassVar[FlaFormat | None] = None

    # All subclasses take the model's configuration as their only argument.
    def __init__(self, config: Any) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, place: Place, boundary: Boundary) -> tuple[Tensor, Crossing]:
        """This rank's tokens x [B, T, D] → [B, T, D], and the states exchanged with other ranks."""

    @abstractmethod
    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One more token of each sequence: x [B, 1, D] → [B, 1, D]; updates `state` [B, *state_shape] in place."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """H, K, V: a state is [B, H, K, V]."""

    @abstractmethod
    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs for one token of sequences of `seq_len`, without linear layers, which `models.spec` counts."""

    @abstractmethod
    def activations(self) -> Activations:
        """Activations between the mixer's normed input and its output; those two are counted by the block."""

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Rules of parameters owned by the mixer itself, not by a submodule."""
        return {}
