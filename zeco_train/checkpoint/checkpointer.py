"""Checkpoints: asynchronous, consistent after a kill at any moment, loadable on any number of ranks.

An asynchronous save copies the state to host memory during the next step's forward and backward passes, which do not
change it, and writes it from a thread of `torch.distributed.checkpoint` with a process group of its own. The layout of
a checkpoint, and when it is complete, is in `zeco_train.checkpoint.files`.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from zeco_train.checkpoint.config import CheckpointConfig, CheckpointMode, Missing
from zeco_train.checkpoint.files import (
    CHECKPOINT_FOLDER,
    LATEST,
    RUN_FORMAT,
    Progress,
    check_nothing_is_missing,
    checkpoint_name,
    complete_checkpoints,
    link_latest,
    read_progress,
    recorded_checkpoint,
    set_aside,
    step_of,
)
from zeco_train.checkpoint.weights import cause_of, damage_of, read_state
from zeco_train.checkpoint.writer import CheckpointWriter
from zeco_train.distributed.mesh import ProcessMesh, agree, from_main, host_group
from zeco_train.errors import CheckpointError

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# Torch 2.11 clears a stager after its first use, so a second use fails.
_STAGERS_LAST = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"

logger = logging.getLogger(__name__)


@dataclass
class _Save:
    # A save in progress: `written` resolves when the checkpoint is complete, on all ranks, or has failed; `staged` when
    # weights and optimizer state may change again.
    step: int
    partial: Path
    written: Future[Any]
    staged: Future[Any]
    began: float


class Checkpointer:
    """Saves and loads a run's state; every method except `close` is collective."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, mesh: ProcessMesh) -> None:
        self.folder, self._run_dir, self._config, self._mesh = run_dir / CHECKPOINT_FOLDER, run_dir, config, mesh
        # Of its own, since the save thread communicates while the main thread trains.
        self.group = host_group(mesh)
        self._stager: DefaultStager | None = None
        self._save: _Save | None = None
        # None after a failure.
        self._saved_at: int | None = 0
        self._last = time.monotonic()

    def due(self, progress: Progress) -> bool:
        """Whether a checkpoint is due. Call once after each step: it also reports the outcome of a finished save."""
        # `done` may differ between ranks, so `settle` must not communicate.
        if self._save is not None and self._save.written.done():
            self.settle()
        if self._config.every and progress.step % self._config.every == 0:
            return True
        if not self._config.minutes:
            return False
        # Rank 0's clock decides: clocks of ranks drift, and a save is collective.
        late = torch.tensor(int(time.monotonic() - self._last >= 60 * self._config.minutes))
        dist.broadcast(late, src=0)
        return bool(late.item())

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Start to save this step. In `async` mode, call `wait_staged` before weights or optimizer state change.

        Waits for the previous save. A storage failure is logged; earlier checkpoints stay intact, and the next save
        tries again.
        """
        if self._save is not None:
            waited = time.monotonic()
            self.settle()
            logger.info("waited %.2f s for the checkpoint before", time.monotonic() - waited)
        wait = self._config.mode is CheckpointMode["sync"]
        self._save = self._begin(model, optimizer, progress, wait=wait)
        # Before the outcome is known: `settle` clears it after a failure, so that `save_last` saves the step again.
        self._saved_at, self._last = progress.step, time.monotonic()
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait for the save in progress, if any; a storage failure is logged."""
        if self._save is not None and (error := self._end_save()) is not None:
            self._saved_at = None
            logger.warning("%s; the run goes on", error)

    def save_last(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """Save this step, if it is not saved yet, and return when it is on disk; raises `CheckpointError`.

        A save in progress is completed first: it is closest to a usable checkpoint, in case the launcher's grace period
        does not suffice for both. `report` is given lines about the bytes that this rank writes.
        """
        self.settle()
        if self._saved_at == progress.step:
            return
        self._save = self._begin(model, optimizer, progress, wait=True, report=report)
        error = self._end_save()
        if error is not None:
            raise error
        self._saved_at = progress.step

    def wait_staged(self) -> None:
        """Wait until a save in progress has copied weights and optimizer state to host memory, so they may change."""
        if self._save is not None:
            self._save.staged.result()

    def is_saved(self, progress: Progress) -> bool:
        return self._saved_at == progress.step

    def close(self) -> None:
        """Wait for the save in progress, at most for the communication timeout."""
        save, self._save = self._save, None
        if save is not None:
            try:
                failure = save.written.exception(self._mesh.timeout.total_seconds())
            except TimeoutError as error:
                failure = error
            if failure is not None:
                logger.warning("checkpoint of step %d was not completed: %s", save.step, failure or "no answer in time")
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def latest_sound(self) -> Path | None:
        """The newest intact checkpoint, after newer ones are logged and renamed; None if there is no checkpoint at all.

        Raises CheckpointError if all are damaged (none is renamed then), there is none, but the run had one (see
        `CheckpointConfig.missing`), or the storage cannot be read.
        """
        # Listed by rank 0 alone: ranks that list a shared disk by themselves may find different newest checkpoints.
        found = from_main(self._mesh, lambda: complete_checkpoints(self._run_dir))
        damage: dict[Path, str] = {}
        for path in reversed(found):
            problem = damage_of(path, self._mesh)
            if problem is None:
                agree(self._mesh, lambda: self._go_on_from(path, damage) if self._mesh.is_main else None)  # noqa: B023
                return path
            damage[path] = problem
        if damage:
            path, problem = next(iter(damage.items()))
            ways = "restore the file, or take another name for a new run"
            raise CheckpointError(f"{path}: damaged: {problem}; there is no sound one to go on from: {ways}")
        if self._config.missing is Missing.refuse:
            agree(self._mesh, lambda: check_nothing_is_missing(self._run_dir) if self._mesh.is_main else None)
        return None

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Restore weights, optimizer state and RNG in place, resharding as needed.

        Raises CheckpointError if the checkpoint is damaged or of another model.
        """
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        rng_state = torch.get_rng_state()
        # The param groups' settings are kept: they come from the configuration.
        read_state({"model": model_state, "optim": optimizer_state, "rng": rng_state}, path, self.group)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=_OPTIONS
        )
        torch.set_rng_state(rng_state)
        progress = agree(self._mesh, lambda: read_progress(path))
        self._saved_at = progress.step
        return progress

    def _begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        *,
        wait: bool,
        report: Callable[[str], object] | None = None,
    ) -> _Save:
        # With `wait`, does all of it; `written` holds the outcome.
        began = time.monotonic()
        final = self.folder / checkpoint_name(progress.step)
        text = json.dumps({"format": RUN_FORMAT, **asdict(progress)}, indent=2)
        writer = CheckpointWriter(final, text, self._config.keep, report)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        state = {"model": model_state, "optim": optimizer_state, "rng": torch.get_rng_state()}
        staged: Future[Any] = Future()
        written: Future[Any] = Future()
        if self._mesh.device.type == "cuda":
            # Neither the stager's stream nor the writer's streams are ordered after the optimizer's kernels.
            torch.cuda.current_stream().synchronize()
        if wait:
            staged.set_result(None)
            try:
                written.set_result(dcp.save(state, storage_writer=writer, process_group=self.group))
            except CheckpointException as error:
                # A storage failure, the same on all ranks. Any other exception, such as a lost peer's, propagates.
                written.set_exception(error)
        else:
            response = dcp.async_save(
                state, storage_writer=writer, process_group=self.group, async_stager=self._get_stager()
            )
            assert isinstance(response, AsyncSaveResponse)
            staged, written = response.staging_completion, response.upload_completion
        return _Save(progress.step, writer.partial, written, staged, began)

    def _get_stager(self) -> DefaultStager:
        # Reused where torch can, as allocating and pinning memory is slow.
        if self._stager is not None and not _STAGERS_LAST:
            self._stager.close()
            self._stager = None
        if self._stager is None:
            cuda = self._mesh.device.type == "cuda"
            # Shared memory is for writers in another process; the writer here is a thread.
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda
                )
            )
        return self._stager

    def _end_save(self) -> CheckpointError | None:
        # Returns the storage failure, the same on all ranks. Other errors, as of a lost peer, propagate.
        save, self._save = self._save, None
        assert save is not None
        try:
            save.written.result()
        except CheckpointException as failure:
            if self._mesh.is_main:
                # A partial checkpoint is useless, and the disk may be full.
                shutil.rmtree(save.partial, ignore_errors=True)
            return CheckpointError(
                f"{save.partial.with_suffix('')}: saving failed: {cause_of(failure)}; {self._left()}"
            )
        logger.info("checkpoint of step %d complete, %.2f s after it began", save.step, time.monotonic() - save.began)
        return None

    def _left(self) -> str:
        try:
            complete = complete_checkpoints(self._run_dir)
        except CheckpointError as error:
            return str(error)
        return f"the last complete checkpoint is {complete[-1].name}" if complete else "there is no checkpoint yet"

    def _go_on_from(self, sound: Path, damage: dict[Path, str]) -> None:
        # Renames newer, damaged checkpoints, and warns if a newer one has been removed.
        # A user may have removed a damaged record.
        with suppress(FileNotFoundError):
            last = recorded_checkpoint(self._run_dir) or 0
            if last > max(step_of(path) for path in [sound, *damage]):
                logger.warning("%s is not there any more; the run goes on from %s", checkpoint_name(last), sound.name)
        for path, problem in damage.items():
            try:
                # Before the rename, so that `latest` always names a checkpoint; absent on file systems without links.
                if (path.parent / LATEST).is_symlink():
                    link_latest(sound)
                aside = set_aside(path)
            except OSError as error:
                raise CheckpointError(f"{path}: damaged: {problem}; and cannot be renamed: {error.strerror}") from error
            again = f"the run goes on from {sound.name}: {step_of(path) - step_of(sound)} steps are done again"
            logger.warning("%s: damaged: %s; it is %s now, and %s", path, problem, aside.name, again)
