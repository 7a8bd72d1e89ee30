"""For how long a checkpoint holds training up, asynchronous and synchronous, in turns of one run.

    [torchrun --nproc-per-node N] python -m zeco_train.bench.checkpoint [--rounds N] [KEY=VALUE …]

KEY=VALUE as of train.py; without any, `gla_125m` with 256 tokens a step. A save's stall is what the loop of steps waits
for it: the call, and before the next update of the weights. What the steps beside the writing lose, since that takes
processor time too, is told apart. Exits with 1 if the median stall is not below a quarter of the synchronous one.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.bench.checkpoint")

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals

import torch
import torch.distributed as dist

from zeco_train.bench.samples import slowest_rank
from zeco_train.checkpoint.checkpointer import CheckpointMode
from zeco_train.checkpoint.files import complete_checkpoints
from zeco_train.config.schema import Config, load_config
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.lifecycle.job import Advice, Job, run_job
from zeco_train.system.signals import StopRequest
from zeco_train.training.build import Parts, build, init, open_run
from zeco_train.training.trainer import Trainer

LARGEST_RATIO = 0.25
_PLAIN_STEPS = 2
_DEFAULTS = [
    "name=bench_checkpoint",
    "model=gla_125m",
    "data.seq_len=256",
    "data.global_batch=1",
    "train.eval_sequences=0",
    "checkpoint.keep=1",
    "run_dir=runs/bench/checkpoint",
]
_ADVICE = Advice("measure again", "a smaller model needs less", "parallel.timeout_seconds")


@dataclass
class Stalls:
    """Seconds, a value a save, of this rank.

    Attributes:
        plain: of steps that no save is beside.
        held: for which a save of either mode has held up the loop.
        beside: by which the steps beside the writing took longer than a plain one, all together.
        written: from the begin of a save to its last byte.
    """

    plain: list[float] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=lambda: {"sync": [], "async": []})
    beside: list[float] = field(default_factory=list)
    written: dict[str, list[float]] = field(default_factory=lambda: {"sync": [], "async": []})


class _Loop:
    """Steps and saves under a clock."""

    def __init__(self, config: Config, parts: Parts, stop: StopRequest) -> None:
        self.config, self.parts, self._stop = config, parts, stop
        self.trainer, self.stalls = Trainer(config, parts), Stalls()
        self._waited = 0.0
        self._wait_staged = parts.checkpointer.wait_staged
        parts.checkpointer.wait_staged = self._timed_wait  # type: ignore[method-assign]

    def step(self) -> float:
        began = time.perf_counter()
        if isinstance(self.trainer.train_step(self._stop), Signals):
            raise ZecoError("told to stop, nothing was measured")
        self._finish_device()
        return time.perf_counter() - began

    def plain_steps(self) -> None:
        self.stalls.plain += [self.step() for _ in range(_PLAIN_STEPS)]

    def save(self, mode: str) -> None:
        """One save and, of an asynchronous one, the steps until all ranks have written it."""
        self.config.checkpoint.mode = CheckpointMode[mode]
        self._finish_device()
        dist.barrier()
        began, self._waited = time.perf_counter(), 0.0
        self.trainer.save()
        held = time.perf_counter() - began
        beside = []
        while mode == "async" and self._any_writes():
            beside.append(self.step())
        self.stalls.written[mode].append(time.perf_counter() - began)
        self.stalls.held[mode].append(held + self._waited)
        if mode == "async":
            plain = statistics.median(self.stalls.plain)
            self.stalls.beside.append(max(0.0, sum(beside) - self._waited - len(beside) * plain))
            self.parts.checkpointer.due(self.parts.progress)

    def _any_writes(self) -> bool:
        flag = torch.tensor(int(self.parts.checkpointer.is_writing))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _timed_wait(self) -> None:
        began = time.perf_counter()
        self._wait_staged()
        self._waited += time.perf_counter() - began

    def _finish_device(self) -> None:
        if self.parts.mesh.device.type == "cuda":
            torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> int:
    """Measure; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="saves of each mode")
    options, overrides = parser.parse_known_args(arguments)
    return run_job(partial(_run, max(1, options.rounds), overrides), _ADVICE)


def _run(rounds: int, overrides: list[str], job: Job) -> int:
    arguments = [*_DEFAULTS, *overrides]
    config = load_config(arguments)
    if complete_checkpoints(Path(config.run_dir)):
        raise ConfigError("run_dir", config.run_dir, "holds checkpoints, which would be lost; name a new folder")
    job.enter("joining the other ranks")
    mesh = init(config, job.launch)
    job.guard(mesh.timeout)
    run = open_run(config, arguments, mesh)
    job.closing.callback(run.release)
    parts = build(config, run, mesh, job.watchdog)
    for close in (parts.recorder.close, parts.loader.close, parts.checkpointer.close):
        job.closing.callback(close)
    with StopRequest() as stop:
        loop = _Loop(config, parts, stop)
        # The first steps and saves make what the later ones use: optimizer state, host memory.
        loop.plain_steps()
        for mode in ("sync", "async"):
            loop.save(mode)
        first, loop.stalls = loop.stalls, Stalls()
        for _ in range(rounds):
            for mode in ("sync", "async"):
                loop.plain_steps()
                loop.save(mode)
    parameters = sum(p.numel() for p in parts.model.parameters())
    ratio = _report(
        loop.stalls, first, mesh.world_size, f"{config.model.name}, {parameters:,} parameters", mesh.is_main
    )
    dist.barrier()
    if mesh.is_main:
        shutil.rmtree(parts.checkpointer.folder)
    return 0 if ratio < LARGEST_RATIO else 1


def _report(stalls: Stalls, first: Stalls, world_size: int, title: str, is_main: bool) -> float:
    """Print the table, the slowest rank of each save counting; returns async over sync. Collective."""

    def over_ranks(own: list[float]) -> list[float]:
        everyone: list[list[float]] = [[]] * world_size
        dist.all_gather_object(everyone, own)
        return slowest_rank(everyone)

    rows = {
        "step without a save": over_ranks(stalls.plain),
        "sync: steps held up": over_ranks(stalls.held["sync"]),
        "async: steps held up": over_ranks(stalls.held["async"]),
        "async: steps beside it slower, in all": over_ranks(stalls.beside),
        "sync: begin to disk": over_ranks(stalls.written["sync"]),
        "async: begin to disk, seen after a step": over_ranks(stalls.written["async"]),
    }
    first_async = over_ranks(first.held["async"])
    medians = {name: statistics.median(values) for name, values in rows.items()}
    ratio = medians["async: steps held up"] / medians["sync: steps held up"]
    if is_main:
        print(f"{title}, {world_size} rank(s), {len(stalls.held['sync'])} saves of each mode\n")
        print(f"{'seconds':42}{'median':>9}{'least':>9}{'most':>9}")
        for name, values in rows.items():
            print(f"{name:42}{medians[name]:9.3f}{min(values):9.3f}{max(values):9.3f}")
        print(f"\nthe first asynchronous save, which makes the host memory: {first_async[0]:.3f} s")
        print(f"asynchronous over synchronous: {ratio:.3f} (less than {LARGEST_RATIO} is asked for)")
        print(json.dumps({"benchmark": "checkpoint", "seconds": rows, "ratio": ratio}), flush=True)
    return ratio
