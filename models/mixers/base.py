"""What a token mixer is to the block around it, and to those who count what a model takes."""

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
    """Of a mixer's operator, for one token; matrix products only.

    Attributes:
        forward: of its forward pass. The backward pass has twice as many.
        again: what the backward pass always computes a second time.
    """

    forward: float
    again: float


class Mixer(nn.Module, ABC):
    """A layer's token mixer: x [B, T, D] → [B, T, D], and all that is known of it without running it.

    Attributes:
        config_class: the configuration of a language model with this mixer.
        fla: how fla calls such a model; None: it has none, and the model cannot be exported.
    """

    config_class: ClassVar[type[LanguageModelConfig]]
    fla: ClassVar[FlaFormat | None] = None

    # The arguments are those that every subclass takes: the model's configuration.
    def __init__(self, config: Any) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, place: Place, boundary: Boundary) -> tuple[Tensor, Crossing]:
        """This rank's tokens x [B, T, D] → [B, T, D], and what crossed ranks."""

    @abstractmethod
    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One more token of each sequence: x [B, 1, D] → [B, 1, D]; `state` [B, *state_shape] goes on in place."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """H, K, V: a state is [B, H, K, V]."""

    @abstractmethod
    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """Of one token of sequences of `seq_len`, without the linear layers: those are found by a walk."""

    @abstractmethod
    def activations(self) -> Activations:
        """Its tensors, from its normed input to its output, which are the block's."""

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Of parameters that lie in the mixer itself, not in a module of it."""
        return {}
