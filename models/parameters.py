"""How parameters begin and how optimizers treat them: each module has a rule for each parameter of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class ParameterRule(NamedTuple):
    """What holds for one parameter.

    Attributes:
        init: `(parameter, deviation, generator)`: sets the initial values, in place. `deviation` is the model's
            `initializer_range`. Random values are drawn whole, in fp32, on the CPU: then they depend on the seed and
            the shape only, not on device, dtype (but for rounding) or number of ranks.
        decays: whether weight decay applies.
        is_projection: a matrix [N, K] that maps activations to activations, as the embedding, the head, norms and
            biases do not. Optimizers of matrices (Muon) apply to these.
        rows: heights of the matrices that are stacked along the first dimension of a projection; () for a single one.
    """

    init: Callable[[Tensor, float, torch.Generator], object]
    decays: bool
    is_projection: bool = False
    rows: tuple[int, ...] = ()


def _normal(parameter: Tensor, deviation: float, generator: torch.Generator) -> None:
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(values.normal_(0, deviation, generator=generator))


MATRIX = ParameterRule(_normal, decays=True)
PROJECTION = MATRIX._replace(is_projection=True)
SCALE = ParameterRule(lambda parameter, *_: parameter.fill_(1), decays=False)
BIAS = ParameterRule(lambda parameter, *_: parameter.zero_(), decays=False)

# Of torch's own modules, which cannot have rules themselves.
_OF_TORCH: tuple[tuple[type[nn.Module], Mapping[str, ParameterRule]], ...] = (
    (nn.Linear, {"weight": PROJECTION, "bias": BIAS}),
    (nn.Embedding, {"weight": MATRIX}),
)


@runtime_checkable
class HasRules(Protocol):
    """A module with parameters of its own."""

    def parameter_rules(self) -> Mapping[str, ParameterRule]:
        """Of the module's own parameters, not its children's, by name."""
        ...


def parameter_rules(model: nn.Module) -> Iterator[tuple[str, Parameter, ParameterRule]]:
    """Name, parameter and rule of each of a model's parameters, in the order of `named_parameters`.

    Raises:
        KeyError: a module has no rule for a parameter.
    """
    owners = {f"{prefix}." if prefix else "": module for prefix, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        prefix, own = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        yield name, parameter, _rules(owners[prefix])[own]


def _rules(module: nn.Module) -> Mapping[str, ParameterRule]:
    if isinstance(module, HasRules):
        return module.parameter_rules()
    return next((rules for kind, rules in _OF_TORCH if isinstance(module, kind)), {})
