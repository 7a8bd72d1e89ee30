"""The layout of a checkpoint's folder, and its verification.

`step_XXXXXXXX` appears by one rename once all its files are on disk, so a folder of that name was complete, and its
`checksums.json` verifies that it still is. `latest` is a link to the newest one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

from zeco_train.errors import CheckpointError, ConfigError, check_open_files
from zeco_train.system.files import IDENTITY_FILE, METRICS_FILE, sha256_of, take_lock, write_durably, write_locked
from zeco_train.system.paths import is_plain_name
from zeco_train.system.small_files import read_json
from zeco_train.version import __version__

# Of a run's folder (in identity.json) and of its checkpoints (in run.json). Version 0.2 wrote no number, which means 1.
RUN_FORMAT = 2
METADATA_FILE = ".metadata"
CHECKPOINT_FOLDER = "checkpoints"
PROGRESS_FILE = "run.json"
CHECKSUMS_FILE = "checksums.json"
LATEST = "latest"
# In the folder of checkpoints: locked by the process that saves there, with the path of its run's folder.
_LOCK = "lock"
_LONGEST_PATH = 4096
# Beside the folder of checkpoints, which may be on another disk: the step of the last complete one, and those that the
# run has saved.
RECORD_FILE = "last_checkpoint.json"
_IF_DAMAGED = "; remove it if it is damaged"
# A rank writes, and reads, so many files at once at most; with 16 a checkpoint of 16.4 GB took 9.7 s where the disk
# needs 8.2 (H100).
FILES_AT_ONCE = 16
# Prefix to the path of a model in Hugging Face format, and a file that its folder has.
HF_PREFIX = "hf:"
HF_CONFIG_FILE = "config.json"
# Excludes renamed ones, `step_XXXXXXXX.damaged.2`, and names that a user has given.
_COMPLETE = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_NUMBER = (1 << 63) - 1

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """A run's progress; together with weights, optimizer state and RNG it is the run's whole state."""

    step: int = 0
    sequences: int = 0  # consumed; the whole state of the data loader
    tokens: int = 0
    logger_run_id: str | None = None  # in W&B
    skipped: int = 0  # steps skipped for a non-finite loss or gradient, over the whole run; they count as done
    skipped_in_row: int = 0  # consecutive ones up to now

    def advance(self, sequences: int, tokens: int, skipped: bool = False) -> None:
        """Count one more optimizer step, `skipped` or not."""
        self.step, self.sequences, self.tokens = self.step + 1, self.sequences + sequences, self.tokens + tokens
        self.skipped, self.skipped_in_row = self.skipped + skipped, self.skipped_in_row + 1 if skipped else 0


def checkpoint_name(step: int) -> str:
    """The folder name of a checkpoint taken after `step` steps."""
    return f"step_{step:08d}"


def named_step(folder: Path) -> int | None:
    """The step in a folder's name; None if it is not the name of a complete checkpoint."""
    return int(folder.name.removeprefix("step_")) if _COMPLETE.fullmatch(folder.name) else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """A run's complete checkpoints, oldest first; none if there is no folder of them.

    Raises CheckpointError if the folder, or a checkpoint in it, exists and cannot be accessed: refused by the system,
    or a link to a disk that is not mounted. A run that ignored this would start over.
    """
    folder = run_dir / CHECKPOINT_FOLDER
    try:
        # Not Path.glob, which ignores denied permissions: a run whose folder cannot be read would start over.
        with os.scandir(folder) as entries:
            found = [Path(entry) for entry in entries if _COMPLETE.fullmatch(entry.name)]
    except FileNotFoundError:
        if folder.is_symlink():
            raise _unreachable(folder) from None
        return []
    except OSError as error:
        check_open_files(error)
        if isinstance(error, NotADirectoryError) and not run_dir.is_dir():
            return []
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    for path in found:
        if path.is_symlink() and not path.exists():
            raise _unreachable(path)
    return sorted(found, key=step_of)


def _unreachable(link: Path) -> CheckpointError:
    target = link.readlink()
    return CheckpointError(f"{link}: is a link to {target}, which is not there; mount that disk, or remove the link")


