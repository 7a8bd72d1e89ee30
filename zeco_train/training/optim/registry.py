"""The optimizers by name, and the settings that pick one. A new one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from zeco_train.training.optim.adamw import ADAMW
from zeco_train.training.optim.spec import Group, OptimizerSettings, OptimizerSpec

_SPECS = (ADAMW,)
OPTIMIZERS: dict[str, OptimizerSpec] = {spec.name: spec for spec in _SPECS}
# The settings that not all of them read, and the optimizers that do.
SETTINGS = {key: [spec.name for spec in _SPECS if key in spec.settings] for spec in _SPECS for key in spec.settings}


class OptimizerName(Enum):
    """The names of `OPTIMIZERS`, as the type of a setting."""

    _ignore_ = "name"
    for name in OPTIMIZERS:
        vars()[name] = name


@dataclass
class OptimConfig(OptimizerSettings):
    """The settings, and `name`: which optimizer."""

    name: OptimizerName = OptimizerName["adamw"]

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        """Keys that need another setting to be read, which one, and whether it is set."""
        for name, readers in SETTINGS.items():
            yield name, f"optim={' or '.join(readers)}", self.spec.name in readers

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer."""
        return OPTIMIZERS[self.name.value]


def build_optimizer(
    model: nn.Module, config: OptimConfig, decays: Callable[[nn.Parameter], bool]
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters in two groups: those that `decays(parameter)` picks, and the rest."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[decays(parameter)].append(parameter)
    decayed: Group = {"params": groups[True], "weight_decay": config.weight_decay}
    return config.spec.build([decayed, {"params": groups[False], "weight_decay": 0.0}], config)
