"""Interface of a token mixer: for the block around it, and for FLOP estimates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from models.config import LanguageModelConfig
from models.parameters import ParameterRule
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import StateInput, StateOutput


@dataclass(frozen=True)
class StateOf:
    """A state of constant size, [B, H, K, V] in fp32 (fp64 for an fp64 model).

    Attributes:
        sizes: H, K, V.
        is_cache: false: a step changes all of it.
    """

    sizes: tuple[int, int, int]
    is_cache = False

    def shape(self, capacity: int | None) -> tuple[int, int, int]:
        """Shape for one sequence."""
        del capacity
        return self.sizes

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """Its dtype in a model that computes in `compute`."""
        return accumulation_dtype(compute)


@dataclass(frozen=True)
class TokenCache:
    """A vector of each token and head, [B, G, tokens, D] in the model's dtype; see `zeco_train.ops.softmax.cache`.

    Attributes:
        heads: G.
        width: D.
        window: tokens that are kept, the last ones; None: all.
        is_cache: true: a step writes one token, and reads no later ones.
    """

    heads: int
    width: int
    window: int | None
    is_cache = True

    def shape(self, capacity: int | None) -> tuple[int, int, int]:
        """Shape for one sequence of at most `capacity` tokens.

        Raises:
            ValueError: no capacity is given.
        """
        if capacity is None:
            raise ValueError("softmax layers keep keys and values: give the capacity of their caches in tokens")
        return self.heads, capacity if self.window is None else min(self.window, capacity), self.width

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """Its dtype in a model that computes in `compute`."""
        return compute


class OperatorFLOPs(NamedTuple):
    """FLOPs of a mixer's operator per token; matrix products only.

    Attributes:
        forward: of the forward pass. The backward pass has twice as many.
        again: FLOPs that the backward pass always recomputes.
    """

    forward: float
    again: float


class Shared(NamedTuple):
    """A parameter of the whole model of which each layer reads a part, such as HGRN2's lower bounds.

    Attributes:
        name: of the parameter, `model.NAME`.
        shape: configuration → its shape.
        rule: its initialisation and treatment by the optimizer.
        parts: the parameter, in fp32 or fp64 → the layers' parts, stacked along the first dimension.
    """

    name: str
    shape: Callable[[Any], tuple[int, ...]]
    rule: ParameterRule
    parts: Callable[[Tensor], Tensor]


class Mixer(nn.Module, ABC):
    """A layer's token mixer: x [B, T, D] → [B, T, D], with its static properties (shapes, FLOPs).

    Args:
        config: of the model, of `config_class`.
        layer: index of the layer, from 0.

    Attributes:
        config_class: configuration class of a language model with this mixer.
        can_be_unmasked: the mixer follows `LanguageModelConfig.causal`: without decays it has an unmasked form.
        title: of such a model, with its paper, for `--help` and model cards; "": the docstring's first line.
        shared: the parameter of the whole model that the layers read, or None.
        needs_halo: whether it exchanges states that cross one border only (`Operator.state_is_halo`).
        reads_positions: whether the layer needs the positions of its tokens (`SequencePosition.positions`).
        norm_after: whether the norms of its block act on outputs instead of inputs.
    """

    config_class: ClassVar[type[LanguageModelConfig]]
    can_be_unmasked: ClassVar[bool] = False
    title: ClassVar[str] = ""
    shared: ClassVar[Shared | None] = None
    needs_halo: ClassVar[bool] = False

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.reads_positions = self.norm_after = False
        self._made_of = config, layer
        self._place_constants(torch.get_default_device())

    @abstractmethod
    def forward(
        self, x: Tensor, position: SequencePosition, state_inputs: Sequence[StateInput], shared: Tensor | None
    ) -> tuple[Tensor, tuple[StateOutput, ...]]:
        """Mix this rank's tokens.

        Args:
            x: [B, T, D].
            position: of the tokens.
            state_inputs: of each state, in the order of `states`.
            shared: this layer's part of `Mixer.shared`, or the result of `wide_parameters`; None without either.

        Returns:
            [B, T, D], and each state as exchanged with other ranks.
        """

    @abstractmethod
    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """One more token of each sequence.

        Args:
            x: [B, 1, D].
            states: in the order of `states`; updated in place.
            positions: [B] int64, of the tokens in their sequences.
            shared: as in `forward`.

        Returns:
            [B, 1, D].
        """

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """H, K, V of each state of constant size, [B, H, K, V]; the last one is the operator's."""

    @property
    def states(self) -> tuple[StateOf | TokenCache, ...]:
        """What the layer keeps between tokens, each at the place of a state_output."""
        return tuple(StateOf(shape) for shape in self.state_shapes)

    @property
    def num_state_outputs(self) -> int:
        """Results that `forward` receives from other ranks and keeps for a replay: its states, unless overridden."""
        return len(self.state_shapes)

    @property
    def wide_parameters(self) -> nn.Module | None:
        """The submodule whose parameters stay in fp32 (`ParameterRule.wide`), or None.

        The model calls it, without arguments, and passes the result to the layer as `shared`, a new tensor. So FSDP2
        gathers those of all layers at once, in fp32, and a recomputed or compiled block contains no gathering.
        """
        return None

    @classmethod
    def constants(cls, config: Any, layer: int) -> Mapping[str, Tensor]:
        """Tensors that the configuration determines, such as decays by head: name of the attribute → value in fp64."""
        del config, layer
        return {}

    def _place_constants(self, device: torch.device) -> None:
        """Set the attributes of `constants`.

        They are no buffers: `to_empty` would leave their values undefined, and casting a model would round them.
        """
        for name, value in self.constants(*self._made_of).items():
            setattr(self, name, value.to(device))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._place_constants(next(self.parameters()).device)
        return self

    @classmethod
    def longest_document(cls, config: Any) -> int | None:
        """Tokens of the longest document, or sequence without documents, that the mixer is defined for; None: any.

        Checked before anything runs: `zeco_train.config.rules`, `models.registry.check_document`.
        """
        del config
        return None

    @abstractmethod
    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs for one token of sequences of `seq_len`, without linear layers, which `models.spec` counts."""

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Rules of parameters owned by the mixer itself, not by a submodule."""
        return {}