def take_checkpoints(run_dir: Path) -> tuple[int, str | None]:
    """Create the folder of a run's checkpoints if it is missing, lock it (see `take_lock`), and mark it as this run's.

    The folder may be a link. Two runs in one would load and remove each other's checkpoints. Raises ConfigError if it
    is another run's, a link to a folder with other files, or another process saves there; OSError if the system refuses
    to write.
    """
    complete_checkpoints(run_dir)
    folder = run_dir / CHECKPOINT_FOLDER
    folder.mkdir(exist_ok=True)
    other = next((path for path in folder.iterdir() if not path.name.startswith(("step_", LATEST, _LOCK))), None)
    if folder.is_symlink() and other is not None:
        raise ConfigError("run_dir", run_dir, f"its {CHECKPOINT_FOLDER} are a link to a folder with {other.name}")
    try:
        lock, problem = take_lock(folder / _LOCK)
    except BlockingIOError as error:
        in_use = f"another process saves in its {CHECKPOINT_FOLDER}; end it first"
        raise ConfigError("run_dir", run_dir, in_use) from error
    marked = Path(os.fsdecode(os.pread(lock, _LONGEST_PATH, 0)))
    # A run that has moved is not where the mark says any more.
    for owner in (marked, folder.resolve().parent):
        if _is_another_runs(folder, owner, run_dir):
            os.close(lock)
            problem = f"its {CHECKPOINT_FOLDER} are those of the run in {owner}"
            raise ConfigError("run_dir", run_dir, f"{problem}; remove the link, or name a new folder")
    write_locked(lock, os.fsencode(run_dir.resolve()))
    return lock, problem


def _is_another_runs(folder: Path, other: Path, run_dir: Path) -> bool:
    # ValueError: a damaged mark, with a NUL character.
    with suppress(OSError, ValueError):
        is_run = (other / IDENTITY_FILE).is_file() and folder.samefile(other / CHECKPOINT_FOLDER)
        return is_run and not other.samefile(run_dir)
    return False


def step_of(checkpoint: Path) -> int:
    """The step after which a complete checkpoint was taken, by its folder's name."""
    return int(checkpoint.name.removeprefix("step_"))


def read_progress(path: Path) -> Progress:
    """The progress stored in a checkpoint; `CheckpointError` if it cannot be read, or another version wrote it."""
    try:
        stored = read_json(path / PROGRESS_FILE)
        if isinstance(stored, dict):
            check_format(stored, path)
        return parse_progress(stored)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: run.json cannot be read: {reason}") from error


