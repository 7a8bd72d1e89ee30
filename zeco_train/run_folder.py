"""A run's folder: one identity for ever, made and written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from zeco_train.checkpoint import write_durably
from zeco_train.config import Config, to_plain
from zeco_train.errors import CheckpointError, ConfigError

_IDENTITY = "identity.json"


def open_run_folder(config: Config, identity: Mapping[str, Any], overrides: list[str]) -> Path:
    """Make the folder, or find it to be of this very run; write `config.yaml` and append to `overrides.txt`.

    Args:
        identity: what may not change between the starts of one run, by configuration key.

    Raises:
        ConfigError: the folder cannot be written, or is not a run's.
        CheckpointError: it holds a run with another identity; the first difference is named.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        stored = run_dir / _IDENTITY
        if stored.exists():
            _compare(run_dir, json.loads(stored.read_text()), identity)
        elif any(path.name != f"{_IDENTITY}.tmp" for path in run_dir.iterdir()):
            raise ConfigError("run_dir", run_dir, "is not empty and not a run's folder; name a new one")
        else:
            write_durably(stored, json.dumps(identity, indent=2))
        _write_config(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_plain(config))))
        with (run_dir / "overrides.txt").open("a") as file:
            file.write(" ".join(overrides) + "\n")
    except OSError as error:
        raise ConfigError("run_dir", run_dir, f"cannot be written ({error.strerror}); name another folder") from error
    except ValueError as error:
        raise CheckpointError(f"{run_dir / _IDENTITY}: cannot be read: {error}") from error
    return run_dir


def _compare(run_dir: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted({*stored, *wanted}):
        if stored.get(key) != wanted.get(key):
            raise CheckpointError(
                f"{key}={wanted.get(key)}: the run in {run_dir} has {stored.get(key)} and can only go on with that; "
                f"for a new run, take another name (and checkpoint.load={run_dir} for its weights)"
            )


def _write_config(path: Path, text: str) -> None:
    """Write the configuration; one that differs, from an earlier start, is kept under a number."""
    if path.exists() and path.read_text() != text:
        number = 1
        while (older := path.with_name(f"config.{number}.yaml")).exists():
            number += 1
        path.rename(older)
    write_durably(path, text)
