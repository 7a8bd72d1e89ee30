"""What a checkpoint's folder holds, and whether it is still what was written.

`step_XXXXXXXX` appears by one rename once all in it is on disk: a folder of that name was whole, and `checksums.json`
in it says whether it still is. `latest` is a link to the newest one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from zeco_train.errors import CheckpointError, ConfigError

PROGRESS_FILE = "run.json"
CHECKSUMS_FILE = "checksums.json"
LATEST = "latest"
# Before the path of a model in Hugging Face's form, and what is in it.
HF_PREFIX = "hf:"
HF_CONFIG_FILE = "config.json"
_READ_BYTES = 1 << 22
# Not those set aside, `step_XXXXXXXX.damaged.2`, nor what a user has made of one.
_COMPLETE = re.compile(r"step_[0-9]+")


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
    """The checkpoints of a run that were written to their end, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    folders = (path for path in found if _COMPLETE.fullmatch(path.name) and path.is_dir())
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was taken, by its folder's name."""
    return int(folder.name.removeprefix("step_"))


def read_progress(path: Path) -> Progress:
    """The progress stored in a checkpoint.

    Raises:
        CheckpointError: `run.json` is missing or is not ours.
    """
    try:
        # Those from before steps could be skipped have no count of them.
        stored = {"skipped": 0, "skipped_in_row": 0} | json.loads((path / PROGRESS_FILE).read_text())
        return Progress(**{f.name: stored[f.name] for f in fields(Progress)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: run.json cannot be read: {error}") from error


def find_weights(load: str) -> Path:
    """What `checkpoint.load` names: a checkpoint itself, the newest one of a run's folder, or with `hf:` before it a
    model in Hugging Face's form.

    Raises:
        ConfigError: there is none.
    """
    if load.startswith(HF_PREFIX):
        path = Path(load.removeprefix(HF_PREFIX))
        if not (path / HF_CONFIG_FILE).is_file():
            problem = f"there is no {HF_CONFIG_FILE} in {path}; name the folder of a model on this machine"
            raise ConfigError("checkpoint.load", load, problem)
        return path
    path = Path(load)
    # `latest` may be another one a moment later.
    candidates = [path.resolve()] if (path / PROGRESS_FILE).is_file() else complete_checkpoints(path)
    if not candidates:
        raise ConfigError(
            "checkpoint.load",
            load,
            "holds no complete checkpoint; name a run's folder, a step_… folder, or hf:PATH for a Hugging Face model",
        )
    return candidates[-1]


def read_checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """Size in bytes and SHA-256 of a checkpoint's files, by name.

    Raises:
        ValueError: what is wrong with the table of them, or that there is none.
        OSError: the storage does not answer.
    """
    try:
        text = (folder / CHECKSUMS_FILE).read_text()
    except FileNotFoundError as error:
        raise ValueError(f"{CHECKSUMS_FILE} is missing") from error
    try:
        table = json.loads(text)
        return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{CHECKSUMS_FILE} cannot be read") from error


def find_damage(folder: Path, files: Mapping[str, tuple[int, str]]) -> str | None:
    """What is wrong with the first of `files` that is not what was written; None if all are.

    Raises:
        OSError: the storage does not answer, which says nothing about the files.
    """
    for name, (size, _) in files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found:,} bytes, {size:,} were written"
    for name, (_, sha256) in files.items():
        if _digest(folder / name) != sha256:
            return f"{name} is not what was written (SHA-256)"
    return None


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint that nobody is to load; returns what it is called from now on."""
    number, aside = 1, folder.with_name(f"{folder.name}.damaged")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.damaged.{number}")
    return folder.rename(aside)


def link_latest(checkpoint: Path) -> None:
    """Have the link beside it name this checkpoint."""
    link = checkpoint.parent / LATEST
    temporary = link.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name)
    temporary.replace(link)


def write_durably(path: Path, text: str) -> None:
    """Write a file in full or not at all, and have it on disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of a folder, and have no need of it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
