"""Writes step metrics to metrics.jsonl, the terminal and the experiment tracker, all on rank 0.

Other ranks contribute their waiting times and peak memory, which are reduced to the maximum.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
import torch.distributed as dist
from tqdm import tqdm

from zeco_train.checkpoint.files import Progress
from zeco_train.distributed.mesh import ProcessMesh, from_main
from zeco_train.system.files import METRICS_FILE
from zeco_train.system.numbers import clock
from zeco_train.system.terminal import visible
from zeco_train.tracking.charts import VALIDATION_FILE, plot_run, plot_validations, read_validations
from zeco_train.tracking.loggers import ExperimentLogger
from zeco_train.tracking.metrics import (
    LineWriter,
    Start,
    StepMetrics,
    StepNumbers,
    append_start,
    layout_of,
    read_metrics,
    read_starts,
    utilisation,
)
from zeco_train.tracking.positions import ValidationLoss

logger = logging.getLogger(__name__)


@dataclass
class StepResult:
    """Result of one optimizer step.

    Attributes:
        numbers: the same on every rank.
        seconds: of the whole step; data_seconds: time this rank waited for the loader.
        sequence_ids: sequences processed by this rank.
        comm_exposed_seconds: time this rank's compute waited for scans and softmax attention; None if not measured.
        nonfinite: why the step was skipped, with the first tensor concerned; None if it was not.
    """

    numbers: StepNumbers[float]
    lr: float
    seconds: float
    data_seconds: float
    sequence_ids: list[int]
    comm_exposed_seconds: float | None = None
    nonfinite: str | None = None


class Recorder:
    """Averages times over the steps between two rows, and writes the rows.

    FLOPs per token are the model's, for MFU, and with recomputation, for HFU; `dtype`: of the matmuls.

    Attributes:
        exit_code: passed to the tracker at the end; 1, a failure, until the run has completed.
    """

    def __init__(
        self,
        run_dir: Path,
        mesh: ProcessMesh,
        tracker: ExperimentLogger,
        total_steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        hardware_flops_per_token: float,
        dtype: torch.dtype,
    ) -> None:
        self._run_dir, self._mesh, self._tracker = run_dir, mesh, tracker
        self._total_steps, self._tokens_per_step = total_steps, tokens_per_step
        self._flops, self._hardware_flops, self._dtype = flops_per_token, hardware_flops_per_token, dtype
        self._writer: LineWriter | None = None
        self._validations: LineWriter | None = None
        # What the last validation loss is of.
        self._validated = ""
        self._since_row: list[StepResult] = []
        self._spent = defaultdict[str, float](float)
        self._started = self._row_written = time.monotonic()
        self._steps_done = 0
        self._is_drawn = False
        self.exit_code = 1

    def start(self, progress: Progress, config: dict[str, Any], facts: dict[str, Any]) -> str | None:
        """Open the files and start or resume the tracker's run on rank 0; returns the tracker's run id.

        `progress`: of earlier starts; `config`: resolved, as plain values; `facts`: `zeco_train.system.environment`.
        """
        layout = layout_of(config, self._mesh.world_size, facts.get("device_name", ""))
        start = Start(progress.step, layout, facts)
        if self._mesh.is_main:
            # A start that finds the run finished takes no step, so no row is of its layout.
            if progress.step < self._total_steps:
                append_start(self._run_dir, start)
            self._writer = LineWriter(self._run_dir / METRICS_FILE)
            if (validations := self._run_dir / VALIDATION_FILE).exists():
                # Open now, to repair a line torn by a kill.
                self._validations = LineWriter(validations)
        self._display = ProgressDisplay(self._total_steps, progress.step, enabled=self._mesh.is_main)
        return self._tracker.begin(config, start, progress.logger_run_id)

    def note(self, text: str) -> None:
        logger.info(text)
        self._display.note(text)

    @contextmanager
    def timing(self, column: str) -> Iterator[None]:
        """Count the time of the work inside in `validation_seconds` or `save_seconds` of the next row."""
        began = time.monotonic()
        yield
        self._spent[column] += time.monotonic() - began

    def add(self, result: StepResult, progress: Progress) -> None:
        self._since_row.append(result)
        self._steps_done += 1
        logger.info("step %d: sequences %s", progress.step, result.sequence_ids)
        self._display.advance(progress.step)

    def write(self, progress: Progress, validation: ValidationLoss | None) -> None:
        """Write a row for the last added step. Collective on the CPU process group: waits for no device."""
        steps, self._since_row = self._since_row, []
        if not steps:
            return
        spent, self._spent, device = self._spent, defaultdict(float), self._mesh.device
        longest = self._most(
            data_seconds=_mean([s.data_seconds for s in steps]),
            comm_exposed_seconds=_mean([s.comm_exposed_seconds for s in steps]),
            memory_gb=torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
            validation_seconds=spent["validation_seconds"] / len(steps),
            save_seconds=spent["save_seconds"] / len(steps),
        )
        if self._writer is None:
            return
        since, self._row_written = self._row_written, time.monotonic()
        seconds = sum(s.seconds for s in steps) / len(steps)
        rate = self._tokens_per_step / seconds
        per_device = rate / self._mesh.world_size
        extra: dict[str, Any] = {"skipped_steps": progress.skipped} if progress.skipped else {}
        if steps[-1].nonfinite is not None:
            extra["nonfinite"] = steps[-1].nonfinite
        row = StepMetrics(
            step=progress.step,
            **vars(steps[-1].numbers),
            lr=steps[-1].lr,
            tokens=progress.tokens,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            step_seconds=seconds,
            job_tokens_per_second=len(steps) * self._tokens_per_step / (self._row_written - since),
            val_loss=None if validation is None else validation.mean,
            mfu=utilisation(per_device * self._flops, device, self._dtype),
            hfu=utilisation(per_device * self._hardware_flops, device, self._dtype),
            **longest,
            extra=extra | _of_validation(validation),
        )
        self._put(row.as_dict(), validation)

    def lacks_validation(self, step: int) -> bool:
        """Whether the step has a row without a validation loss. Collective.

        Raises:
            DataError: metrics.jsonl cannot be read; on every rank.
        """
        row = from_main(self._mesh, lambda: self._row_of(step))
        return row is not None and "val_loss" not in row

    def add_validation(self, step: int, validation: ValidationLoss) -> None:
        """Append a step's row again, with the missing validation loss; the last row of a step counts."""
        if self._writer is not None and (row := self._row_of(step)) is not None:
            known = {name: math.nan if value is None else value for name, value in row.items()}
            self._put({**known, "val_loss": validation.mean, **_of_validation(validation)}, validation)

    def _row_of(self, step: int) -> dict[str, Any] | None:
        rows = read_metrics(self._run_dir / METRICS_FILE)
        return next((row for row in rows if row["step"] == step), None)

    def _put(self, row: dict[str, Any], validation: ValidationLoss | None) -> None:
        assert self._writer is not None
        self._is_drawn = False
        self._writer.append(row)
        if validation is not None:
            self._validated = validation.extent
            self._validations = self._validations or LineWriter(self._run_dir / VALIDATION_FILE)
            self._validations.append({"step": row["step"], **validation.as_dict()})
        self._display.report(row, self._validated)
        self._tracker.log(row["step"], row)

    def close(self) -> None:
        """End the display and the tracker's run, and close the files."""
        self._display.close()
        for writer in (self._writer, self._validations):
            if writer is not None:
                writer.close()
        self._tracker.finish(self.exit_code)

    def draw(self) -> None:
        """Draw the plots of all rows, on rank 0, unless they are."""
        for writer in (self._writer, self._validations):
            if writer is not None:
                writer.flush()
        if self._mesh.is_main and not self._is_drawn:
            plot_run(self._run_dir)
            plot_validations(self._run_dir)
            self._is_drawn = True

    def summarise(self) -> str | None:
        """End a successful run: draw its plots and return its summary line, on rank 0."""
        self.draw()
        self.exit_code = 0
        if not self._mesh.is_main:
            return None
        self._display.close()
        rate = self._steps_done * self._tokens_per_step / (time.monotonic() - self._started)
        return summary_line(read_metrics(self._run_dir / METRICS_FILE), self._run_dir, rate, self._validated)

    def _most(self, **values: float | None) -> dict[str, Any]:
        # Over the ranks that have a value.
        most = torch.tensor([-math.inf if value is None else value for value in values.values()], dtype=torch.float64)
        if self._mesh.world_size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return {name: None if value == -math.inf else value for name, value in zip(values, most.tolist(), strict=True)}


