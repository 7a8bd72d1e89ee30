"""Short training runs inside the ranks of `run_distributed`, for tests that compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.comparison import largest, relative
from zeco_train.config.schema import Config, load_config
from zeco_train.lifecycle.join import Launch
from zeco_train.lifecycle.logs import close_logging
from zeco_train.lifecycle.watch import Watchdog
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics
from zeco_train.training.build import load_trainer
from zeco_train.training.checks import join_ranks
from zeco_train.training.opening import open_run

# A model of two small layers on real text; 768 is divisible by 1, 2, 3, 4 but shards are not multiples of 64.
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=48",
    "model.num_heads=3",
    "model.intermediate_size=80",
    "data.seq_len=768",
    "data.global_batch=4",
    "sched.warmup_steps=2",
    "train.log_every=1",
    "train.eval_sequences=3",
]


def train(rank: int, world_size: int, run_dir: str | Path, *overrides: str) -> dict[str, Any]:
    """Run the parts of `train.py` on this rank.

    Returns:
        `rows` of metrics.jsonl (rank 0; empty elsewhere), `parameters` in full, and the sequence ids of each step.
    """
    arguments = [*SMALL, f"run_dir='{run_dir}'", *overrides]
    config, launch = _load_once(rank, world_size, arguments), Launch(rank, world_size, rank)
    mesh = join_ranks(config, launch)
    run = open_run(config, arguments, mesh)
    trainer = load_trainer(run, mesh, Watchdog(launch, None))
    steps: list[list[int]] = []
    add = trainer.recorder.add

    def remember(result: Any, progress: Any) -> None:
        steps.append(result.sequence_ids)
        add(result, progress)

    trainer.recorder.add = remember  # type: ignore[method-assign]
    trainer.train()
    trainer.checkpointer.close()
    trainer.loader.close()
    trainer.recorder.close()
    close_logging()
    run.release()
    return {
        "rows": read_metrics(run.path / METRICS_FILE) if rank == 0 else [],
        "parameters": {name: full(p).clone() for name, p in trainer.step.model.named_parameters()},
        "sequence_ids": steps,
    }


def _load_once(rank: int, world_size: int, arguments: list[str]) -> Config:
    """The configuration of the arguments, composed by rank 0 alone for all ranks that have its arguments.

    On every rank that takes a fifth of a short run's CPU time.
    """
    if world_size == 1:
        return load_config(arguments)
    found: list[tuple[list[str], Config] | None] = [None]
    try:
        if rank == 0:
            found[0] = arguments, load_config(arguments)
    finally:
        # Also where rank 0 refuses its arguments: the others do so themselves.
        dist.broadcast_object_list(found)
    if found[0] is None or found[0][0] != arguments:
        return load_config(arguments)
    return found[0][1]


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_difference(rows: list[dict[str, Any]], reference: list[dict[str, Any]], key: str) -> float:
    """Maximum relative difference of a column, over the steps that have it, NaN if one is not finite in a run.

    Both runs must have the same rows.
    """
    assert [row["step"] for row in rows] == [row["step"] for row in reference]
    pairs = [(row[key], other[key]) for row, other in zip(rows, reference, strict=True) if key in other]
    assert pairs, f"no row has {key}"
    return largest(relative(value, other) for value, other in pairs)
