"""The optimizers by name, and their settings. A new optimizer is a file and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch.nn import Parameter

from data.config import FIXED
from models.parameters import ParameterRule
from zeco_train.training.optim.adamw import ADAMW
from zeco_train.training.optim.muon import MUON
from zeco_train.training.optim.optimizer_spec import OptimizerSettings, OptimizerSpec, Precision

_SPECS = (ADAMW, MUON)
OPTIMIZERS: dict[str, OptimizerSpec] = {spec.name: spec for spec in _SPECS}
# Settings that only some optimizers read, with those optimizers.
SETTINGS = {key: [spec.name for spec in _SPECS if key in spec.settings] for spec in _SPECS for key in spec.settings}


class OptimizerName(Enum):
    """The names of `OPTIMIZERS`, as the type of a setting."""

    _ignore_ = "name"
    for name in OPTIMIZERS:
        vars()[name] = name


@dataclass
class OptimConfig(OptimizerSettings):
    """`OptimizerSettings`, and the choice of the optimizer.

    Attributes:
        name: which optimizer.
    """

    name: OptimizerName = field(default=OptimizerName["adamw"], metadata=FIXED)

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        for name, readers in SETTINGS.items():
            yield name, f"optim={' or '.join(readers)}", self.spec.name in readers

    @property
    def spec(self) -> OptimizerSpec:
        return OPTIMIZERS[self.name.value]

    def resolved(self, compute: torch.dtype) -> OptimConfig:
        """These settings for a model that computes in this dtype, without `auto`."""
        if self.ns_dtype is not Precision.auto:
            return self
        return replace(self, ns_dtype=Precision.bf16 if compute == torch.bfloat16 else Precision.master)


def build_optimizer(
    rules: Iterable[tuple[str, Parameter, ParameterRule]], config: OptimConfig, compute: torch.dtype
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of `parameter_rules`, for a model that computes in `compute`."""
    trainable = [(parameter, rule) for _, parameter, rule in rules if parameter.requires_grad]
    return config.spec.build(trainable, config.resolved(compute))
