"""Question: what is the longest sequence that trains, by strategy, recomputation and backend, beside the plan's?
Command: python -m lab.longest ranks=4 'strategies=[ddp,zero1,zero2,zero3]' 'recompute=[none,full]' 'variants=[zeco]'
Date: -
Answer: not measured on GPUs yet; docs/papers.md has LASP's. Bisection of real steps:

A trial is a run of the trainer, in processes of its own, on a sequence of random tokens; one that is out of memory is
an answer. All lengths are multiples of `unit` tokens a rank and segment. The search begins at the planned length
(`python -m zeco_train.plan longest=true`) on GPUs, and ends when the shortest length that does not fit is at most a
part of `precision` above the longest that does.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.store.writer import StoreWriter
from lab.bench_case import LabCase
from zeco_train.bench.case import Report
from zeco_train.bench.config import OfModelConfig
from zeco_train.bench.session import Row, Session
from zeco_train.config.schema import Config, load_config
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import are_on_cuda
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.advice import longest_sequence
from zeco_train.plan.case import build_case
from zeco_train.plan.config import PlanSettings, Request
from zeco_train.plan.devices import Gpu
from zeco_train.sp.backend_registry import SHARING
from zeco_train.system.environment import query_gpus
from zeco_train.system.files import METRICS_FILE
from zeco_train.system.numbers import check_least, largest
from zeco_train.system.signals import StopRequest, run_command
from zeco_train.tracking.metrics import read_metrics
from zeco_train.training.config import Compile, CudaGraphs

# In the output of a trial: the line of this project, what NCCL and C++ libraries say, and torchrun of a rank that the
# kernel has killed for its memory.
_OUT_OF_MEMORY = (": out of memory (", "'out of memory'", "bad_alloc", "allocate memory", "MemoryError", "(SIGKILL)")
# Of a new thread, whose stack is memory; without a limit of it, the machine's threads may be all taken.
_OUT_OF_LIMIT = ("can't start new thread", "Resource temporarily unavailable")
COLUMNS = {
    "model": ("model", "<20"),
    "strategy": ("strategy", "<9"),
    "recompute": ("recompute", "<9"),
    "variant": ("backend", "<8"),
    "tokens": ("tokens", ">11:,"),
    "planned_tokens": ("planned", ">11:,"),
    "ratio": ("of it", ">6:.3f"),
    "memory_gb": ("GB", ">7:.2f"),
    "tokens_per_second": ("tokens/s", ">10:.0f"),
    "trials": ("trials", ">6"),
}


@dataclass
class LongestConfig(OfModelConfig):
    """Settings of case `longest`.

    Attributes:
        warmup: steps of a trial before its last one; CUDA graphs are captured in the third.
        variants: backends, as `sp=`; empty: dp, and the others if there are ranks to share with.
        ranks: that train together; this command starts them.
        strategies: of the parameters, as `parallel=`.
        recompute: as `train.recompute`; each combination with `every`, `strategies` and `variants` is a search.
        every: patterns of softmax attention, one layer in this many, 0 in none; empty: the model's own.
        segments, compile, cuda_graphs: as train.py's `train.segments` and so on.
        micro_batches: sequences of a step in each group of ranks that share one.
        unit: lengths are multiples of so many tokens a rank and segment.
        precision: of a length, relative.
        most: tokens of a sequence, at most.
        memory_gb: of a process on a CPU, its data in 10^9 bytes; null: no limit of its own.
        trial_seconds: longest time of a trial.
    """

    warmup: int = 3
    variants: list[str] = field(default_factory=list)
    ranks: int = 1
    strategies: list[Strategy] = field(default_factory=lambda: [Strategy.zero2])
    recompute: list[Recompute] = field(default_factory=lambda: [*Recompute])
    every: list[int] = field(default_factory=list)
    segments: int = 1
    compile: Compile = Compile.auto
    cuda_graphs: CudaGraphs = CudaGraphs.auto
    micro_batches: int = 1
    unit: int = 1024
    precision: float = 0.05
    most: int = 1 << 26
    memory_gb: float | None = None
    trial_seconds: float = 300.0

    def validate(self) -> None:
        super().validate()
        self.variants = self.variants or ["dp", *(SHARING if self.ranks > 1 else ())]
        self._check_different("variants", ("dp", *SHARING))
        for name in ("strategies", "recompute", "every"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or (not values and name != "every"):
                raise ConfigError(name, values, "must be a list of different ones")
        check_least(self, ranks=1, segments=1, micro_batches=1, unit=1, most=1)
        if self.most < (least := self.unit * self.segments * self.ranks):
            raise ConfigError("most", self.most, f"must be ≥ {least}, one unit of each rank and segment")
        if not 0 <= self.precision < 1:
            raise ConfigError("precision", self.precision, "must be ≥ 0 and < 1")
        for name in ("memory_gb", "trial_seconds"):
            if (value := getattr(self, name)) is not None and not 0 < value <= 1e6:
                raise ConfigError(name, value, "must be > 0 and ≤ 1e6")
        self._load_run()

    def trial_overrides(self, every: int | None, strategy: Strategy, recompute: Recompute, backend: str) -> list[str]:
        """Overrides of a trial's run, all but its files and its length."""
        dp_size = self.ranks if backend == "dp" else 1
        return [
            f"model={self.model}", *self.overrides, *([] if every is None else [f"model.attn.every={every or 'null'}"]),
            f"train.dtype={self.dtype.name}", f"seed={self.seed}", f"train.kernels={self.kernels.name}",
            f"parallel={strategy.name}", f"train.recompute={recompute.name}", f"sp={backend}",
            f"sp.size={1 if backend == 'dp' else self.ranks}", f"train.segments={self.segments}",
            f"train.compile={self.compile.name}", f"train.cuda_graphs={self.cuda_graphs.name}",
            "data=tokens", f"data.global_batch={dp_size * self.micro_batches}", "data.micro_batch=1",
            "train.eval_sequences=0", f"train.steps={self.warmup + 1}",
            "sched=constant", "sched.warmup_steps=0", "checkpoint.every=0", "checkpoint.final=false",
            f"parallel.timeout_seconds={self.timeout_seconds}",
        ]  # fmt: skip

    def load_trial(self, overrides: Sequence[str]) -> Config:
        """A trial's run; `ConfigError` if it is refused."""
        return load_config([*overrides, "data.path=store"])