def check_records(run_dir: Path) -> None:
    """Check at the start that the records of earlier starts are readable, rather than fail at the end of the run.

    Raises:
        DataError: names the file, the line and the field.
    """
    read_metrics(run_dir / METRICS_FILE)
    read_validations(run_dir / VALIDATION_FILE)
    read_starts(run_dir)


def _of_validation(validation: ValidationLoss | None) -> dict[str, float]:
    if validation is None:
        return {}
    by_store = {f"val_loss/{name}": loss for name, loss in validation.by_store.items()}
    return {"val_perplexity": validation.perplexity, **by_store}


def _mean(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


# Assumed size of a terminal that reports none.
_COLUMNS, _ROWS = 100, 24


class ProgressDisplay:
    """Shows the steps of a run on stdout, whether or not it is a terminal.

    If the output breaks (closed pipe, lost terminal), a warning is logged and the display is disabled; the run goes on.
    `step`: already done, in a resumed run; `enabled`: False on ranks > 0.
    """

    def __init__(self, total_steps: int, step: int = 0, *, enabled: bool = True) -> None:
        self.total_steps = total_steps
        self._stream: TextIO | None = sys.stdout if enabled else None
        self._first: tuple[int, float] | None = None
        self._bar: tqdm | None = None
        if self._stream is not None and self._stream.isatty():
            try:  # in containers and job launchers it may be 0 × 0
                known_size = min(os.get_terminal_size(self._stream.fileno())) > 0
            except OSError:
                known_size = False
            # No tqdm rate: it would count steps, and include checkpoints and validations.
            self._bar = tqdm(
                total=total_steps,
                initial=step,
                file=self._stream,
                dynamic_ncols=known_size,
                ncols=None if known_size else _COLUMNS,
                nrows=None if known_size else _ROWS,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def advance(self, step: int) -> None:
        """Advance the bar to `step` steps done; plain lines are printed by `report` only."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, row: Mapping[str, Any], validated: str = "") -> None:
        """Show a row of metrics (`StepMetrics.as_dict()`); `validated` is what its `val_loss` is of."""
        step, parts = row["step"], dict[str, str]()
        for column in fields(StepMetrics):
            name, facts = column.name, column.metadata
            if name in row and "shown" in facts and (self._bar is None or not facts.get("in_lines_only")):
                place = facts.get("behind", name)
                parts[place] = parts.get(place, "") + facts["shown"](row[name])
                if name == "val_loss" and validated and self._bar is None:
                    parts[place] += f" ({validated})"
        text = "  ".join([*parts.values(), f"ETA {clock(self._seconds_left(row))}"])
        if self._bar is not None:
            self.advance(step)
            self._bar.set_postfix_str(text)
        else:
            width = len(str(self.total_steps))
            self.note(f"step {step:{width}d}/{self.total_steps}  {text}")

    def close(self) -> None:
        """Leave the bar as it is and end its line. May be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _seconds_left(self, row: Mapping[str, Any]) -> float:
        # At the pace since the first report, which excludes start-up in the first steps.
        step, now = row["step"], time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            seconds_per_step = row["step_seconds"]
        else:
            seconds_per_step = (now - self._first[1]) / (step - self._first[0])
        return max(0.0, seconds_per_step * (self.total_steps - step))

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._stream is None:
            return
        text = visible(text)
        try:
            if self._bar is not None:
                tqdm.write(text, file=self._stream)
            else:
                print(text, file=self._stream)
            self._stream.flush()
        except OSError as error:
            logger.warning("no more progress is shown, the output is closed: %s", error)
            if self._stream is sys.stdout:
                # Other writes to stdout would fail too, at the latest the flush at interpreter exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stream = None


def summary_line(rows: Sequence[Mapping[str, Any]], run_dir: str | Path, rate: float, validated: str = "") -> str:
    """One-line summary of a run: steps, first → last loss, throughput, results folder.

    `rate`: tokens/s of this start, over all its time; beside it stands the median of the steps' rates. `validated`: as
    of `ProgressDisplay.report`.
    """
    where = f"results in {run_dir}"
    if not rows:
        return f"no step was logged, {where}"
    last = rows[-1]
    steps = "1 step" if last["step"] == 1 else f"{last['step']} steps"
    # None stands for NaN and infinities in rows read from metrics.jsonl.
    losses = [math.nan if row.get("loss") is None else row["loss"] for row in rows]
    loss = f"loss {losses[0]:.2f} → {losses[-1]:.2f}"
    if last.get("val_loss") is not None:
        loss += f" (validation {last['val_loss']:.2f}{f' {validated}' if validated else ''})"
    in_steps = median(row.get("tokens_per_second") or 0.0 for row in rows)
    return f"{steps}, {loss}, {rate:,.0f} tokens/s ({in_steps:,.0f} within steps), {where}"
