"""Where a step's numbers go: metrics.jsonl, the terminal and the experiment tracker. Rank 0 only; nothing elsewhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeco_train.checkpoint import Progress
from zeco_train.loggers import ExperimentLogger
from zeco_train.mesh import ProcessMesh
from zeco_train.metrics import METRICS_FILE, MetricsWriter, StepMetrics, read_metrics
from zeco_train.plot import plot_run
from zeco_train.progress import ProgressDisplay, summary_line

logger = logging.getLogger(__name__)

# Dense bf16 FLOP/s by a part of the device's name, from the vendor's data sheets.
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclass
class StepResult:
    """What one optimizer step gave; loss and norm are the same on every rank.

    Attributes:
        loss: mean token loss of the global batch.
        grad_norm: global norm before clipping.
        lr: learning rate.
        seconds: of the whole step; data_seconds: the part spent waiting for the loader.
        sequence_ids: sequences that this rank took part in.
    """

    loss: float
    grad_norm: float
    lr: float
    seconds: float
    data_seconds: float
    sequence_ids: list[int]


class Recorder:
    """Averages times over the steps between two rows, and writes the rows.

    Attributes:
        exit_code: what the tracker is told at the end; 1, a failure, until the run has ended as it should.
    """

    def __init__(
        self,
        run_dir: Path,
        mesh: ProcessMesh,
        tracker: ExperimentLogger,
        total_steps: int,
        tokens_per_step: int,
        flops_per_token: float,
    ) -> None:
        self._run_dir, self._mesh, self._tracker = run_dir, mesh, tracker
        self._total_steps, self._tokens_per_step, self._flops = total_steps, tokens_per_step, flops_per_token
        self._writer: MetricsWriter | None = None
        self._display: ProgressDisplay | None = None
        self._since_row: list[StepResult] = []
        self.exit_code = 1

    def start(self, progress: Progress, config: dict[str, Any]) -> str | None:
        """Open the files and start or continue the tracker's run, on rank 0.

        Args:
            progress: what an earlier start of this run has done.
            config: the configuration as plain values.

        Returns:
            The tracker's run id.
        """
        if self._mesh.is_main:
            self._writer = MetricsWriter(self._run_dir / METRICS_FILE)
            self._display = ProgressDisplay(self._total_steps, progress.step)
        return self._tracker.start(config, progress.logger_run_id)

    def note(self, text: str) -> None:
        """Show a line to the user."""
        logger.info(text)
        if self._display is not None:
            self._display.note(text)

    def add(self, result: StepResult, progress: Progress) -> None:
        """Take in a finished step."""
        self._since_row.append(result)
        logger.info("step %d: sequences %s", progress.step, result.sequence_ids)
        if self._display is not None:
            self._display.advance(progress.step)

    def write(self, progress: Progress, val_loss: float | None) -> None:
        """Write a row for the last step that was added."""
        steps, self._since_row = self._since_row, []
        if self._writer is None or not steps:
            return
        seconds = sum(s.seconds for s in steps) / len(steps)
        rate = self._tokens_per_step / seconds
        per_device = rate / self._mesh.world_size
        row = StepMetrics(
            step=progress.step,
            loss=steps[-1].loss,
            grad_norm=steps[-1].grad_norm,
            lr=steps[-1].lr,
            tokens=progress.tokens,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            step_seconds=seconds,
            data_seconds=sum(s.data_seconds for s in steps) / len(steps),
            val_loss=val_loss,
            memory_gb=self._memory_gb(),
            mfu=self._mfu(per_device),
        )
        self._writer.write(row)
        assert self._display is not None
        self._display.report(row.as_dict())
        self._tracker.log(row.step, row.as_dict())

    def close(self) -> None:
        """End the display and the tracker's run, and close the files."""
        if self._display is not None:
            self._display.close()
        if self._writer is not None:
            self._writer.close()
        self._tracker.finish(self.exit_code)

    def summarise(self) -> str | None:
        """End a run that went as it should: draw its plot and return its last line, on rank 0."""
        self.exit_code = 0
        if self._display is None:
            return None
        self._display.close()
        plot_run(self._run_dir)
        return summary_line(read_metrics(self._run_dir / METRICS_FILE), self._run_dir)

    def _memory_gb(self) -> float | None:
        if self._mesh.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._mesh.device) / 1e9

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs over the device's dense bf16 peak; None for devices whose peak is not known here."""
        if self._mesh.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self._mesh.device)
        peak = next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
        return None if peak is None else tokens_per_second * self._flops / peak
