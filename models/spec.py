"""What the rest of the program knows of a model: its shape in numbers, from one walk over it on the meta device.

The walk builds one block for each mixer of the model and runs it over a few tokens that hold no values: which matrix
products there are, and which of them share an input, is seen and not summed up by hand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.activations import Activations, Part
from models.config import LanguageModelConfig
from models.language_model import Block, LanguageModel
from models.mixers.base import OperatorFLOPs
from models.parameters import ParameterRule, parameter_rules
from models.registry import MIXERS
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import Boundary, Place

Shape = tuple[int, ...]


class ParameterSpec(NamedTuple):
    """A parameter without its values."""

    shape: Shape
    rule: ParameterRule


# Input width and output width of a linear layer, y [T, N] = x [T, K] Wᵀ: (K, N).
Product = tuple[int, int]


@dataclass(frozen=True)
class TokenFLOPs:
    """Floating-point operations of one token, a multiply-add counting as two.

    Attributes:
        linear: the blocks' linear layers.
        operator: of the mixers themselves.
        head: the logits.
    """

    linear: float
    operator: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.operator + self.head

    def __add__(self, other: TokenFLOPs) -> TokenFLOPs:
        return TokenFLOPs(self.linear + other.linear, self.operator + other.operator, self.head + other.head)


@dataclass(frozen=True)
class BlockSpec:
    """Blocks of one mixer.

    Attributes:
        count: how many blocks have it.
        parameters: their shapes, of one block.
        mixer_products, mlp_products: the linear layers in the order of the forward pass, by shared input.
        state_shape: H, K, V of the mixer's state.
        operator_flops: of its operator, see `Mixer`.
        activations: by part.
    """

    count: int
    parameters: Sequence[Shape]
    mixer_products: Sequence[Sequence[Product]]
    mlp_products: Sequence[Sequence[Product]]
    state_shape: tuple[int, int, int]
    operator_flops: Callable[[int], OperatorFLOPs]
    activations: Mapping[Part, Activations]

    @property
    def products(self) -> Sequence[Sequence[Product]]:
        """All linear layers."""
        return [*self.mixer_products, *self.mlp_products]


class ModelSpec:
    """A model by its configuration. What has to be walked for is found when it is asked for, and once.

    Args:
        config: its shape.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config = config

    def build(self) -> LanguageModel:
        """The model, on the current default device, with torch's own initial values."""
        config = self.config
        return LanguageModel(config, [MIXERS[config.mixer_of(layer)] for layer in range(config.num_layers)])

    @cached_property
    def blocks(self) -> Mapping[str, BlockSpec]:
        """One entry for each mixer, by its name."""
        counts, blocks = self.config.mixer_counts(), self._skeleton.model.blocks()
        return {name: _walk(counts[name], block) for name, block in zip(counts, blocks, strict=True)}

    @cached_property
    def num_parameters(self) -> int:
        """Trainable parameters; a tied head counts once."""
        more = sum((block.count - 1) * sum(map(math.prod, block.parameters)) for block in self.blocks.values())
        return more + sum(parameter.numel() for parameter in self._skeleton.parameters())

    @cached_property
    def parameter_shapes(self) -> Mapping[str, torch.Size]:
        """All parameters by name, as checkpoints and files have them; a tied head is the embedding."""
        return {name: parameter.shape for name, parameter in self._whole.named_parameters()}

    @cached_property
    def units(self) -> Sequence[Sequence[ParameterSpec]]:
        """The parameters by FSDP unit: those of `LanguageModel.sharding_units`, in the order of the forward
        pass, then the rest, which the root holds."""
        rules = {parameter: rule for _, parameter, rule in parameter_rules(self._whole)}
        units, taken = [], set()
        for module in (*self._whole.sharding_units(), self._whole):
            parameters = [parameter for parameter in module.parameters() if parameter not in taken]
            taken.update(parameters)
            units.append([ParameterSpec(tuple(p.shape), rules[p]) for p in parameters])
        return units

    @property
    def parameters(self) -> Sequence[ParameterSpec]:
        """Those of all units."""
        return [parameter for unit in self.units for parameter in unit]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """H, K, V of a layer's state; of the largest, where they differ."""
        return max((block.state_shape for block in self.blocks.values()), key=math.prod)

    def flops_per_token(self, seq_len: int, *, backward: bool = True) -> TokenFLOPs:
        """The model's FLOPs for one token of sequences of `seq_len`. Matrix products only.

            linear    = 2 · the sum of K · N over the blocks' linear layers
            operator  = as each mixer says of itself
            head      = 2 · D · vocab

        With `backward` all is tripled, since each product has two in the backward pass. What is computed a second time
        is not counted (`recomputed_flops_per_token` is): this is the numerator of model FLOPs utilisation, MFU. The
        embedding is a look-up, elementwise work and the scan over ranks count as nothing.

        Args:
            seq_len: of a whole sequence.
            backward: count the backward pass as well.
        """
        passes = 3 if backward else 1
        linear = sum(block.count * _flops(block.products) for block in self.blocks.values())
        operator = sum(block.count * block.operator_flops(seq_len).forward for block in self.blocks.values())
        head = 2 * self.config.hidden_size * self.config.vocab_size
        return TokenFLOPs(float(passes * linear), float(passes * operator), float(passes * head))

    def recomputed_flops_per_token(self, seq_len: int, recompute: Recompute, segments: int = 1) -> TokenFLOPs:
        """The FLOPs that an optimizer step spends on computing things a second time, for one token: with the model's
        own (`flops_per_token`) they are the numerator of hardware FLOPs utilisation, HFU.

            operator's backward pass    as each mixer says of itself    always
            recompute=selective         the MLPs' linear layers, but for the last: what down gives, the backward pass
                                        does not read
            recompute=full              whole blocks, forward, but for what down gives
            segments M > 1              (M−1)/M · blocks, forward       all segments but the last go through the model
                                                                        once more, for their states; without the head

        The blocks' forward pass is that of `flops_per_token` less the head, which is never computed again: its
        gradients are taken while the logits are there. The lines add up, for each is another pass.

        Counted as there: matrix products, and of the pairs inside chunks the causal half, not the whole square. What a
        kernel's tiles compute only to mask it is no use of the hardware, and differs from implementation to
        implementation; all of it, with the sums of decays that are made as products with ones, is under 1 % of
        `gla_1b`'s FLOPs. The operator is that of GPUs: in PyTorch it makes the scores, too, a second time.

        Args:
            seq_len: of a whole sequence.
            recompute: `train.recompute`.
            segments: `train.segments`, M.
        """
        passes = (segments - 1) / segments
        linear = operator = 0.0
        for block in self.blocks.values():
            own, of_linear = block.operator_flops(seq_len), _flops(block.products)
            again = passes * of_linear
            if recompute is Recompute.selective:
                again += _flops(block.mlp_products[:-1])
            elif recompute is Recompute.full:
                again += of_linear - _flops(block.mlp_products[-1:])
            linear += block.count * again
            replayed = own.forward if recompute is Recompute.full else 0.0
            operator += block.count * (own.again + replayed + passes * own.forward)
        return TokenFLOPs(linear, operator, 0.0)

    @cached_property
    def _skeleton(self) -> LanguageModel:
        """The model with one block for each mixer, without values."""
        with torch.device("meta"):
            return LanguageModel(self.config, [MIXERS[name] for name in self.config.mixer_counts()])

    @cached_property
    def _whole(self) -> LanguageModel:
        """The model without values."""
        with torch.device("meta"):
            return self.build()


