"""Checkpoints that a kill at any moment cannot damage, and that load on any number of ranks.

A checkpoint is written with `torch.distributed.checkpoint` into `step_XXXXXXXX.tmp` and renamed once everything,
`run.json` included, is on disk. A folder without the suffix is therefore complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from zeco_train.errors import CheckpointError, ConfigError
from zeco_train.mesh import ProcessMesh, agree

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class CheckpointConfig:
    """Attributes:
    every: steps between two checkpoints; 0 saves at the end, and when the run is told to stop, only.
    keep: how many of the newest checkpoints stay; 0 keeps all.
    load: a run's folder or one of its checkpoints, whose weights a *new* run starts from.
    """

    every: int = 100
    keep: int = 2
    load: str | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for name in ("every", "keep"):
            if getattr(self, name) < 0:
                raise ConfigError(f"checkpoint.{name}", getattr(self, name), "must be ≥ 0")


@dataclass
class Progress:
    """What a run has done so far; with weights, optimizer and RNG it is the run's whole state.

    Attributes:
        step: optimizer steps done.
        sequences: sequences consumed, which is the whole state of the data.
        tokens: tokens consumed.
        logger_run_id: the run's id in W&B.
        skipped: steps left out for a loss or gradient that was not finite, over the whole run; they count as done.
        skipped_in_row: of these, those since the last step that was not left out.
    """

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    logger_run_id: str | None = None
    skipped: int = 0
    skipped_in_row: int = 0

    def advance(self, sequences: int, tokens: int, skipped: bool = False) -> None:
        """Count one more optimizer step; `skipped` if it was left out."""
        self.step, self.sequences, self.tokens = self.step + 1, self.sequences + sequences, self.tokens + tokens
        self.skipped, self.skipped_in_row = self.skipped + skipped, self.skipped_in_row + 1 if skipped else 0


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = (path.parent for path in (run_dir / "checkpoints").glob("step_*[0-9]/run.json"))
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step_")))


class Checkpointer:
    """Saves and loads a run's state; every method but `latest` is collective."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, mesh: ProcessMesh) -> None:
        self.folder, self._run_dir, self._config, self._mesh = run_dir / "checkpoints", run_dir, config, mesh

    def latest(self) -> Path | None:
        """The newest complete checkpoint, as rank 0 sees it."""
        found = [complete_checkpoints(self._run_dir)[-1:] if self._mesh.is_main else []]
        dist.broadcast_object_list(found, src=0)
        return found[0][0] if found[0] else None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write `step_XXXXXXXX` in full or not at all; then drop checkpoints beyond `keep`.

        Raises:
            CheckpointError: the storage failed; the checkpoints before are untouched.
        """
        final = self.folder / f"step_{progress.step:08d}"
        partial = final.with_suffix(".tmp")
        agree(self._mesh, lambda: self._prepare(partial))
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        state = {"model": model_state, "optim": optimizer_state, "rng": torch.get_rng_state()}
        try:
            dcp.save(state, checkpoint_id=str(partial))
        except CheckpointException as error:
            raise CheckpointError(f"{partial}: saving failed: {_cause(error)}") from error
        agree(self._mesh, lambda: self._publish(partial, final, progress))
        return final

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Restore weights, optimizer and RNG in place, whatever the split they were saved from.

        Raises:
            CheckpointError: the checkpoint is damaged or of another model.
        """
        # Settings are the configuration's; the checkpoint's would silently replace them.
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        rng_state = torch.get_rng_state()
        self._read({"model": model_state, "optim": optimizer_state, "rng": rng_state}, path)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=_OPTIONS
        )
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        torch.set_rng_state(rng_state)
        return agree(self._mesh, lambda: read_progress(path))

    def load_weights(self, path: Path, model: nn.Module) -> None:
        """Restore the weights only, for a new run that starts from another one's."""
        model_state = get_model_state_dict(model)
        self._read({"model": model_state}, path)
        set_model_state_dict(model, model_state)

    def _read(self, state: dict[str, Any], path: Path) -> None:
        try:
            dcp.load(state, checkpoint_id=str(path))
        except CheckpointException as error:
            raise CheckpointError(f"{path}: loading failed: {_cause(error)}") from error

    def _prepare(self, partial: Path) -> None:
        if not self._mesh.is_main:
            return
        try:
            # What an earlier kill left behind is of no use to anybody.
            for leftover in self.folder.glob("step_*.tmp"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{partial}: cannot be written: {error.strerror}") from error

    def _publish(self, partial: Path, final: Path, progress: Progress) -> None:
        if not self._mesh.is_main:
            return
        try:
            write_durably(partial / "run.json", json.dumps(asdict(progress), indent=2))
            if final.exists():
                # Somebody's hand was in it, or it would have been loaded; nothing is deleted that a user may want.
                final.rename(final.with_name(f"{final.name}.damaged"))
            partial.rename(final)
            _sync_folder(self.folder)
            if self._config.keep:
                for old in complete_checkpoints(self._run_dir)[: -self._config.keep]:
                    # Renamed first, so that a kill in the middle cannot leave half of it under a complete one's name.
                    shutil.rmtree(old.rename(old.with_suffix(".tmp")))
        except OSError as error:
            raise CheckpointError(f"{final}: cannot be written: {error.strerror}") from error


def read_progress(path: Path) -> Progress:
    """The progress stored in a checkpoint.

    Raises:
        CheckpointError: `run.json` is missing or is not ours.
    """
    try:
        # Those from before steps could be skipped have no count of them.
        stored = {"skipped": 0, "skipped_in_row": 0} | json.loads((path / "run.json").read_text())
        return Progress(**{f.name: stored[f.name] for f in fields(Progress)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: run.json cannot be read: {error}") from error


def find_weights(load: str) -> Path:
    """The checkpoint that `checkpoint.load` names: a checkpoint itself, or the newest one of a run's folder.

    Raises:
        ConfigError: there is none.
    """
    path = Path(load)
    candidates = (
        [path] if (path / "run.json").is_file() and (path / ".metadata").is_file() else complete_checkpoints(path)
    )
    if not candidates:
        raise ConfigError(
            "checkpoint.load", load, "holds no complete checkpoint; name a run's folder or a step_… folder"
        )
    return candidates[-1]


def write_durably(path: Path, text: str) -> None:
    """Write a file in full or not at all, and have it on disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: CheckpointException) -> str:
    """The first rank's failure in one line."""
    for rank, (failure, _) in error.failures.items():
        return f"rank {rank}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    return str(error)
