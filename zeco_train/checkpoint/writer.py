"""Writes a checkpoint's files with their checksums, and publishes the checkpoint by a rename.

Files are written into `step_XXXXXXXX.tmp`. The next save removes such a folder left by a kill.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeco_train.checkpoint.files import (
    METADATA_FILE,
    PROGRESS_FILE,
    link_latest,
    named_step,
    record_checkpoint,
    saved_checkpoints,
    set_aside,
    step_of,
    write_checksums,
)
from zeco_train.errors import CheckpointError
from zeco_train.system.files import sync_file, sync_folder, write_durably

T = TypeVar("T")
# For a file server that restarts or a quota that is raised. The total fits into a launcher's 30 s grace period.
_RETRY_AFTER_SECONDS = (1.0, 3.0, 6.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _HashedWrite(WriteResult):
    # With the SHA-256 of the whole file that contains the tensor.
    sha256: str = ""


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint with `progress`, the text of `run.json`; the coordinator publishes it as `final` at the end.

    Storage errors are retried locally for a bounded time. Errors that persist reach every rank as torch's
    `CheckpointException`. `is_staged`: the state is in host memory already.
    """

    def __init__(self, final: Path, progress: str, keep: int, *, is_staged: bool) -> None:
        # Copy-ahead from a device would, in the thread of an asynchronous save, create a CUDA context on GPU 0.
        ahead = 0 if is_staged else 10_000_000
        # torch syncs `.metadata` before its last bytes have left the stream's buffer; `fs` syncs the closed files.
        super().__init__(final.with_suffix(".tmp"), sync_files=False, per_thread_copy_ahead=ahead)
        self.fs: _HashingFileSystem = _HashingFileSystem()
        self._final, self._progress, self._keep = final, progress, keep
        self._run_dir = final.parent.parent
        self._is_coordinator = False

    @property
    def partial(self) -> Path:
        """The folder of the incomplete checkpoint."""
        return Path(self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder, on the coordinator: no rank writes before all ranks have planned."""
        if self._is_coordinator:
            retried(f"{self.partial}: cannot be made", self._make_folder)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, and return their places with the checksums of the files."""
        write = super().write_data
        results = retried(f"{self.partial}: cannot be written", lambda: self._write(lambda: write(plan, planner)))
        # DCP gathers the results on the coordinator, and the checksums with them.
        hashed: list[WriteResult] = [
            _HashedWrite(r.index, r.size_in_bytes, r.storage_data, self.fs.sha256[r.storage_data.relative_path])
            for r in results
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(hashed)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, once every rank has written its part."""
        finish = super().finish
        retried(f"{self.partial}: cannot be completed", lambda: self._seal(lambda: finish(metadata, results), results))
        retried(f"{self._final}: cannot be made", self._publish)
        folder = self._final.parent
        is_durable = self._follow_up(
            lambda: sync_folder(folder), "its name may not be on disk yet, so older ones are kept"
        )
        self._follow_up(
            lambda: record_checkpoint(self._run_dir, step_of(self._final)),
            "its step could not be noted in the run's folder",
        )
        self._follow_up(lambda: link_latest(self._final), "the link to the latest one is not set")
        if is_durable:
            self._follow_up(self._drop_old, "older ones than checkpoint.keep could not be removed")

    def _make_folder(self) -> None:
        # Leftovers of a killed save.
        for leftover in self._final.parent.glob("step_*.tmp"):
            if named_step(leftover.with_suffix("")) is not None:
                _remove(leftover)
        self.partial.mkdir(parents=True)

    def _write(self, write: Callable[[], Future[list[WriteResult]]]) -> list[WriteResult]:
        # Cleared, since a retry must not report the error of the attempt before.
        self.fs.error = None
        try:
            return write().value()
        except RuntimeError as error:
            if self.fs.error is None:
                raise
            # The C++ tensor writer replaces the OSError by an error of its own.
            raise self.fs.error from error

    def _seal(self, finish: Callable[[], None], results: list[list[WriteResult]]) -> None:
        # The files beside the tensors: torch's metadata, the run's progress and the checksums of all files.
        finish()
        written = (r for rank in results for r in rank if isinstance(r, _HashedWrite))
        sha256 = {r.storage_data.relative_path: r.sha256 for r in written}
        sha256[METADATA_FILE] = self.fs.sha256[METADATA_FILE]
        table = {name: (self.partial.joinpath(name).stat().st_size, digest) for name, digest in sha256.items()}
        progress = self._progress.encode()
        table[PROGRESS_FILE] = len(progress), hashlib.sha256(progress).hexdigest()
        write_durably(self.partial / PROGRESS_FILE, self._progress)
        write_checksums(self.partial, table)

    def _publish(self) -> None:
        if self._final.exists():
            # A modified checkpoint of this step (an intact one would have been loaded): rename it, don't delete it.
            set_aside(self._final)
        self.partial.rename(self._final)

    def _follow_up(self, act: Callable[[], None], problem: str) -> bool:
        # The published checkpoint is complete and will be found even if this fails. Returns whether it succeeded.
        try:
            act()
        except (OSError, CheckpointError) as error:
            logger.warning("%s is complete, but %s: %s", self._final, problem, error)
            return False
        return True

    def _drop_old(self) -> None:
        # Of this run only; other checkpoints in the folder are a user's.
        if self._keep:
            for old in saved_checkpoints(self._run_dir)[: -self._keep]:
                # Renamed first, so that a kill during the removal leaves no partial one under a complete one's name.
                _remove(old.rename(old.with_suffix(".tmp")))


class _HashingFileSystem(FileSystem):
    # Syncs files, and computes the checksums of closed files from the bytes as they are written, so that later
    # corruption is detected. Keeps the last `OSError`.
    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with _HashingFile(io.FileIO(path, mode), self) as stream:
                yield stream
            sync_file(Path(path))
            self.sha256[Path(path).name] = stream.sha256.hexdigest()
        except OSError as error:
            self.error = error
            raise

    # torch writes `.metadata` under a temporary name.
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sha256[Path(new_path).name] = self.sha256.pop(Path(path).name)


class _HashingFile(io.BufferedWriter):
    def __init__(self, file: io.FileIO, owner: _HashingFileSystem) -> None:
        super().__init__(file)
        self._owner, self.sha256 = owner, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self._owner.error = error
            raise


def _remove(checkpoint: Path) -> None:
    # Of a link, only the link: what it points to may be a user's.
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint)


def retried(problem: str, action: Callable[[], T]) -> T:
    """Run a storage operation, retrying after an `OSError`; the last error is raised."""
    for seconds in _RETRY_AFTER_SECONDS:
        try:
            return action()
        except OSError as error:
            logger.warning("%s: %s; trying again in %g s", problem, error.strerror or error, seconds)
            time.sleep(seconds)
    return action()