def check_format(stored: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if another version wrote `stored`, a run's identity.json or a checkpoint's run.json."""
    if (found := stored.get("format", 1)) == RUN_FORMAT:
        return
    if found == 1:
        way = f"python -m zeco_train.export {path} OUT with 0.2, then a new run with checkpoint.load=hf:OUT"
        raise CheckpointError(f"{path}: was written by version 0.2, and only 0.2 reads it; the way on: {way}")
    raise CheckpointError(
        f"{path}: has format {found!s:.40}; version {__version__} reads format {RUN_FORMAT}: take the one that wrote it"
    )


def parse_progress(stored: Any) -> Progress:
    """The progress in the parsed content of a `run.json`; `ValueError` if a field is missing or invalid."""
    if not isinstance(stored, dict):
        raise ValueError("not a JSON object")
    if missing := [f.name for f in fields(Progress) if f.name not in stored]:
        raise ValueError(f"{missing[0]} is missing")
    progress = Progress(**{f.name: stored[f.name] for f in fields(Progress)})
    for name in ("step", "sequences", "tokens", "skipped", "skipped_in_row"):
        if not is_count(value := getattr(progress, name)):
            raise ValueError(f"{name}={value!r:.40} is no whole number from 0 to 2^63 − 1")
    if not isinstance(progress.logger_run_id, str | None):
        raise ValueError(f"logger_run_id={progress.logger_run_id!r:.40} is no text")
    return progress


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from a file is a whole number from 0 to 2^63 − 1."""
    # Not isinstance, which accepts bools.
    return type(value) is int and 0 <= value <= _LARGEST_NUMBER


def is_hf_folder(folder: Path) -> bool:
    """Whether this is the folder of a model in Hugging Face format, of any architecture."""
    return (folder / HF_CONFIG_FILE).is_file()


def find_weights(load: str) -> Path:
    """Resolve `checkpoint.load`: a checkpoint, the newest one of a run's folder, or `hf:` and a Hugging Face folder.

    Raises ConfigError if there is none, CheckpointError if it cannot be read.
    """
    if load.startswith(HF_PREFIX):
        path = Path(load.removeprefix(HF_PREFIX))
        if not is_hf_folder(path):
            problem = f"there is no {HF_CONFIG_FILE} in {path}; name the folder of a model on this machine"
            raise ConfigError("checkpoint.load", load, problem)
        return path
    path = Path(load)
    # Resolved, since `latest` may be relinked at any moment.
    candidates = [path.resolve()] if (path / PROGRESS_FILE).is_file() else complete_checkpoints(path)
    if not candidates:
        ways = "name a run's folder, a step_… folder, or hf:PATH for a Hugging Face model"
        raise ConfigError("checkpoint.load", load, f"holds no complete checkpoint; {ways}")
    read_progress(candidates[-1])
    return candidates[-1]


def read_checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """Size in bytes and SHA-256 of a checkpoint's files, by name; ValueError if the table is missing or invalid."""
    try:
        table = read_json(folder / CHECKSUMS_FILE)
    except FileNotFoundError as error:
        raise ValueError(f"{CHECKSUMS_FILE} is missing") from error
    except ValueError as error:
        raise ValueError(f"{CHECKSUMS_FILE} cannot be read") from error
    if not isinstance(table, dict):
        raise ValueError(f"{CHECKSUMS_FILE} is no table of files")
    found = {}
    for name, entry in table.items():
        if not is_plain_name(name):
            raise ValueError(f"{CHECKSUMS_FILE} names {name!r:.80}, which is no file of the folder")
        size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not (is_count(size) and isinstance(digest, str) and _SHA256.fullmatch(digest)):
            raise ValueError(f"{CHECKSUMS_FILE} has no size and SHA-256 of {name}")
        found[name] = size, digest
    return found


def write_checksums(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Write size in bytes and SHA-256 of files, by name, for `read_checksums`."""
    rows = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
    write_durably(folder / CHECKSUMS_FILE, json.dumps(rows, indent=1))


def find_damage(folder: Path, files: Mapping[str, tuple[int, str]]) -> str | None:
    """Describe the first damaged file among `files`; None if all are intact. An `OSError` does not mean damage."""
    # Missing and truncated files first: hashing reads the whole checkpoint.
    for name, (size, _) in files.items():
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            return f"{name} is missing"
        # A link to a FIFO or a device would block the hashing below.
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no regular file"
        if status.st_size != size:
            return f"{name} has {status.st_size:,} bytes, {size:,} were written"
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        found = pool.map(lambda name: sha256_of(folder / name), files)
        different = [name for name, digest in zip(files, found, strict=True) if digest != files[name][1]]
    return f"{different[0]} is not what was written (SHA-256)" if different else None


def read_record(path: Path, remedy: str = "") -> dict[str, Any]:
    """The JSON object in a file; `CheckpointError` with the remedy if there is none."""
    try:
        if isinstance(record := read_json(path), dict):
            return record
        raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read: {reason}{remedy}") from error


def record_checkpoint(run_dir: Path, step: int | None) -> None:
    """Record in a run's folder the step of its last complete checkpoint; None: there has been none."""
    # Later ones, of before the run went back to an earlier step, are a user's now.
    saved = [] if step is None else [*(each for each in map(step_of, saved_checkpoints(run_dir)) if each < step), step]
    write_durably(run_dir / RECORD_FILE, json.dumps({"step": step, "saved": saved}))


def saved_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints that this run itself has saved, oldest first; without a record, all."""
    complete, path = complete_checkpoints(run_dir), run_dir / RECORD_FILE
    if not path.exists():
        return complete
    if not isinstance(saved := read_record(path, _IF_DAMAGED).get("saved"), list):
        raise CheckpointError(f"{path}: has no list of saved steps{_IF_DAMAGED}")
    return [checkpoint for checkpoint in complete if step_of(checkpoint) in saved]


def recorded_checkpoint(run_dir: Path) -> int | None:
    """The step of the last checkpoint that a run has completed; None if it has completed none.

    Raises FileNotFoundError if the record was removed, CheckpointError if it cannot be read.
    """
    path = run_dir / RECORD_FILE
    if not path.exists():
        raise FileNotFoundError(path)
    step = read_record(path, _IF_DAMAGED).get("step", "none")
    if not (step is None or is_count(step)):
        raise CheckpointError(f"{path}: has no step{_IF_DAMAGED}")
    return step


def check_nothing_is_missing(run_dir: Path) -> None:
    """Raise `CheckpointError` if the run has completed a checkpoint, by its record or else by rows of metrics.jsonl."""
    try:
        if (step := recorded_checkpoint(run_dir)) is None:
            return
        known = f"that of step {step} was saved"
    except FileNotFoundError:
        metrics = run_dir / METRICS_FILE
        if not metrics.exists() or metrics.stat().st_size == 0:
            return
        known = f"{METRICS_FILE} has rows of earlier steps"
    ways = "bring them back (is a disk not mounted?), or start from step 0 again with checkpoint.missing=start_anew"
    raise CheckpointError(f"{run_dir / CHECKPOINT_FOLDER}: holds no checkpoint, but {known}; {ways}")


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, or a folder in the way, so that it is not loaded; returns the new path."""
    number, aside = 1, folder.with_name(f"{folder.name}.damaged")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.damaged.{number}")
    return folder.rename(aside)


def link_latest(checkpoint: Path) -> None:
    """Point the link `latest` at this checkpoint; atomic. A folder in its place, as of a copied run, is renamed."""
    link = checkpoint.parent / LATEST
    temporary = link.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        # A relative target survives a move of the run's folder; the rename replaces the link without a gap.
        temporary.symlink_to(checkpoint.name)
        if link.is_dir() and not link.is_symlink():
            logger.warning("%s was a folder, not a link; it is %s now", link, set_aside(link).name)
        temporary.replace(link)
    finally:
        temporary.unlink(missing_ok=True)
