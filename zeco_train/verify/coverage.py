"""What a run of `verify` did not cover, from what ran."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.registry import MIXERS
from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.distributed.parallelize import Strategy
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.registry import OPERATORS
from zeco_train.sp.attention.registry import METHODS
from zeco_train.sp.registry import BACKENDS
from zeco_train.training.optim.registry import OPTIMIZERS
from zeco_train.verify.report import Row

# By kind, as in `Row.uses`.
_KNOWN = {
    "operator": [*OPERATORS],
    "scan": [*BACKENDS, *(scan.name for scan in ALL_SCANS)],
    "method": [*METHODS],
    "mixer": [*MIXERS],
    "strategy": [each.value for each in Strategy],
    "recompute": [each.value for each in Recompute],
    "optimizer": [*OPTIMIZERS],
}
_NEVER = (
    "shards of unequal lengths, which evaluation and generation have",
    "train.matmul=fp8, train.compile=always and bf16 training, whose results are rounded differently",
    "data preparation, checkpoints, evaluation, generation and exports, which have tests of their own",
)


def not_covered(rows: Sequence[Row], device: torch.device, launch: Launch) -> list[str]:
    """One line each; the first ones are of this machine."""
    found = []
    if device.type != "cuda":
        found.append("no GPU: Triton kernels, NCCL, symmetric memory, CUDA graphs, bf16")
    else:
        found.append("training steps and more ranks than launched ran on the CPU, without kernels and NCCL")
    if launch.world_size <= launch.local_world_size or launch.world_size == 1:
        found.append("one machine: lane and the other scans between machines ran between groups of ranks of this one")
    largest = max((row.sp_size for row in rows), default=1)
    found.append(f"more than {largest} ranks that share a sequence, and lengths beyond those above")
    used = {use for row in rows if not row.problem for use in row.uses}
    for kind, names in _KNOWN.items():
        if missing := [name for name in names if f"{kind} {name}" not in used]:
            found.append(f"{kind}: {', '.join(missing)}")
    reasons = dict.fromkeys(f"{row.backend}: {row.reason}" for row in rows if row.reason)
    return [*found, *_NEVER, *(f"skipped: {reason}" for reason in reasons)]
