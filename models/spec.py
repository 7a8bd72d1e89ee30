"""Model shape in numbers (parameters, FLOPs), from one walk over the model on the meta device.

The walk builds one block per mixer and runs it on a few meta tokens. Matrix products, and which of them share an input,
are recorded rather than summed by hand.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import LanguageModelConfig
from models.language_model import Block, LanguageModel
from models.mixer_registry import LAYERS
from models.mixers.base import OperatorFLOPs
from models.parameters import ParameterRule, cast, parameter_rules
from models.projections import set_matmul
from zeco_train.ops import gated_norm
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.linear import Matmul
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import Call
from zeco_train.ops.softmax import attention

Shape = tuple[int, ...]


class ParameterSpec(NamedTuple):
    """Shape and rule of a parameter, without its values."""

    shape: Shape
    rule: ParameterRule


# Tokens that a block is walked with; any number does.
_TOKENS = 8

# (K, N): input and output width of a linear layer, y [T, N] = x [T, K] Wᵀ.
Product = tuple[int, int]


@dataclass(frozen=True)
class TokenFLOPs:
    """FLOPs of one token, a multiply-add counting as two: of the blocks' linear layers, the operators, the logits."""

    linear: float
    operator: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.operator + self.head

    def __add__(self, other: TokenFLOPs) -> TokenFLOPs:
        return TokenFLOPs(self.linear + other.linear, self.operator + other.operator, self.head + other.head)


class AttentionSpec(NamedTuple):
    """Softmax attention of a layer; `window`: keys that a query reads at most, itself among them; None: all before."""

    heads: int
    key_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class BlockSpec:
    """The `count` blocks of one mixer."""

    count: int
    # Of one block.
    parameters: Sequence[Shape]
    # Linear layers in forward order, grouped by shared input; and those that `train.matmul=fp8` computes in fp8.
    mixer_products: Sequence[Sequence[Product]]
    mlp_products: Sequence[Sequence[Product]]
    fp8_products: Sequence[Product]
    # H, K, V of each of the mixer's states, and the name of its operator.
    state_shapes: tuple[tuple[int, int, int], ...]
    operators: Sequence[str]
    # Softmax attention in place of operators with states.
    attention: AttentionSpec | None
    # Width of the gated norm of the output; 0 without one.
    gated_norm: int
    operator_flops: Callable[[int], OperatorFLOPs]
    # The backward pass then reads the output of the MLP's last linear layer.
    norm_after: bool = False
    # Of a linear layer's product, forward or for its weight's gradient, that is computed beside the scan of states.
    flops_beside: int = 0

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """H, K, V of the operator's state; softmax layers have none."""
        return self.state_shapes[-1]

    @property
    def scans_matrices(self) -> bool:
        """Whether the transition of the operator's state is a matrix, [H, K, K]; softmax layers have none."""
        return bool(self.operators) and OPERATORS[self.operators[-1]].kind is Kind.matrix

    @property
    def scans(self) -> list[BlockSpec]:
        """This block with one operator each, of those whose states are scanned over all ranks."""
        pairs = zip(self.operators, self.state_shapes, strict=True)
        found = [(name, shape) for name, shape in pairs if not OPERATORS[name].state_is_halo]
        return [replace(self, operators=(name,), state_shapes=(shape,)) for name, shape in found]

    @property
    def halo_shapes(self) -> Sequence[tuple[int, int, int]]:
        """H, K, V of the states that cross one border only."""
        pairs = zip(self.operators, self.state_shapes, strict=True)
        return [shape for operator, shape in pairs if OPERATORS[operator].state_is_halo]

    def calls(self, dtype: torch.dtype, *, steps: bool = False) -> list[Call]:
        """What kernels on GPUs may serve, or PyTorch: of a pass over many tokens, or in `steps` of one token each."""
        norm = [Call("gated_norm", gated_norm.KERNELS, dtype, 0, self.gated_norm)] * (self.gated_norm > 0)
        if self.attention is not None:
            rule, dim = attention.STEP_KERNELS if steps else attention.KERNELS, self.attention.head_dim
            return [Call("softmax step" if steps else "softmax", rule, dtype, dim, dim), *norm]
        found = []
        for name, (_, key_dim, value_dim) in zip(self.operators, self.state_shapes, strict=True):
            operator = OPERATORS[name]
            dims = (0 if operator.state_is_halo else key_dim), value_dim
            if steps:
                found.append(Call(f"{name} step", operator.step_kernels, dtype, *dims))
            elif operator.kernels is not None:
                found.append(Call(name, operator.kernels, dtype, *dims))
        return [*found, *norm]

    @property
    def products(self) -> Sequence[Sequence[Product]]:
        return [*self.mixer_products, *self.mlp_products]

    @property
    def unread_products(self) -> Sequence[Sequence[Product]]:
        """Linear layers of the MLP whose output no backward pass reads: the last one."""
        return [] if self.norm_after else self.mlp_products[-1:]


