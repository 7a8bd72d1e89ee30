"""Activations of a block, as counted by the memory planner; each module lists its own (`activations`).

These are lists rather than measurements because the kept tensors depend on the compiler and the device. A test compares
them with the tensors that autograd and the compiler's partitioner save.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """Part of a block, by recompute setting.

    `input` is kept under every `train.recompute`, `mixer` is recomputed by `full`, `mlp` by `full` and `selective`.
    `replay` lists those tensors of `mixer` that `full` keeps as well, since its second forward pass takes them over.
    """

    input = "input"
    replay = "replay"
    mixer = "mixer"
    mlp = "mlp"


@dataclass(frozen=True)
class TokenTensor:
    """An activation with a fixed number of elements per token.

    Attributes:
        name: short description.
        width: elements per token.
        wide: fp32 (fp64 for fp64) even if the compute dtype is bf16.
        eager, compiled: whether it exists without and with `torch.compile`.
        cpu, gpu: whether it exists on that device; on a GPU whose kernels do not serve the operator, as on a CPU.
    """

    name: str
    width: int
    wide: bool = False
    eager: bool = True
    compiled: bool = True
    cpu: bool = True
    gpu: bool = True


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of elementwise work.

    Attributes:
        name: short description.
        width: elements per token of each tensor read or written.
        forward, backward: number of such tensors in a compiled block.
        wide: the tensors are fp32.
    """

    name: str
    width: int
    forward: int
    backward: int
    wide: bool = False


@dataclass(frozen=True)
class Activations:
    """Activations and traffic of one part of a block.

    Attributes:
        kept: saved by the forward pass for the backward pass.
        gradients: alive at the peak of the backward pass, in addition to the kept tensors.
        traffic: elementwise work.
    """

    kept: tuple[TokenTensor, ...]
    gradients: tuple[TokenTensor, ...] = ()
    traffic: tuple[Traffic, ...] = ()

    def __add__(self, other: Activations) -> Activations:
        return Activations(self.kept + other.kept, self.gradients + other.gradients, self.traffic + other.traffic)
