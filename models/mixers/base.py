"""Interface of a token mixer: for the block around it, and for FLOP estimates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self, overload

import torch
from torch import Tensor, nn

from models.config import LanguageModelConfig
from models.parameters import ParameterRule
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.linear import Aside, linear
from zeco_train.ops.mix import mix_beside
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition


class LayerState(NamedTuple):
    """What a layer keeps between the tokens of a sequence in generation, a state of constant size or a cache of tokens.

    Attributes:
        sizes: H, K, V of a state, [B, H, K, V] in fp32 (fp64 for an fp64 model), of which a step changes all; or of a
            cache G, the tokens that are kept (None: all) and D, [B, G, tokens, D] in the model's dtype.
        is_cache: which of them.
    """

    sizes: tuple[int, int | None, int]
    is_cache: bool = False

    def shape(self, capacity: int | None) -> tuple[int, int, int]:
        """Shape for one sequence of at most `capacity` tokens; `ValueError` for a cache without a capacity."""
        heads, rows, width = self.sizes
        if self.is_cache:
            if capacity is None:
                raise ValueError("softmax layers keep keys and values: give the capacity of their caches in tokens")
            rows = capacity if rows is None else min(rows, capacity)
        assert rows is not None
        return heads, rows, width


class OperatorFLOPs(NamedTuple):
    """FLOPs of a mixer's operators per token, matrix products only.

    Attributes:
        forward: of the forward pass. The backward pass has twice as many.
        again: FLOPs that the backward pass always recomputes.
    """

    forward: float
    again: float


class Shared(NamedTuple):
    """A parameter of the whole model, `model.NAME`, of which each layer reads a part, such as HGRN2's lower bounds."""

    name: str
    # Configuration → shape.
    shape: Callable[[Any], tuple[int, ...]]
    rule: ParameterRule
    # The parameter, in fp32 or fp64 → the layers' parts, stacked along the first dimension.
    parts: Callable[[Tensor], Tensor]


class Mixer(nn.Module, ABC):
    """A layer's token mixer: x [B, T, D] → [B, T, D].

    Args:
        config: of the model, of `config_class`.
        layer: index of the layer, from 0.

    Attributes:
        config_class: configuration class of a language model with this mixer.
        title: of such a model, with its paper, for `--help` and model cards; "": the docstring's first line.
        can_be_unmasked: the mixer follows `LanguageModelConfig.causal`: without decays it has an unmasked form.
        shared: the parameter of the whole model that the layers read, or None.
        needs_halo: whether it exchanges states that cross one border only (`Operator.state_is_halo`).
        operators: names of the operators, one for each state; a class may have them only as `operator`, the last.
        state_shapes: H, K, V of each state of constant size; the last is that of the operator with the long memory.
        reads_positions: whether the layer needs the positions of its tokens (`SequencePosition.positions`).
        norm_after: whether the norms of its block act on outputs instead of inputs.
    """

    config_class: ClassVar[type[LanguageModelConfig]]
    title: ClassVar[str] = ""
    can_be_unmasked: ClassVar[bool] = False
    shared: ClassVar[Shared | None] = None
    needs_halo: ClassVar[bool] = False
    operators: tuple[str, ...] = ()
    operator: ClassVar[str] = ""
    state_shapes: tuple[tuple[int, int, int], ...]

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.reads_positions = self.norm_after = False
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
        """One more token of each sequence, [B, 1, D] → [B, 1, D].

        Args:
            x: [B, 1, D].
            states: in the order of `states`; updated in place.
            positions: [B] int64, of the tokens in their sequences.
            shared: as in `forward`.
        """

    @property
    def states(self) -> tuple[LayerState, ...]:
        """What the layer keeps between tokens; `forward` returns a `StateOutput` for each."""
        return tuple(LayerState(shape) for shape in self.state_shapes)

    @property
    def wide_parameters(self) -> nn.Module | None:
        """The submodule `decay`, whose parameters stay in fp32 (`ParameterRule.wide`), or None.

        The model calls it, without arguments, and passes the result to the layer as `shared`, a new tensor. So FSDP2
        gathers those of all layers at once, in fp32, and a recomputed or compiled block contains no gathering.
        """
        return self._modules.get("decay")

    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that `config` and `layer` determine, such as decays by head: name of the attribute → fp64 value."""
        return {}

    # They are no buffers: `to_empty` would leave their values undefined, and casting a model would round them.
    def _place_constants(self, device: torch.device) -> None:
        for name, value in self.constants().items():
            setattr(self, name, value.to(device))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._place_constants(next(self.parameters()).device)
        return self

    @classmethod
    def longest_document(cls, config: Any) -> int | None:
        """Tokens of the longest document, or sequence without documents, that the mixer is defined for; None: any."""
        return None

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs for one token of sequences of `seq_len`, without linear layers, which `models.spec` counts."""
        pairs = [(OPERATORS[name], shape) for name, shape in zip(self.operators, self.state_shapes, strict=True)]
        return OperatorFLOPs(
            sum(operator.forward_flops(*shape) for operator, shape in pairs),
            sum(operator.recomputed_flops(*shape) for operator, shape in pairs),
        )

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Rules of parameters owned by the mixer itself, not by a submodule."""
        return {}


class Run(Protocol):
    """(operator, its operands, scale) → its outputs: of this rank's tokens over the whole sequence, or of one more.

    With a linear layer to be computed beside the operator's scan: its output, too.
    """

    @overload
    def __call__(self, operator: str, operands: Sequence[Tensor], scale: float) -> Tensor: ...

    @overload
    def __call__(
        self, operator: str, operands: Sequence[Tensor], scale: float, aside: Aside
    ) -> tuple[Tensor, Tensor]: ...


class OperatorMixer(Mixer):
    """A mixer whose layer is one formula, `mix`, for a sequence over all ranks and for one token after another."""

    @abstractmethod
    def mix(self, x: Tensor, positions: Tensor | None, shared: Tensor | None, run: Run) -> Tensor:
        """The layer's output [B, T, D].

        Args:
            x: [B, T, D].
            positions: [T], or [B, 1] of one token, if the layer `reads_positions`.
            shared: as in `forward`.
            run: to be called once for each of `operators`, in their order.
        """

    def forward(
        self, x: Tensor, position: SequencePosition, state_inputs: Sequence[StateInput], shared: Tensor | None
    ) -> tuple[Tensor, tuple[StateOutput, ...]]:
        state_outputs: list[StateOutput] = []

        def run(operator: str, operands: Sequence[Tensor], scale: float, aside: Aside | None = None) -> Any:
            state_input = state_inputs[len(state_outputs)]
            o, state_output, y = mix_beside(operator, operands, scale, position, state_input, aside)
            state_outputs.append(state_output)
            return o if aside is None else (o, y)

        return self.mix(x, position.positions, shared, run), tuple(state_outputs)

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        remaining = iter(states)

        def run(operator: str, operands: Sequence[Tensor], scale: float, aside: Aside | None = None) -> Any:
            o = OPERATORS[operator].step(*operands, next(remaining), scale)
            return o if aside is None else (o, linear(aside.x, aside.weight, aside.more))

        return self.mix(x, positions[:, None], shared, run)
