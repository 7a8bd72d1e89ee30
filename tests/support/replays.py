"""Runs whose steps are replayed as CUDA graphs, and the evidence of it in their logs."""

from __future__ import annotations

import re

import torch

# The sizes of `model=gla_tiny`, which `commands.SMALL` makes smaller: the kernels need them. Two micro-batches of two
# sequences; the kernels that Inductor chooses may differ from start to start.
REPLAYABLE = [
    "model.num_layers=4",
    "model.hidden_size=128",
    "model.num_heads=4",
    "model.intermediate_size=384",
    "data.micro_batch=2",
    "train.dtype=bf16",
    "train.compile=never",
]
SEQ_LEN = 512
_STEPS = re.compile(r"step \d+: sequences ")
# See `StepGraphs.begin_step`.
REPLAYS_BEGIN = "train.cuda_graphs: steps are replayed from now on"


def can_replay() -> bool:
    """Whether this machine has the devices on which two ranks replay their steps."""
    return torch.cuda.device_count() >= 2


def replayed_steps(log: str) -> int:
    """The steps that the last start in a rank's log has finished since it said that it replays them."""
    _, begin, rest = log.rpartition(REPLAYS_BEGIN)
    return len(_STEPS.findall(rest)) if begin else 0
