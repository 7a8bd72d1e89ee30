"""Section `train`: the length of a run, how its steps are executed, and what ends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch

from data.config import FIXED, LARGEST_COUNT
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import Device
from zeco_train.errors import ConfigError
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import Kernels
from zeco_train.system.numbers import check_least
from zeco_train.training.profiler import check_profile


class Dtype(Enum):
    """Compute dtype. Master weights and optimizer state are fp64 for fp64, else fp32."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"

    @property
    def compute(self) -> torch.dtype:
        """Of activations and matrix products."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[self.value]

    @property
    def master(self) -> torch.dtype:
        """Of master weights and optimizer state."""
        return torch.float64 if self is Dtype.fp64 else torch.float32


class Compile(Enum):
    """Whether to fuse the operations between matrix products with `torch.compile`.

    `auto`: on CUDA devices, except with parallel=torch_ddp.
    """

    auto = "auto"
    always = "always"
    never = "never"

    def applies(self, strategy: Strategy, *, on_cuda: bool) -> bool:
        return self is Compile.always or (self is Compile.auto and on_cuda and strategy is not Strategy.torch_ddp)


class CudaGraphs(Enum):
    """Whether to replay steps as CUDA graphs. `auto`: on CUDA devices, where a step can be captured."""

    auto = "auto"
    off = "off"


def skip_limit(policy: str) -> int:
    """Steps in a row that `train.nonfinite` allows to skip: 0 for `stop`, n for `skip:n`; else `ConfigError`."""
    if policy == "stop":
        return 0
    match = re.fullmatch(r"skip:([1-9]\d{0,8})", policy)
    if match is None:
        raise ConfigError("train.nonfinite", policy, "must be stop, or skip:N to leave out up to N ≥ 1 steps in a row")
    return int(match[1])


@dataclass
class TrainConfig:
    """The training loop: length, precision, validation, memory, and policies.

    Attributes:
        steps: optimizer steps of the whole run.
        matmul: dtype of the products of the blocks' linear layers; `bf16` is the compute dtype, `fp8` needs a GPU with
            it.
        log_every: steps between two rows of metrics.jsonl.
        eval_every: steps between two validation losses (0: only at the end).
        eval_sequences: largest number of held-out sequences for a validation loss (0: no validation).
        segments: parts of a sequence, run one after another; each goes on from the last state of the one before. Memory
            is that of one part; the gradient is that of the whole sequence.
        recompute: which activations the backward pass recomputes, to save memory.
        kernels: what happens with calls that kernels on GPUs do not serve; auto: a warning, require: an error.
        deterministic: runs repeat their bits on GPUs, in more time. The compiler of the blocks does not choose by
            measurement between kernels that round differently, and the backward pass of softmax attention is
            FlashAttention's, in one order. It takes more time, and memory: in fp32 the gradients of a layer's queries
            several times (132 over the rank's heads on an H100 or H200).
        nonfinite: what happens at a loss or gradient norm that is NaN or infinite. `stop` ends the run. `skip:N` skips
            up to N such steps in a row; data, step and learning rate advance, weights do not change.
        profile: START:STOP, the steps (counted from 1, STOP included) to profile; null: none.
        profile_ranks: ranks that are profiled.
    """

    steps: int = 1000
    dtype: Dtype = field(default=Dtype.fp32, metadata=FIXED)
    matmul: Matmul = field(default=Matmul.bf16, metadata=FIXED)
    device: Device = Device.auto
    log_every: int = 10
    eval_every: int = 0
    eval_sequences: int = 16
    segments: int = 1
    recompute: Recompute = Recompute.none
    compile: Compile = Compile.auto
    cuda_graphs: CudaGraphs = CudaGraphs.auto
    kernels: Kernels = Kernels.auto
    deterministic: bool = False
    nonfinite: str = "stop"
    profile: str | None = None
    profile_ranks: list[int] = field(default_factory=lambda: [0])

    def validate(self) -> None:
        check_least(self, "train", steps=1, log_every=1, segments=1, eval_every=0, eval_sequences=0)
        if self.steps > LARGEST_COUNT:
            raise ConfigError("train.steps", self.steps, f"must be ≤ {LARGEST_COUNT}")
        skip_limit(self.nonfinite)
        check_profile(self.profile, self.profile_ranks, self.steps)

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        yield "profile_ranks", "train.profile", self.profile is not None