class ModelSpec:
    """Properties of a model, from its configuration. Those that need the walk are computed on first use and cached."""

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config = config

    def build(self) -> LanguageModel:
        """The model, on the current default device, with torch's default initial values."""
        config = self.config
        return LanguageModel(config, [LAYERS[config.mixer_of(layer)] for layer in range(config.num_layers)])

    def allocate(self, dtype: torch.dtype, device: torch.device) -> LanguageModel:
        """The model on a device, its parameters cast to a dtype (`parameters.cast`), and their values undefined."""
        # On meta at first: torch's own initial values are slow, and would be overwritten.
        with torch.device("meta"):
            model = self.build()
            cast(model, dtype)
        model.to_empty(device=device)
        # `to_empty` replaces each module's parameters separately, which unties them.
        model.tie_weights()
        return model

    @cached_property
    def blocks(self) -> Mapping[str, BlockSpec]:
        counts, backbone = self.config.mixer_counts(), self._skeleton.model
        blocks = zip(counts.items(), backbone.blocks(), backbone.shared_parts(), strict=True)
        return {name: _walk(count, block, part) for (name, count), block, part in blocks}

    def calls(self, dtype: torch.dtype, *, steps: bool = False) -> list[tuple[str, Call]]:
        """`BlockSpec.calls` of all layers, with the layers in words."""
        layers: dict[str, list[int]] = {}
        for layer in range(self.config.num_layers):
            layers.setdefault(self.config.mixer_of(layer), []).append(layer)
        return [
            (f"{_described(layers[name])} ({name})", call)
            for name, block in self.blocks.items()
            for call in block.calls(dtype, steps=steps)
        ]

    @property
    def needs_halo(self) -> bool:
        """Whether some layers exchange states that cross one border only, such as a convolution's."""
        return any(LAYERS[name].needs_halo for name in self.config.mixer_counts())

    @cached_property
    def num_parameters(self) -> int:
        """Number of trainable parameters; a tied head counts once."""
        more = sum((block.count - 1) * sum(map(math.prod, block.parameters)) for block in self.blocks.values())
        return more + sum(parameter.numel() for parameter in self._skeleton.parameters())

    @cached_property
    def parameter_shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of all parameters by name, as in checkpoints and exported files; a tied head is the embedding."""
        return {name: parameter.shape for name, parameter in self._whole.named_parameters()}

    @cached_property
    def wide(self) -> frozenset[str]:
        """Names of the parameters that stay fp32 (`ParameterRule.wide`)."""
        return frozenset(name for name, _, rule in parameter_rules(self._whole) if rule.wide)

    @cached_property
    def units(self) -> Sequence[Sequence[ParameterSpec]]:
        """The parameters by FSDP unit: those of `LanguageModel.sharding_units` in forward order, then the root's."""
        rules = {parameter: rule for _, parameter, rule in parameter_rules(self._whole)}
        units, taken = [], set()
        for unit in (*self._whole.sharding_units(), self._whole):
            modules = unit if isinstance(unit, list) else [unit]
            of_unit = (parameter for module in modules for parameter in module.parameters())
            parameters = [parameter for parameter in of_unit if parameter not in taken]
            taken.update(parameters)
            units.append([ParameterSpec(tuple(p.shape), rules[p]) for p in parameters])
        return units

    @property
    def parameters(self) -> Sequence[ParameterSpec]:
        return [parameter for unit in self.units for parameter in unit]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """H, K, V of the largest state of a layer."""
        shapes = (shape for block in self.blocks.values() for shape in block.state_shapes)
        return max(shapes, key=math.prod, default=(0, 0, 0))

    @property
    def state_elements(self) -> int:
        """Elements of all states of all layers, for one sequence."""
        return sum(block.count * sum(map(math.prod, block.state_shapes)) for block in self.blocks.values())

    def flops_per_token(self, seq_len: int, *, backward: bool = True) -> TokenFLOPs:
        """The model's FLOPs for one token of sequences of `seq_len`. Matrix products only.

            linear    = 2 · the sum of K · N over the blocks' linear layers
            operator  = `Mixer.operator_flops`
            head      = 2 · D · vocab

        With `backward` all is tripled, since each product has two in the backward pass. Recomputation is not counted:
        this is the numerator of model FLOPs utilisation, MFU. Elementwise work and the scan count as nothing.
        """
        passes = 3 if backward else 1
        linear = sum(block.count * _flops(block.products) for block in self.blocks.values())
        operator = sum(block.count * block.operator_flops(seq_len).forward for block in self.blocks.values())
        head = 2 * self.config.hidden_size * self.config.vocab_size
        return TokenFLOPs(float(passes * linear), float(passes * operator), float(passes * head))

    def recomputed_flops_per_token(self, seq_len: int, recompute: Recompute, segments: int = 1) -> TokenFLOPs:
        """FLOPs per token that an optimizer step, in so many `segments`, spends on recomputation.

        Added to `flops_per_token` they are the numerator of hardware FLOPs utilisation, HFU:

            operator's backward pass    `OperatorFLOPs.again`               always
            recompute=selective         the MLPs' linear layers without the last: the backward pass does not read the
                                        output of down
            recompute=full              whole blocks, forward, without the product of down and softmax attention, whose
                                        outputs are kept
            segments M > 1              (M−1)/M · blocks, forward       all segments but the last go through the model
                                                                        once more, for their states; without the head

        The lines add up, for each is a separate pass. Of the pairs inside chunks only the causal half counts: products
        that a kernel's tiles compute and then mask are no useful work, and with the sums of decays under 1 % of
        `gla_1b`'s FLOPs. In PyTorch the operator also recomputes the scores.
        """
        passes = (segments - 1) / segments
        linear = operator = 0.0
        for block in self.blocks.values():
            own, of_linear = block.operator_flops(seq_len), _flops(block.products)
            again = passes * of_linear
            if recompute is Recompute.selective:
                again += _flops(block.mlp_products) - _flops(block.unread_products)
            elif recompute is Recompute.full:
                again += of_linear - _flops(block.unread_products)
            linear += block.count * again
            replayed = own.forward if recompute is Recompute.full and block.attention is None else 0.0
            operator += block.count * (own.again + replayed + passes * own.forward)
        return TokenFLOPs(linear, operator, 0.0)

    @cached_property
    def _skeleton(self) -> LanguageModel:
        return self.one_of_each()

    def one_of_each(self) -> LanguageModel:
        """The model with one block per mixer, new, on the meta device."""
        with torch.device("meta"):
            return LanguageModel(self.config, [LAYERS[name] for name in self.config.mixer_counts()])

    @cached_property
    def _whole(self) -> LanguageModel:
        with torch.device("meta"):
            return self.build()


