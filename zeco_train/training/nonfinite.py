"""Finds the first non-finite tensor behind a loss or gradient norm that is NaN or infinite.

Such a step never changes weights or optimizer state (`zeco_train.training.step`); `train.nonfinite` sets whether the
run skips it or ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from torch import nn

from zeco_train.distributed.mesh import gather
from zeco_train.errors import ConfigError

# Time as (phase, position within the phase), and a description of the tensor.
Finding = tuple[tuple[int, int], str]


def skip_limit(policy: str) -> int:
    """How many steps in a row `train.nonfinite` allows to skip: 0 for `stop`, n for `skip:n`.

    Raises:
        ConfigError: it is neither.
    """
    if policy == "stop":
        return 0
    match = re.fullmatch(r"skip:([1-9]\d{0,8})", policy)
    if match is None:
        raise ConfigError("train.nonfinite", policy, "must be stop, or skip:N to leave out up to N ≥ 1 steps in a row")
    return int(match[1])


def explain(model: nn.Module, symptom: str, forwards: Iterable[Callable[[], object]], world_size: int) -> str:
    """Find where a non-finite value first appears: in weights, then activations as they are computed, then gradients.

    Collective: every rank runs the step's forward passes once more, with hooks, on unchanged weights.

    Args:
        model: after the step's backward passes, so with gradients.
        symptom: such as "the loss is nan".
        forwards: the forward pass of each of this rank's micro-batches.
        world_size: number of ranks.

    Returns:
        Symptom, tensor with its layer, and rank, as text; the same on every rank.
    """
    # Gradients before the forward passes, which all-gather the parameters and so hide their sharded gradients.
    findings = [
        _first_parameter(model, "weight"),
        _first_parameter(model, "gradient"),
        _first_activation(model, forwards),
    ]
    gathered = gather(findings, world_size)
    found = sorted((f[0], rank, f[1]) for rank, of_rank in enumerate(gathered) for f in of_rank if f is not None)
    if not found:
        return f"{symptom}, though every tensor is finite: a sum over them overflowed"
    _, rank, what = found[0]
    return f"{symptom}; the first non-finite tensor is the {what}, on rank {rank}"


def _first_parameter(model: nn.Module, kind: str) -> Finding | None:
    """The first parameter whose weight, or gradient, is not finite, in order of use, or of computation."""
    parameters = list(enumerate(model.named_parameters()))
    for position, (name, parameter) in parameters if kind == "weight" else reversed(parameters):
        tensor = parameter if kind == "weight" else parameter.grad
        if tensor is not None and not _is_finite(tensor):
            return (0, position) if kind == "weight" else (2, -position), f"{kind} of {name}"
    return None


def _first_activation(model: nn.Module, forwards: Iterable[Callable[[], object]]) -> Finding | None:
    """The first module, in order of execution, whose output is not finite."""
    found: list[Finding] = []
    executed = 0

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            nonlocal executed
            executed += 1
            if not found and isinstance(output, torch.Tensor) and not _is_finite(output):
                found.append(((1, executed), f"output of {name or 'the model'}"))

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        # Compiled code does not run the hooks of inner modules.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            # All of them, even after a finding: the forward passes are collective.
            for forward in forwards:
                forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _is_finite(tensor: torch.Tensor) -> bool:
    # A DTensor's own shard, without communication: ranks stop their searches at different tensors.
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
