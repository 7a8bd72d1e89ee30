"""The training loop; its parts are built in `zeco_train.training.build`."""

from __future__ import annotations

import logging
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from signal import Signals

import torch
import torch.distributed as dist

from data.loader.batches import Batch
from data.loader.loader import PrefetchingLoader
from zeco_train.checkpoint.checkpointer import Checkpointer
from zeco_train.checkpoint.files import Progress
from zeco_train.config.schema import Config
from zeco_train.distributed.mesh import agree
from zeco_train.distributed.parallelize import reshard
from zeco_train.errors import NonFiniteError
from zeco_train.lifecycle.watch import Watchdog
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.system.signals import StopRequest
from zeco_train.tracking.metrics import StepNumbers
from zeco_train.tracking.positions import ValidationLoss
from zeco_train.tracking.recorder import Recorder, StepResult
from zeco_train.training.config import skip_limit
from zeco_train.training.nonfinite import explain
from zeco_train.training.opening import RunData
from zeco_train.training.profiler import StepProfiler
from zeco_train.training.schedule import learning_rate, set_learning_rate
from zeco_train.training.step import TrainingStep

logger = logging.getLogger(__name__)


class Trainer:
    """Trains from its progress, which it advances, to `train.steps`, or until a stop signal.

    All methods are collective.

    Raises:
        DataError: on every rank; the folder of profiles cannot be written.
    """

    def __init__(
        self,
        config: Config,
        step: TrainingStep,
        data: RunData,
        checkpointer: Checkpointer,
        recorder: Recorder,
        progress: Progress,
        watchdog: Watchdog,
    ) -> None:
        self.config, self.step, self.validation = config, step, data.validation
        self.checkpointer, self.recorder, self.progress, self.watchdog = checkpointer, recorder, progress, watchdog
        self.tokens_per_step = config.data.global_batch * config.data.seq_len
        self.micro_steps = data.loader.micro_steps
        train, mesh, folder = config.train, step.mesh, Path(config.run_dir)
        self.profiler = agree(
            mesh, lambda: StepProfiler(train.profile, train.profile_ranks, folder, mesh.rank, mesh.device)
        )
        self.loader = PrefetchingLoader(data.loader, progress.sequences, ahead=train.segments)
        self._meter = ExposedMeter()
        self._skip_limit = skip_limit(train.nonfinite)
        self._stop_signal: Signals | None = None

    @cached_property
    def _validation_pending(self) -> bool:
        # The run was stopped between its last step and a validation that is due after it.
        is_due = not self.validation.is_empty and self._validation_due()
        return is_due and self.recorder.lacks_validation(self.progress.step)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, and no validation of the last one is pending after a stop signal."""
        return self.progress.step >= self.config.train.steps and not self._validation_pending

    def train(self) -> Signals | None:
        """Run the remaining steps; returns the signal that stopped the run early, or None."""
        config, progress, recorder = self.config.train, self.progress, self.recorder
        with StopRequest() as stop:
            if self._validation_pending and (val_loss := self.evaluate(stop)) is not None:
                recorder.add_validation(progress.step, val_loss)
            while progress.step < config.steps:
                self.profiler.begin(progress.step + 1)
                result = self.train_step(stop)
                if isinstance(result, Signals):
                    recorder.write(progress, None)
                    self.save(last=True)
                    return result
                self.profiler.end(progress.step)
                recorder.add(result, progress)
                finished = progress.step == config.steps
                validate = self._validation_due()
                val_loss = self.evaluate(stop) if validate else None
                due = finished or validate or progress.step == 1 or progress.step % config.log_every == 0
                if due or result.nonfinite is not None:
                    recorder.write(progress, val_loss)
                # Called after the last step, too: it reports the outcome of the previous save.
                if self.checkpointer.due(progress) or (finished and self.config.checkpoint.final):
                    self.save(last=finished)
                elif finished:
                    self.checkpointer.settle()
        # A signal only if it interrupted the last validation: all passes of the last step were completed.
        return self._stop_signal

    def train_step(self, stop: StopRequest) -> StepResult | Signals:
        """One optimizer step on the next global batch.

        Returns:
            The step's numbers; or a stop signal that a rank received before the last pass over a segment. The step is
            then discarded: weights and progress are those of the step before.
        """
        started, step = time.perf_counter(), self.progress.step + 1
        config = self.config
        lr = learning_rate(step, config.train.steps, config.optim.lr, config.sched)
        set_learning_rate(self.step.optimizer, lr)
        self.step.zero_grad()

        data_seconds, sequence_ids = 0.0, list[int]()
        for micro_step in range(self.micro_steps):
            place = f"step {step}, micro-batch {micro_step + 1} of {self.micro_steps}"
            self.watchdog.enter(f"{place}, waiting for its data")
            waited = time.perf_counter()
            segments = [self.loader.next() for _ in range(config.train.segments)]
            data_seconds += time.perf_counter() - waited
            self.watchdog.enter(place)
            last = micro_step == self.micro_steps - 1
            with self._meter.measuring():
                done = self.step.backward(segments, last=last, proceed=lambda: self._agreed_signal(stop) is None)
            if not done:
                # Gradients of some passes only, and parameters gathered for a backward pass that did not come.
                self.step.zero_grad()
                reshard(self.step.model)
                assert self._stop_signal is not None
                return self._stop_signal
            sequence_ids += segments[0].sequence_ids

        self.watchdog.enter(f"step {step}, optimizer")
        # The update changes weights that an asynchronous save may still be copying.
        with self.recorder.timing("save_seconds"):
            self.checkpointer.wait_staged()
        numbers = self.step.update().read()
        nonfinite = self._judge(step, numbers)
        self.progress.advance(config.data.global_batch, self.tokens_per_step, skipped=nonfinite is not None)
        seconds = time.perf_counter() - started
        return StepResult(numbers, lr, seconds, data_seconds, sequence_ids, self._meter.take(), nonfinite)

    def _agreed_signal(self, stop: StopRequest) -> Signals | None:
        # The stop signal that any rank has received; checked before each segment, as launchers wait only briefly. The
        # all-reduce is on CPU (gloo), so that it does not wait for work queued on the GPU.
        number = torch.tensor(stop.signal or 0)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        self._stop_signal = Signals(int(number.item())) if number.item() else None
        return self._stop_signal

    def _judge(self, step: int, numbers: StepNumbers[float]) -> str | None:
        # Describes a non-finite loss or norm of a step that is to be skipped; None for a finite step. All ranks have
        # the same values and the same count of skipped steps, so they reach the same decision.
        values = {"loss": numbers.loss, "gradient norm": numbers.grad_norm}
        symptom = next((f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)), None)
        if symptom is None:
            return None
        # A scan whose peer timed out gives NaN; `drain` raises that error first.
        self.step.forward.exchange.drain()
        self.watchdog.enter(f"step {step}, looking for what is not finite")
        loss_is_finite = math.isfinite(numbers.loss)
        found = explain(self.step, symptom, self._read_again, self.micro_steps, with_backward=loss_is_finite)
        in_row = self.progress.skipped_in_row + 1
        if in_row > self._skip_limit:
            before = f"; skipped before it, by train.nonfinite: {in_row - 1} in a row" if self._skip_limit else ""
            raise NonFiniteError(f"step {step}: {found}{before}")
        logger.warning("step %d is skipped (%d in a row, at most %d): %s", step, in_row, self._skip_limit, found)
        return found

    def _read_again(self, micro_step: int) -> list[Batch]:
        # Keeping a step's batches for this would take memory in every step.
        loader, consumed = self.loader, self.progress.sequences
        return [loader.again(consumed, micro_step, segment) for segment in range(self.config.train.segments)]

    def _validation_due(self) -> bool:
        every, step = self.config.train.eval_every, self.progress.step
        return step >= self.config.train.steps or (every > 0 and step % every == 0)

    def evaluate(self, stop: StopRequest) -> ValidationLoss | None:
        """The loss over the held-out sequences; None if there are none, or if a stop signal interrupted it."""
        if self.validation.is_empty:
            return None
        self.watchdog.enter(f"validation after step {self.progress.step}")
        with self.recorder.timing("validation_seconds"):
            loss = self.validation.loss(self.step.forward, proceed=lambda: self._agreed_signal(stop) is None)
            reshard(self.step.model)
        return loss

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint of this step; with `last`, return when it is on disk, or raise `CheckpointError`."""
        self.watchdog.enter(f"checkpoint of step {self.progress.step}")
        state = self.step.model, self.step.optimizer, self.progress
        with self.recorder.timing("save_seconds"):
            if last:
                # Meanwhile what else takes a second each at the end of a run.
                with ThreadPoolExecutor(2) as pool:
                    # A chart that cannot be drawn now, as on a disk that is full until the save makes room, is drawn,
                    # or fails, in `Recorder.summarise`.
                    for work in (self.recorder.draw, _close_compiler):
                        pool.submit(work)
                    self.checkpointer.save_last(*state, self.recorder.note)
            else:
                self.checkpointer.save(*state)


def _close_compiler() -> None:
    # Inductor's processes; Python's exit would wait for them, and end them if this fails.
    if (compiler := sys.modules.get("torch._inductor.async_compile")) is not None:
        with suppress(Exception):
            compiler.shutdown_compile_workers()