_SPECS: dict[str, ModelSpec] = {}


def spec_of(config: LanguageModelConfig) -> ModelSpec:
    """The specification of a model; cached by configuration, so each model is walked once."""
    # Configurations are mutable, so they have no hash, and the specification needs its own copy.
    return _SPECS.setdefault(repr(config), ModelSpec(copy.deepcopy(config)))


# `layer 3`, `layers 0 to 23`, or `layers 3, 7, 11, …`.
def _described(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) == layers[-1] - layers[0] + 1:
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {', '.join(map(str, layers[:3]))}{', …' if len(layers) > 3 else ''}"


def _flops(products: Sequence[Sequence[Product]]) -> int:
    return 2 * sum(k * n for group in products for k, n in group)


class _ProductsSeen(TorchDispatchMode):
    # Records the linear layers that run, grouped by shared input, and the other operators.
    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[Product]] = []
        self.in_fp8: list[Product] = []
        self.operators: list[str] = []
        self.attention: AttentionSpec | None = None
        self.gated_norm = self.flops_beside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.zeco.mix.default:
            self.operators.append(args[1])
            self.flops_beside += 2 * args[8][1].numel() if args[8] else 0
        elif func is torch.ops.zeco.attend.default:
            (*_, heads, head_dim), key_heads = args[0].shape, args[1].shape[2]
            self.attention = AttentionSpec(heads, key_heads, head_dim, args[-1])
        elif func is torch.ops.zeco.gated_norm.default:
            self.gated_norm = args[0].shape[-1]
        elif func is torch.ops.zeco.mamba2_output.default:
            self.gated_norm = args[3].shape[-1]
        elif func is torch.ops.zeco.parallel_linear.default:
            self.groups.append([(weight.shape[1], weight.shape[0]) for weight in args[1]])
            self.in_fp8 += itertools.compress(self.groups[-1], args[2])
        # The last argument is Wᵀ, [K, N].
        elif func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.groups.append([tuple(args[-1].shape)])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _walk(count: int, block: Block, part: Tensor | None) -> BlockSpec:
    x = torch.empty(1, _TOKENS, block.attn_norm.weight.shape[0], device="meta")
    # The products are the same, and the op names those in fp8.
    set_matmul(block, Matmul.fp8)
    positions = torch.empty(_TOKENS, dtype=torch.int64, device="meta")
    position = SequencePosition((0, _TOKENS)).with_tensors(None, positions)
    with _ProductsSeen() as in_mixer:
        # No exchange: on the meta device the op computes shapes only.
        block.attn(x, position, (StateInput(),) * block.num_states, part)
    with _ProductsSeen() as in_mlp:
        if block.has_mlp:
            block.mlp(x)
    return BlockSpec(
        count,
        [tuple(parameter.shape) for parameter in block.parameters()],
        in_mixer.groups,
        in_mlp.groups,
        [*in_mixer.in_fp8, *in_mlp.in_fp8],
        block.attn.state_shapes,
        in_mixer.operators,
        in_mixer.attention,
        in_mixer.gated_norm,
        block.attn.operator_flops,
        block.norm_after,
        in_mixer.flops_beside,
    )