class FailedTrialError(ZecoError):
    """A trial that ended for another reason than its memory."""


@dataclass
class Trials:
    """Trials of one setting, from a run's configuration: `fits` says whether it trains on sequences of so many tokens.

    Attributes:
        count: made so far.
        longest: the row of metrics.jsonl of the longest that fitted.
    """

    config: LongestConfig
    run: Config
    overrides: list[str]
    device: str
    count: int = 0
    longest: dict[str, Any] = field(default_factory=dict)

    def fits(self, tokens: int) -> bool:
        """Train on them; raises `FailedTrialError` for a failure of another kind, or one that takes too long."""
        self.count += 1
        with tempfile.TemporaryDirectory(prefix="zeco-longest-") as folder:
            _write_tokens(Path(folder, "store"), self.run, tokens)
            settings = [
                *self.overrides,
                f"data.seq_len={tokens}",
                f"data.path='{folder}/store'",
                f"run_dir='{folder}/run'",
            ]
            code, output = self._start([*settings, f"train.device={self.device}"])
            if code == 0:
                rows = read_metrics(Path(folder, "run", METRICS_FILE))
                self.longest = max(self.longest, rows[-1] | {"seq_len": tokens}, key=lambda row: row.get("seq_len", 0))
                return True
        signs = _OUT_OF_MEMORY + _OUT_OF_LIMIT * (self.config.memory_gb is not None)
        if code == -signal.SIGKILL or any(sign in output for sign in signs):
            return False
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:] or [f"exit code {code}"]
        raise FailedTrialError(f"{tokens:,} tokens: {errors[0]}")

    def _start(self, settings: list[str]) -> tuple[int, str]:
        ranks, seconds = self.config.ranks, self.config.trial_seconds
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
        command = [sys.executable, "-m", *launcher, "zeco_train", "train", *settings]
        if self.config.memory_gb is not None:
            limit = f'ulimit -d {round(self.config.memory_gb * 1e9 / 1024)} && exec "$@"'
            command = ["/bin/sh", "-c", limit, "sh", *command]
        how: dict[str, Any] = {"text": True, "errors": "replace", "start_new_session": True}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        output, end = None, time.monotonic() + seconds
        # Signals must not end this process, nor raise within `Popen`: the trial would go on.
        with StopRequest() as stop, subprocess.Popen(command, **how) as process:
            try:
                while output is None and stop.signal is None and time.monotonic() < end:
                    with suppress(subprocess.TimeoutExpired):
                        output, _ = process.communicate(timeout=0.2)
            finally:
                if output is None:
                    os.killpg(process.pid, signal.SIGKILL)  # ranks end with their launcher
        if stop.signal is not None:
            sys.exit(128 + stop.signal)
        if output is None:
            raise FailedTrialError(f"not done within trial_seconds={seconds:g}")
        return process.returncode, output


