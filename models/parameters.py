"""Initialisation and optimizer treatment of parameters: a module's `parameter_rules`, by name, are of those it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeco_train.ops import accumulation_dtype

# Sets a parameter's values in place, see `ParameterRule.init`.
Init = Callable[[Tensor, float, torch.Generator], object]


class ParameterRule(NamedTuple):
    """Initialisation and optimizer settings of one parameter.

    Attributes:
        init: `(parameter, deviation, generator)`: sets the initial values, in place. `deviation` is the model's
            `initializer_range`. Random values are drawn for the whole tensor, in fp32, on the CPU, so they depend only
            on the seed and the shape, not on device, dtype (but for rounding) or number of ranks.
        decays: whether weight decay applies.
        is_projection: a matrix [N, K] that maps activations to activations, unlike the embedding, the head, norms and
            biases. Matrix optimizers (Muon) apply to these.
        rows: heights of the matrices stacked along the first dimension of a projection; () for a single one.
        wide: stays fp32 although the model computes in bf16.
        draws: the numbers that `init` draws for each value, by one call: 0 or 1; None if that is not known. With it,
            other threads may draw what follows (`models.initial_values`).
    """

    init: Init
    decays: bool
    is_projection: bool = False
    rows: tuple[int, ...] = ()
    wide: bool = False
    draws: int | None = None


def uniform(low: float, high: float, of: Callable[[Tensor], Tensor] = lambda values: values) -> Init:
    """Initial values: a function of numbers from `low` to `high`, which may change them in place."""

    def init(parameter: Tensor, _: float, generator: torch.Generator) -> None:
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(of(values.uniform_(low, high, generator=generator)))

    return init


def _normal(parameter: Tensor, deviation: float, generator: torch.Generator) -> None:
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(values.normal_(0, deviation, generator=generator))


MATRIX = ParameterRule(_normal, decays=True, draws=1)
PROJECTION = MATRIX._replace(is_projection=True)
SCALE = ParameterRule(lambda parameter, *_: parameter.fill_(1), decays=False, draws=0)
BIAS = ParameterRule(lambda parameter, *_: parameter.zero_(), decays=False, draws=0)

# Rules for torch's own modules.
_OF_TORCH: tuple[tuple[type[nn.Module], Mapping[str, ParameterRule]], ...] = (
    (nn.Linear, {"weight": PROJECTION, "bias": BIAS}),
    (nn.Embedding, {"weight": MATRIX}),
)


def parameter_rules(model: nn.Module) -> Iterator[tuple[str, Parameter, ParameterRule]]:
    """Name, parameter and rule of each parameter of a model, in the order of `named_parameters`.

    Raises:
        KeyError: a module has no rule for a parameter.
    """
    owners = {f"{prefix}." if prefix else "": module for prefix, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        prefix, own = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        yield name, parameter, _rules(owners[prefix])[own]


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters in place; wide ones (`ParameterRule`) of a bf16 model are fp32."""
    for _, parameter, rule in parameter_rules(model):
        parameter.data = parameter.data.to(accumulation_dtype(dtype) if rule.wide else dtype)


def _rules(module: nn.Module) -> Mapping[str, ParameterRule]:
    # Of the module's own parameters, without its children's.
    own: Callable[[], Mapping[str, ParameterRule]] | None = getattr(module, "parameter_rules", None)
    return own() if own is not None else next((rules for kind, rules in _OF_TORCH if isinstance(module, kind)), {})
