"""Case `longest`: the longest sequence that trains, found by bisection of real steps.

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.store.writer import StoreWriter
from models.mixer_registry import longest_document
from zeco_train.bench.case import Case, Report
from zeco_train.bench.config import LongestConfig
from zeco_train.bench.session import Row, Session
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import are_on_cuda
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.advice import longest_sequence
from zeco_train.plan.case import build_case
from zeco_train.plan.config import PlanSettings, Request
from zeco_train.plan.devices import Gpu
from zeco_train.system.environment import query_gpus
from zeco_train.system.files import METRICS_FILE
from zeco_train.system.numbers import largest
from zeco_train.system.signals import StopRequest
from zeco_train.tracking.metrics import read_metrics

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
            planned = planned_tokens(config, trials.run, gpu)
        except ConfigError as error:
            report.add([{**row, "model": config.model, "note": f"refused: {error}"}])
            continue
        row |= {"model": trials.run.model.name} | _search(trials, planned, report)
        if "note" in row:
            report.fail(f"{_name(setting)}: {row['note']}")
        report.add([row])


CASE = Case("longest", LongestConfig, COLUMNS, run, starts_ranks=True)


def _name(setting: tuple[int | None, Strategy, Recompute, str]) -> str:
    every, strategy, recompute, variant = setting
    return f"{variant}, {strategy.name}, recompute={recompute.name}" + ("" if every is None else f", every={every}")


def _search(trials: Trials, planned: int | None, report: Report) -> Row:
    config, run = trials.config, trials.run
    unit = config.unit * run.train.segments * (config.ranks if run.sp.spec.scans else 1)
    row: Row = {"planned_tokens": planned}

    def fits(number: int) -> bool:
        began, is_trained = time.monotonic(), trials.fits(number * unit)
        how = "trained" if is_trained else "out of memory"
        report.note(f"{number * unit:,} tokens: {how} after {time.monotonic() - began:.0f} s")
        return is_trained

    try:
        most = min(config.most, longest_document(run.model) or config.most)
        found = unit * largest(fits, (planned or 0) // unit, most // unit, config.precision)
    except FailedTrialError as error:
        row["note"] = f"at least; stopped by {error}" if (found := trials.longest.get("seq_len", 0)) else str(error)
    last = {name: trials.longest.get(name) for name in ("memory_gb", "tokens_per_second")}
    return row | last | {"tokens": found or None, "ratio": found / planned if planned else None, "trials": trials.count}


def planned_tokens(config: LongestConfig, run: Config, name: str) -> int | None:
    """The plan's, on GPUs of this name; None on CPUs, where the limit is another, and on GPUs that it does not know."""
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