def run(config: LongestConfig, session: Session, report: Report) -> None:
    """Search with all combinations of the settings into the report.

    Raises ConfigError for a memory limit with GPUs, and for fewer GPUs than ranks.
    """
    device, gpu = "cuda" if are_on_cuda(config.device, config.ranks) else "cpu", ""
    if device == "cuda":
        if config.memory_gb is not None:
            raise ConfigError("memory_gb", config.memory_gb, "limits processes on CPUs; GPUs are measured whole")
        # Torch would initialise the GPU to name it, and so take memory from the trials.
        with suppress(OSError, subprocess.SubprocessError, IndexError):
            gpu = query_gpus(["name"])[0]["name"]
        report.note(f"on {config.ranks} × {gpu or 'GPUs that nvidia-smi does not name, so without a planned length'}")
    own: list[int | None] = [None]
    axes = itertools.product(config.every or own, config.strategies, config.recompute, config.variants)
    for setting in report.in_budget(axes, _name):
        _, strategy, recompute, variant = setting
        row: Row = {"strategy": strategy.name, "recompute": recompute.name, "variant": variant}
        try:
            overrides = config.trial_overrides(*setting)
            trials = Trials(config, config.load_trial(overrides), overrides, device)
            planned = _planned(config, trials.run, gpu)
        except ConfigError as error:
            report.add([{**row, "model": config.model, "note": f"refused: {error}"}])
            continue
        row |= {"model": trials.run.model.name} | _search(trials, planned)
        if "note" in row:
            report.fail(f"{_name(setting)}: {row['note']}")
        report.add([row])


CASE = LabCase("longest", LongestConfig, COLUMNS, run, starts_ranks=True)
main = CASE.main


def _name(setting: tuple[int | None, Strategy, Recompute, str]) -> str:
    every, strategy, recompute, variant = setting
    return f"{variant}, {strategy.name}, recompute={recompute.name}" + ("" if every is None else f", every={every}")


def _search(trials: Trials, planned: int | None) -> Row:
    config, run = trials.config, trials.run
    unit = config.unit * run.train.segments * (config.ranks if run.sp.spec.scans else 1)
    row: Row = {"planned_tokens": planned}
    try:
        found = unit * largest(
            lambda number: trials.fits(number * unit), (planned or 0) // unit, config.most // unit, config.precision
        )
    except FailedTrialError as error:
        row["note"] = f"at least; stopped by {error}" if (found := trials.longest.get("seq_len", 0)) else str(error)
    last = {name: trials.longest.get(name) for name in ("memory_gb", "tokens_per_second")}
    return row | last | {"tokens": found or None, "ratio": found / planned if planned else None, "trials": trials.count}


def _planned(config: LongestConfig, run: Config, name: str) -> int | None:
    # None on CPUs, where the limit is not what the plan counts, and on GPUs that it does not know.
    gpu = next((each for each in Gpu if each.value in name.lower()), None)
    if gpu is None:
        return None
    case, _ = build_case(Request(PlanSettings(world_size=config.ranks, gpu=gpu), run, frozenset()))
    return longest_sequence(case, PlanSettings.headroom, config.unit, config.most)


def _write_tokens(folder: Path, run: Config, tokens: int) -> None:
    # A step's sequences, as one document.
    count, vocab_size = run.data.global_batch * tokens + 1, run.model.vocab_size
    with StoreWriter(folder, vocab_size=vocab_size, eos_id=0, tokenizer={"kind": "bytes"}) as writer:
        writer.append(np.random.default_rng(run.seed).integers(1, vocab_size, count), [count])
        writer.finish("sources")


if __name__ == "__main__":
    run_command("lab.longest")
