"""Settings of how a training step is executed: its loss is the same but for rounding."""

from __future__ import annotations

from enum import Enum


class Compile(Enum):
    """Whether to fuse the operations between matrix products with `torch.compile`. `auto`: on CUDA devices."""

    auto = "auto"
    always = "always"
    never = "never"


class CudaGraphs(Enum):
    """Whether to replay steps as CUDA graphs. `auto`: on CUDA devices, where a step can be captured."""

    auto = "auto"
    off = "off"
