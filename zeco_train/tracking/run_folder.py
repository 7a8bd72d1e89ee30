"""A run's folder, with a fixed identity; created and written by rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.tokenizer import TOKENIZER_FOLDER, comparable, copy_tokenizer, info_problem
from zeco_train.checkpoint.files import (
    CHECKPOINT_FOLDER,
    RECORD_FILE,
    RUN_FORMAT,
    check_format,
    complete_checkpoints,
    read_record,
    record_checkpoint,
    take_checkpoints,
)
from zeco_train.errors import CheckpointError, ConfigError, system_errors
from zeco_train.system.files import IDENTITY_FILE, METRICS_FILE, take_lock, write_durably, write_locked
from zeco_train.system.small_files import read_small
from zeco_train.system.stored_values import flatten, read_values

_CONFIG_FILE = "config.yaml"
# Locked by the process that trains in the folder.
_LOCK = "lock"
# Folder of the batch script's job files, created before the first rank starts.
_JOBS = "slurm"
# Time for a network file system to show one node's writes to another.
_SECONDS_TO_APPEAR = 10.0
# The one identity entry that is not a configuration key: a digest of all tokens.
_TOKENS_KEY = "data.tokens_sha256"
# Name and initialisation: not part of the trained model.
_NOT_OF_THE_MODEL = {"model.name", "model.initializer_range"}


class RunFolder:
    """A run's folder, locked by this process until `release`: a second start of a live run is refused.

    Opening creates the folder, or checks that it belongs to this run. Before `begin` it writes only `mark`, to the lock
    file. `identity` has the settings that must not change between the starts of a run, by configuration key.

    Attributes:
        mark: random text by which other ranks recognise the folder (see `check_shared`).
        has_begun: whether an earlier start has initialised the folder.
        changes: after `begin`, the settings that differ from the last start's, a line each.
        lock_problem: why the file system cannot lock, in which case a second start goes undetected; usually None.

    Raises:
        ConfigError: the folder cannot be written, is in use, or is not a run's folder.
        CheckpointError: it holds a run with another identity; the first difference is named.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self._identity = path, identity
        self.mark, self.changes = secrets.token_hex(16), list[str]()
        self.lock_problem: str | None = None
        self._lock: int | None = None
        self._checkpoints: int | None = None
        self._begun = False
        with _system_errors(path):
            self._is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            _check_owner(path)
            _check_links(path)
            try:
                self._lock, self.lock_problem = take_lock(path / _LOCK)
            except BlockingIOError as error:
                raise ConfigError("run_dir", path, "another process is training there; end it first") from error
            try:
                self.has_begun = (path / IDENTITY_FILE).exists()
                if self.has_begun:
                    _compare(path, read_identity(path), identity)
                write_locked(self._lock, self.mark.encode())
            except BaseException:
                self.release()
                raise

    def begin(self, config: Mapping[str, Any], overrides: list[str]) -> None:
        """Initialise the folder: write the identity, `config.yaml`, and the command line to `overrides.txt`.

        Raises:
            ConfigError: the folder cannot be written, or its checkpoints are another run's.
            CheckpointError: see `complete_checkpoints`.
        """
        assert self._lock is not None
        with _system_errors(self.path):
            write_locked(self._lock, b"")
            # Before all other files: without it the next start would take the folder for another program's.
            if not (self.path / IDENTITY_FILE).exists():
                write_durably(self.path / IDENTITY_FILE, json.dumps({"format": RUN_FORMAT, **self._identity}, indent=2))
            self._checkpoints, problem = take_checkpoints(self.path)
            self.lock_problem = self.lock_problem or problem
            if not ((self.path / RECORD_FILE).exists() or (self.path / METRICS_FILE).exists()):
                record_checkpoint(self.path, None)
            self._begun = True
            before, now = _last_settings(self.path), dict(flatten(config, lists=False))
            self.changes = [
                f"{key}={_text(now[key])}, before {_text(value)}"
                for key, value in before.items()
                if key in now and now[key] != value
            ]
            _write_config(self.path / _CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(dict(config))))
            with (self.path / "overrides.txt").open("a") as file:
                file.write(shlex.join(overrides) + "\n")

    def keep_tokenizer(self, files: Path | None) -> None:
        """Copy the tokenizer's files here, if there are any: the token store may be gone when the model is used.

        Raises:
            ConfigError: the folder cannot be written.
            DataError: a file is a link out of its folder; see `check_tokenizer`.
        """
        kept = self.path / TOKENIZER_FOLDER
        if files is None or kept.exists():
            return
        with _system_errors(self.path):
            # Renamed when complete: later starts keep an existing folder as it is.
            partial = kept.with_name(f"{TOKENIZER_FOLDER}.tmp")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            # In a model's folder, the weights and all other files are not copied.
            copy_tokenizer(files, partial, model_config=True)
            partial.rename(kept)

    def release(self) -> None:
        """Unlock the folder and its checkpoints; remove what was made if no start has initialised it."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if not self._begun:
                write_locked(self._lock, b"")
                if not (self.path / IDENTITY_FILE).exists():
                    (self.path / _LOCK).unlink()
                    if self._is_new:
                        self.path.rmdir()
        for lock in (self._checkpoints, self._lock):
            if lock is not None:
                os.close(lock)
        self._checkpoints = self._lock = None


def check_shared(path: Path, mark: str, rank: int) -> None:
    """Check by rank 0's mark that `path` on this machine is rank 0's folder; `ConfigError` for this `rank` if not."""
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while _read_mark(path) != mark:
        if time.monotonic() > deadline:
            problem = f"is not the same folder on rank {rank}; name one on a file system that all nodes share"
            raise ConfigError("run_dir", path, problem)
        time.sleep(0.1)


def _read_mark(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        # Listing makes an NFS client refresh its view of the folders.
        for folder in (path.parent, path):
            next(folder.iterdir(), None)
        return read_small(path / _LOCK).decode()
    return None


def _check_owner(path: Path) -> None:
    # List first, then look for the identity: a concurrent start writes its identity before other files.
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(f".{IDENTITY_FILE}.")}
    if names - {_LOCK, _JOBS} and not (path / IDENTITY_FILE).exists():
        raise ConfigError("run_dir", path, "is not empty and not a run's folder; name a new one")


def _check_links(path: Path) -> None:
    # Links out of an untrusted folder would redirect its writes to any file of its user. Only the folder of checkpoints
    # may be a link, for example to a larger disk; see `take_checkpoints`.
    root = os.path.realpath(path)
    for link in _links(path, path):
        if not Path(os.path.realpath(link)).is_relative_to(root):
            problem = f"{link.relative_to(path)} is a link out of the folder, as only {CHECKPOINT_FOLDER} may be"
            raise ConfigError("run_dir", path, f"{problem}; remove the link")


def _links(folder: Path, run: Path) -> Iterator[Path]:
    # A temporary folder of another start may be gone by now.
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if (path := Path(entry)) == run / CHECKPOINT_FOLDER:
                continue
            if entry.is_symlink():
                yield path
            # Each start of W&B makes a folder there, with a link to a log in the user's cache, and writes to no other.
            elif entry.is_dir() and folder != run / "wandb":
                yield from _links(path, run)


def _system_errors(path: Path) -> AbstractContextManager[None]:
    return system_errors(
        lambda reason: ConfigError("run_dir", path, f"cannot be written ({reason}); name another folder")
    )


def read_identity(run_dir: Path) -> dict[str, Any]:
    """The settings that must not change between the starts of a run.

    Raises:
        CheckpointError: it cannot be read, another version wrote it, or its tokenizer is none.
    """
    identity = read_record(run_dir / IDENTITY_FILE)
    check_format(identity, run_dir)
    del identity["format"]
    if (problem := info_problem(identity.get("data.tokenizer") or {})) is not None:
        raise CheckpointError(f"{run_dir / IDENTITY_FILE}: cannot be read: data.tokenizer: {problem}")
    return identity


def begun_with(run_dir: Path, key: str) -> Any:
    """The value of a key of the identity with which the run in a folder began; None if no run has begun there."""
    # `RunFolder` reports a folder that cannot be read.
    if not os.access(run_dir / IDENTITY_FILE, os.R_OK):
        return None
    return read_identity(run_dir).get(key)


def other_model(run_dir: Path, identity: Mapping[str, Any]) -> str | None:
    """A warning for a new run that loads weights of another model or tokenizer, which shapes alone do not show.

    None if they match, or if the identity of `run_dir` cannot be read.
    """
    try:
        stored = read_identity(run_dir)
    except CheckpointError:
        return None
    names = {name for name in identity if name.startswith("model.")} - _NOT_OF_THE_MODEL | {"data.tokenizer"}
    for name in sorted(names & stored.keys()):
        if comparable(stored[name]) != comparable(identity[name]):
            return f"these weights were trained with {name}={stored[name]}, not {identity[name]}"
    return None


def _compare(run_dir: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted({*stored, *wanted}):
        if comparable(stored.get(key)) == comparable(wanted.get(key)):
            continue
        problem = f"{key}={wanted.get(key)}: the run in {run_dir} has {stored.get(key)} and can only go on with that"
        if key == _TOKENS_KEY:
            problem = f"data: these are not the tokens that the run in {run_dir} began with (another text, or split)"
        weights = f"(and checkpoint.load={run_dir} for its weights)"
        if not complete_checkpoints(run_dir):
            weights = "or remove that one, which has no checkpoint yet"
        raise CheckpointError(f"{problem}; for a new run, take another name {weights}")


def _last_settings(run_dir: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(flatten(read_values(run_dir / _CONFIG_FILE), lists=False))
    return {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _write_config(path: Path, text: str) -> None:
    # A different one of an earlier start is kept as config.N.yaml.
    if path.exists() and read_small(path) != text.encode():
        number = 1
        while (older := path.with_name(f"config.{number}.yaml")).exists():
            number += 1
        path.rename(older)
    write_durably(path, text)
