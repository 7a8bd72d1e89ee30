"""Writes a checkpoint's files with their checksums, and publishes the checkpoint by a rename.

Files are written into `step_XXXXXXXX.tmp`. The next save removes such a folder left by a kill. A rank writes several
files at a time: one thread alone, which copies from the device, hashes and writes, is slower than most disks.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeco_train.checkpoint.files import (
    FILES_AT_ONCE,
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
from zeco_train.system.numbers import compact

T = TypeVar("T")
# Of a rank's files at least, if it writes several.
_BYTES_OF_FILE = 1 << 28
# Until a file is flushed, the system keeps its bytes: for a tenth of all memory, during which the disk would be idle.
_BYTES_TO_FLUSH = 1 << 26
# Until the first line about a save in progress, and between two.
_SECONDS_TO_REPORT = (1.0, 5.0)
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
    `CheckpointException`. `report` is given lines about the bytes of this rank, if they take longer than a moment.
    """

    def __init__(self, final: Path, progress: str, keep: int, report: Callable[[str], object] | None = None) -> None:
        # Copy-ahead from a device would, in a thread, create a CUDA context on GPU 0; it would gain little, as other
        # files are written meanwhile. torch syncs `.metadata` before its last bytes have left the stream, so `fs` syncs
        # the closed files.
        super().__init__(final.with_suffix(".tmp"), sync_files=False, per_thread_copy_ahead=0)
        self.fs: _HashingFileSystem = _HashingFileSystem()
        self._final, self._progress, self._keep, self._report = final, progress, keep, report
        self._run_dir = final.parent.parent
        self._is_coordinator = False

    @property
    def partial(self) -> Path:
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
        results = retried(f"{self.partial}: cannot be written", lambda: self._write(plan, planner))
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

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        # Cleared, since a retry must not report the error of the attempt before.
        self.fs.error, self.fs.written = None, 0
        total = sum(map(_bytes_of, plan.items))
        parts = [plan]
        if (count := min(total // _BYTES_OF_FILE, FILES_AT_ONCE)) > 1:
            # torch's own threads lose their errors. `storage_data` has the start of the names of a plan's files.
            places = [replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{n}_") for n in range(count)]
            divided = zip(_divided(plan.items, count), places, strict=True)
            parts = [replace(plan, items=items, storage_data=place) for items, place in divided]
        with ThreadPoolExecutor(len(parts), "checkpoint") as pool:
            write = super().write_data
            written = [pool.submit(write, part, cast(SavePlanner, _Staged(planner))) for part in parts]
            if self._report is not None:
                self._follow(written, total, self._report)
            try:
                return [result for each in written for result in each.result().value()]
            except RuntimeError as error:
                if self.fs.error is None:
                    raise
                # The C++ tensor writer replaces the OSError by an error of its own.
                raise self.fs.error from error

    def _follow(self, files: Sequence[futures.Future[Any]], total: int, report: Callable[[str], object]) -> None:
        began, (seconds, later) = time.monotonic(), _SECONDS_TO_REPORT
        while wait(files, seconds).not_done:
            # Files are larger than their tensors, by 1 to 2 kB each.
            done, seconds = min(self.fs.written, total), later
            rate = done / (time.monotonic() - began)
            report(f"writing checkpoint: {compact(done, 'B')} of {compact(total, 'B')}, {compact(rate, 'B/s')}")
        if seconds == later:
            seconds = time.monotonic() - began
            report(f"checkpoint written: {compact(total, 'B')} in {seconds:.1f} s, {compact(total / seconds, 'B/s')}")

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


class _Staged:
    # A planner whose tensors of a GPU come one after the other through the same pinned memory: getting new memory from
    # the system for each of them takes longer than copying it (8 of 18 s for 16 GB, 8 threads, H100).
    def __init__(self, planner: SavePlanner) -> None:
        self._planner, self._memory = planner, torch.empty(0, dtype=torch.uint8)

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        data = self._planner.resolve_data(item)
        if not isinstance(data, Tensor) or data.device.type != "cuda" or data.numel() == 0:
            return data
        return self.staged(data.detach())

    def staged(self, data: Tensor) -> Tensor:
        # A tensor with a storage of its size, as torch would otherwise copy it again; valid until the next call.
        if data.nbytes > len(self._memory):
            self._memory = torch.empty(data.nbytes, dtype=torch.uint8, pin_memory=data.device.type == "cuda")
        memory = torch.frombuffer(self._memory.numpy(), dtype=data.dtype, count=data.numel())
        return memory.view(data.shape).copy_(data)


class _HashingFileSystem(FileSystem):
    # Syncs files, and computes the checksums of closed files from the bytes as they are written, so that later
    # corruption is detected. Keeps the last `OSError`, and counts the bytes.
    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}
        self.error: OSError | None = None
        self.written = 0
        self.lock = threading.Lock()

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
        self._owner, self.sha256, self._unflushed = owner, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            size = super().write(data)
            self._unflushed += size
            if self._unflushed >= _BYTES_TO_FLUSH:
                os.fdatasync(self.fileno())
                self._unflushed = 0
        except OSError as error:
            self._owner.error = error
            raise
        with self._owner.lock:
            self._owner.written += size
        return size


def _bytes_of(item: WriteItem) -> int:
    # On this rank; entries that are no tensors have a few bytes.
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _divided(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    # Into so many parts of about equal bytes, the same in each save.
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=_bytes_of, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(item)
        sizes[least] += _bytes_of(item)
    return parts


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
