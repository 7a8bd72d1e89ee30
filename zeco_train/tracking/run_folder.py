"""A run's folder: one identity for ever, made and written by rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.tokenizer import comparable
from data.tokenizer_files import TOKENIZER_FOLDER, copy_tokenizer
from zeco_train.checkpoint.files import (
    CHECKPOINT_FOLDER,
    RECORD_FILE,
    complete_checkpoints,
    read_record,
    record_checkpoint,
)
from zeco_train.errors import CheckpointError, ConfigError, system_errors
from zeco_train.lifecycle.logs import LOG_FOLDER
from zeco_train.system.files import take_lock, write_durably
from zeco_train.system.run_files import METRICS_FILE
from zeco_train.system.small_files import read_small

IDENTITY_FILE = "identity.json"
# Held by the process that trains in the folder. Never replaced, as `identity.json` is: a lock belongs to one file.
_LOCK = "lock"
# What a batch script writes of its job, before the first rank starts.
_JOBS = "slurm"
# In which a network file system shows one node what another one wrote.
_SECONDS_TO_APPEAR = 10.0
# The part of an identity that no configuration key shows: a digest of all tokens.
_TOKENS_KEY = "data.tokens_sha256"
# They name it, and say how it was begun.
_NOT_OF_THE_MODEL = {"model.name", "model.initializer_range"}
# What identities from before there were such keys stand for.
_ALWAYS_BEFORE = {
    "data.shuffle": "sequences",
    "data.weights": [1],
    "data.min_document_tokens": 0,
    "model.use_output_gate": True,
}


class RunFolder:
    """A run's folder, held by this process until `release`: a second start of a run that still goes on is refused.

    Opening makes the folder, or finds it to be of this very run. It changes nothing in it before `begin`, but that the
    lock file holds `mark` meanwhile.

    Args:
        path: the folder.
        identity: what may not change between the starts of one run, by configuration key.

    Attributes:
        mark: random text, by which other ranks recognise the folder (see `check_shared`).
        has_begun: whether an earlier start has made the folder a run's.
        lock_problem: why the file system cannot lock, so that a second start would go unnoticed; mostly None.

    Raises:
        ConfigError: the folder cannot be written, is in use, or is not a run's.
        CheckpointError: it holds a run with another identity; the first difference is named.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self._identity = path, identity
        self.mark = secrets.token_hex(16)
        self.lock_problem: str | None = None
        self._lock: int | None = None
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
                self._write_mark(self.mark)
            except BaseException:
                self.release()
                raise

    def begin(self, config: Mapping[str, Any], overrides: list[str]) -> None:
        """Make the folder this run's: its identity, `config.yaml`, and a line in `overrides.txt`.

        Args:
            config: the whole configuration, resolved.
            overrides: the command line; written so that it can be pasted into a shell.

        Raises:
            ConfigError: the folder cannot be written.
        """
        with _system_errors(self.path):
            self._write_mark("")
            if not (self.path / IDENTITY_FILE).exists():
                write_durably(self.path / IDENTITY_FILE, json.dumps(self._identity, indent=2))
            if not ((self.path / RECORD_FILE).exists() or (self.path / METRICS_FILE).exists()):
                record_checkpoint(self.path, None)
            self._begun = True
            _write_config(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))))
            with (self.path / "overrides.txt").open("a") as file:
                file.write(shlex.join(overrides) + "\n")

    def keep_tokenizer(self, files: Path | None) -> None:
        """Copy the tokenizer's own files here, if there are any: the token store may be gone by the time the model is
        to read and write text.

        Raises:
            ConfigError: the folder cannot be written.
            DataError: they are not all files of their folder; see `check_tokenizer`.
        """
        kept = self.path / TOKENIZER_FOLDER
        if files is None or kept.exists():
            return
        with _system_errors(self.path):
            partial = kept.with_name(f"{TOKENIZER_FOLDER}.tmp")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            # Where the folder is a model's, its weights and all else stay there.
            copy_tokenizer(files, partial, model_config=True)
            partial.rename(kept)

    def release(self) -> None:
        """Let others write there, and leave nothing behind that `begin` has not made the run's.

        A process that ends, in any way, lets others write there, too.
        """
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if not self._begun:
                self._write_mark("")
                if not (self.path / IDENTITY_FILE).exists():
                    (self.path / _LOCK).unlink()
                    if self._is_new:
                        self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def _write_mark(self, text: str) -> None:
        """Fill the lock file, unless that is what it holds."""
        assert self._lock is not None
        if os.pread(self._lock, 1 + len(self.mark), 0) != text.encode():
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, text.encode(), 0)
            os.fsync(self._lock)


def check_shared(path: Path, mark: str, rank: int) -> None:
    """Check that `path` on this machine is the folder that rank 0 holds, by the mark in it.

    Args:
        mark: of rank 0's `RunFolder`.
        rank: this one, to be named.

    Raises:
        ConfigError: it is another folder, or none.
    """
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while _read_mark(path) != mark:
        if time.monotonic() > deadline:
            problem = f"is not the same folder on rank {rank}; name one on a file system that all nodes share"
            raise ConfigError("run_dir", path, problem)
        time.sleep(0.1)


def _read_mark(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        # Listing makes a client of NFS ask the server for what the folders hold by now.
        for folder in (path.parent, path):
            next(folder.iterdir(), None)
        return read_small(path / _LOCK).decode()
    return None


def _check_owner(path: Path) -> None:
    """Refuse a folder that is not empty and not a run's, before anything is made in it."""
    # In this order: another start may be making the folder a run's, and its identity comes first.
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(f".{IDENTITY_FILE}.")}
    if names - {_LOCK, _JOBS} and not (path / IDENTITY_FILE).exists():
        raise ConfigError("run_dir", path, "is not empty and not a run's folder; name a new one")


def _check_links(path: Path) -> None:
    """Refuse files that are links: in a folder from somebody else they could have a run write to any file of its user.

    Folders may be links, such as that of checkpoints to a larger disk, which is looked at elsewhere.
    """
    for folder in (path, path / LOG_FOLDER):
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.is_symlink() and not entry.is_dir() and entry.name != CHECKPOINT_FOLDER:
                name = entry.relative_to(path)
                raise ConfigError("run_dir", path, f"{name} is a link, and files of a run never are; remove the link")


def _system_errors(path: Path) -> AbstractContextManager[None]:
    way = "name another folder"
    return system_errors(lambda reason: ConfigError("run_dir", path, f"cannot be written ({reason}); {way}"))


def read_identity(run_dir: Path) -> dict[str, Any]:
    """What may not change between the starts of a run; see `RunFolder`.

    Raises:
        CheckpointError: it cannot be read.
    """
    return read_record(run_dir / IDENTITY_FILE)


def other_model(run_dir: Path, identity: Mapping[str, Any]) -> str | None:
    """What to tell the user of a new run whose weights are from the one in `run_dir`, if they are of another model, for
    all that their shapes are the same, or of another tokenizer; None if not, or if nobody knows.
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
    stored = {key: value for key, value in _ALWAYS_BEFORE.items() if key in wanted} | dict(stored)
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


def _write_config(path: Path, text: str) -> None:
    """Write the configuration; one that differs, from an earlier start, is kept under a number."""
    if path.exists() and read_small(path) != text.encode():
        number = 1
        while (older := path.with_name(f"config.{number}.yaml")).exists():
            number += 1
        path.rename(older)
    write_durably(path, text)