_SPECS: dict[str, ModelSpec] = {}


def spec_of(config: LanguageModelConfig) -> ModelSpec:
    """The specification of a model; the same object for equal configurations, so each is walked over once."""
    return _SPECS.setdefault(repr(config), ModelSpec(copy.deepcopy(config)))


def _flops(products: Sequence[Sequence[Product]]) -> int:
    return 2 * sum(k * n for group in products for k, n in group)


class _ProductsSeen(TorchDispatchMode):
    """The linear layers that are run, by shared input."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[Product]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.zeco.parallel_linear.default:
            self.groups.append([(weight.shape[1], weight.shape[0]) for weight in args[1]])
        elif func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.groups.append([tuple(args[-1].shape)])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _walk(count: int, block: Block) -> BlockSpec:
    """What one block is made of. How many tokens go through it does not matter."""
    x = torch.empty(1, 2, block.attn_norm.weight.shape[0], device="meta")
    with _ProductsSeen() as in_mixer:
        block.attn(x, Place(""), Boundary())
    with _ProductsSeen() as in_mlp:
        block.mlp(x)
    return BlockSpec(
        count,
        [tuple(parameter.shape) for parameter in block.parameters()],
        in_mixer.groups,
        in_mlp.groups,
        block.attn.state_shape,
        block.attn.operator_flops,
        block.activations(),
    )
