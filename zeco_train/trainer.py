"""The training loop. Everything that it puts together is built in `zeco_train.build`."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from signal import Signals

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Batch, validation_batches
from zeco_train.build import Parts
from zeco_train.config import Config
from zeco_train.nonfinite import explain
from zeco_train.optim import learning_rate, set_learning_rate
from zeco_train.parallelize import begin_micro_batch, clip_gradients, global_norm, reshard
from zeco_train.recorder import StepResult
from zeco_train.signals import StopRequest
from zeco_train.sp.base import SequenceShard

logger = logging.getLogger(__name__)


class Trainer:
    """Trains from the parts' current progress to `train.steps`, or until it is told to stop.

    All methods are collective.
    """

    def __init__(self, config: Config, parts: Parts) -> None:
        self.config, self.parts, self.progress = config, parts, parts.progress
        self.tokens_per_step = config.data.global_batch * config.data.seq_len
        self.micro_steps = config.data.global_batch // (config.data.micro_batch * parts.mesh.dp_size)
        self._saved_at = parts.progress.step

    def train(self) -> Signals | None:
        """Run to the end.

        Returns:
            The signal that ended the run before its time, or None.
        """
        config, progress, recorder = self.config.train, self.progress, self.parts.recorder
        every = self.config.checkpoint.every
        with StopRequest() as stop:
            while progress.step < config.steps:
                result = self.train_step(stop)
                if isinstance(result, Signals):
                    recorder.write(progress, None)
                    self.save()
                    return result
                recorder.add(result, progress)
                finished = progress.step == config.steps
                validate = finished or (config.eval_every and progress.step % config.eval_every == 0)
                val_loss = self.evaluate() if validate else None
                if finished or validate or progress.step == 1 or progress.step % config.log_every == 0:
                    recorder.write(progress, val_loss)
                if finished or (every and progress.step % every == 0):
                    self.save()
        return None

    def train_step(self, stop: StopRequest) -> StepResult | Signals:
        """One optimizer step on the next global batch.

        The loss is the sum over this rank's tokens, divided by the tokens of the *global* batch, so that the sum of
        gradients over all ranks and micro-batches is the gradient of the mean, however the batch is split.

        Returns:
            The step's numbers; or a stop signal that some rank got before the last micro-batch, and then the step has
            not happened: weights and progress are those of the step before.
        """
        started, step = time.perf_counter(), self.progress.step + 1
        parts, config = self.parts, self.config
        lr = learning_rate(step, config.train.steps, config.optim.lr, config.sched)
        set_learning_rate(parts.optimizer, lr)

        loss, data_seconds = torch.zeros((), dtype=torch.float64, device=parts.mesh.device), 0.0
        sequence_ids: list[int] = []
        for micro_step in range(self.micro_steps):
            parts.watchdog.enter(f"step {step}, micro-batch {micro_step + 1} of {self.micro_steps}")
            if signal := self._agreed_signal(stop):
                parts.optimizer.zero_grad(set_to_none=True)
                reshard(parts.model)
                return signal
            waited = time.perf_counter()
            batch = parts.loader.next()
            data_seconds += time.perf_counter() - waited
            begin_micro_batch(parts.model, config.parallel.strategy, last=micro_step == self.micro_steps - 1)
            micro_loss = self.loss_sum(batch) / self.tokens_per_step
            micro_loss.backward()
            loss += micro_loss.detach()
            sequence_ids += batch.sequence_ids

        parts.watchdog.enter(f"step {step}, gradient norm")
        dist.all_reduce(loss)
        grad_norm = global_norm(parts.model)
        self._check_finite(step, {"loss": loss.item(), "gradient norm": grad_norm.item()})
        parts.watchdog.enter(f"step {step}, optimizer")
        clip_gradients(parts.model, grad_norm, config.optim.grad_clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)

        self.progress.advance(config.data.global_batch, self.tokens_per_step)
        seconds = time.perf_counter() - started
        return StepResult(loss.item(), grad_norm.item(), lr, seconds, data_seconds, sequence_ids)

    def _agreed_signal(self, stop: StopRequest) -> Signals | None:
        """The stop signal that any rank has got; asked between micro-batches, since a launcher does not wait for long.

        Travels between hosts (gloo), so that it does not wait for a GPU's queue.
        """
        number = torch.tensor(stop.signal or 0)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return Signals(int(number.item())) if number.item() else None

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        """Raise `NonFiniteError`, with the first tensor concerned, if the step's loss or norm is NaN or infinite."""
        for name, value in values.items():
            if not math.isfinite(value):
                # A scan whose peer did not answer gives NaN; what it has to say comes first.
                self.parts.scan.drain()
                # Read again, since keeping a step's batches for this would take memory in every step.
                forwards = [partial(self._forward_again, micro_step) for micro_step in range(self.micro_steps)]
                raise explain(self.parts.model, step, f"the {name} is {value}", forwards, self.parts.mesh.world_size)

    def _forward_again(self, micro_step: int) -> Tensor:
        return self.loss_sum(self.parts.loader.again(self.progress.sequences, micro_step))

    def loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the token losses of this rank's part of a micro-batch."""
        parts, seq_len = self.parts, self.config.data.seq_len
        assert batch.input_ids.shape[1] * parts.mesh.sp_size == seq_len
        shard = SequenceShard(parts.scan, batch.offset, seq_len, batch.cu_seqlens, batch.continues)
        input_ids, labels = (tokens.to(parts.mesh.device) for tokens in (batch.input_ids, batch.labels))
        return parts.model(input_ids, shard, labels=labels)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean token loss over the held-out sequences, None if there are none."""
        parts, mesh = self.parts, self.parts.mesh
        if parts.validation is None:
            return None
        parts.watchdog.enter(f"validation after step {self.progress.step}")
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for batch in validation_batches(parts.validation, parts.split, max_sequences=self.config.train.eval_sequences):
            loss = self.loss_sum(batch)
            if not batch.is_padding:
                total += torch.stack([loss.double(), loss.new_tensor(batch.labels.numel()).double()])
        reshard(parts.model)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def save(self) -> None:
        """Save a checkpoint of this step, unless there is one."""
        if self._saved_at == self.progress.step:
            return
        self.parts.watchdog.enter(f"checkpoint of step {self.progress.step}")
        self.parts.checkpointer.save(self.parts.model, self.parts.optimizer, self.progress)
        self._saved_at = self.progress.step
        logger.info("checkpoint of step %d saved", self.progress.step)
