"""Tensors of a block whose memory and traffic a planner counts; each module lists its own (`activations`).

They are lists, not measurements, since what is kept depends on the compiler and on the device; a test compares them
with what autograd and the compiler's partitioner keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """Of a block: what every setting of `train.recompute` keeps, what `full` computes again, and what `selective` does,
    too."""

    input = "input"
    mixer = "mixer"
    mlp = "mlp"


@dataclass(frozen=True)
class TokenTensor:
    """A tensor of so many elements a token.

    Attributes:
        name: what it is.
        width: elements a token.
        wide: fp32 (fp64 for fp64) also where the compute dtype is bf16.
        eager, compiled: whether it exists without `torch.compile`, and with it.
        cpu, gpu: whether it exists on that device.
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
    """Elementwise work.

    Attributes:
        name: what it is.
        width: elements a token of the tensors that it reads or writes.
        forward, backward: how many of them, in a compiled block.
        wide: they are fp32.
    """

    name: str
    width: int
    forward: int
    backward: int
    wide: bool = False


@dataclass(frozen=True)
class Activations:
    """Of one part of a block.

    Attributes:
        kept: from the forward pass to the backward pass.
        gradients: alive at the fullest moment of the backward pass, beside what was kept.
        traffic: its elementwise work.
    """

    kept: tuple[TokenTensor, ...]
    gradients: tuple[TokenTensor, ...] = ()
    traffic: tuple[Traffic, ...] = ()

    def __add__(self, other: Activations) -> Activations:
        return Activations(self.kept + other.kept, self.gradients + other.gradients, self.traffic + other.traffic)
