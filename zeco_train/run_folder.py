"""A run's folder: one identity for ever, made and written by rank 0."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from zeco_train.checkpoint import write_durably
from zeco_train.config import Config, to_plain
from zeco_train.errors import CheckpointError, ConfigError

_IDENTITY = "identity.json"
# The part of an identity that no configuration key shows: a digest of all tokens.
_TOKENS_KEY = "data.tokens_sha256"


class RunFolder:
    """A run's folder, held by this process until `release`: a second start of a run that still goes on is refused.

    Opening makes the folder, or finds it to be of this very run, writes `config.yaml` and appends to `overrides.txt`.

    Args:
        config: names the folder.
        identity: what may not change between the starts of one run, by configuration key.
        overrides: the command line.

    Raises:
        ConfigError: the folder cannot be written, is in use, or is not a run's.
        CheckpointError: it holds a run with another identity; the first difference is named.
    """

    def __init__(self, config: Config, identity: Mapping[str, Any], overrides: list[str]) -> None:
        self.path = Path(config.run_dir)
        self._lock: int | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check(identity)
            self._take()
            _write_config(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_plain(config))))
            with (self.path / "overrides.txt").open("a") as file:
                file.write(" ".join(overrides) + "\n")
        except OSError as error:
            problem = f"cannot be written ({error.strerror}); name another folder"
            raise ConfigError("run_dir", self.path, problem) from error

    def release(self) -> None:
        """Let others write there. A process that ends, in any way, does so too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check(self, identity: Mapping[str, Any]) -> None:
        stored = self.path / _IDENTITY
        if stored.exists():
            _compare(self.path, _read_identity(stored), identity)
        elif any(path.name != f"{_IDENTITY}.tmp" for path in self.path.iterdir()):
            raise ConfigError("run_dir", self.path, "is not empty and not a run's folder; name a new one")
        else:
            write_durably(stored, json.dumps(identity, indent=2))

    def _take(self) -> None:
        self._lock = os.open(self.path / _IDENTITY, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise ConfigError("run_dir", self.path, "another process is training there; end it first") from error


def _read_identity(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: cannot be read: not a JSON object")
    return stored


def _compare(run_dir: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted({*stored, *wanted}):
        if stored.get(key) == wanted.get(key):
            continue
        problem = f"{key}={wanted.get(key)}: the run in {run_dir} has {stored.get(key)} and can only go on with that"
        if key == _TOKENS_KEY:
            problem = f"data: these are not the tokens that the run in {run_dir} began with (another text, or split)"
        remedy = f"for a new run, take another name (and checkpoint.load={run_dir} for its weights)"
        raise CheckpointError(f"{problem}; {remedy}")


def _write_config(path: Path, text: str) -> None:
    """Write the configuration; one that differs, from an earlier start, is kept under a number."""
    if path.exists() and path.read_bytes() != text.encode():
        number = 1
        while (older := path.with_name(f"config.{number}.yaml")).exists():
            number += 1
        path.rename(older)
    write_durably(path, text)
