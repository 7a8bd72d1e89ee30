"""Work folder of a preparation, from which an interrupted run resumes.

`.NAME.preparing` beside the store NAME holds

    store/         the partial store (data.store.writer), without its meta.json
    parts/         tokenised parts not yet in the store (data.preparation.pipeline)
    state.json     State: the valid contents of the two; replaced atomically, after those are fsynced

A process owns it while it holds the lock on `.NAME.preparing.lock`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.preparation.pipeline import Part
from data.store import META_FILE, check_replaceable
from data.store.writer import WriterState
from zeco_train.errors import DataError
from zeco_train.system.files import (
    make_parent,
    move_into_place,
    sync_file,
    sync_folder,
    take_lock,
    write_durably,
    write_errors,
)
from zeco_train.system.paths import is_plain_name
from zeco_train.system.small_files import read_json

_VERSION = 2
_SUFFIX = ".preparing"
_START_ANEW = "give --overwrite to start anew, or choose another --out"

READING, READ, SPLIT, MOVING = "reading", "read", "split", "moving"


@dataclass(frozen=True)
class State:
    """Progress of a preparation."""

    # "reading" the text; all is "read"; the validation part is "split" off; the store is complete and "moving" into
    # place.
    phase: str = READING
    writer: WriterState = field(default_factory=WriterState)
    unit: int = 0  # the next one
    first: int = 0  # how many of its documents are done
    stamps: str = ""  # digest of the stamps of all units begun, in order
    waiting: tuple[Part, ...] = ()  # of later documents
    counts: dict[str, int] = field(default_factory=dict)  # sums of `Part.counts`
    amount: float = 0.0
    commit: str | None = None  # of a hub data set
    meta_sha256: str = ""  # of the complete store

    @property
    def is_new(self) -> bool:
        return self == State()


class WorkFolder:
    """A locked work folder; `state` is the last saved one, of this process or of an interrupted one."""

    def __init__(self, folder: Path, arguments: dict[str, Any], state: State) -> None:
        self.folder, self.state, self._arguments = folder, state, arguments
        self.store, self.parts = folder / "store", folder / "parts"

    def save(self, state: State) -> None:
        """Save `state` as the point to resume from. Fsyncs the parts; the caller has fsynced the rest."""
        known = {part.name for part in self.state.waiting}
        for part in state.waiting:
            if part.name not in known:
                for path in part.paths(self.parts):
                    sync_file(path)
        # The new names, too: after a power loss the state must not refer to files that are gone.
        sync_folder(self.parts)
        sync_folder(self.store)
        record = {"version": _VERSION, "arguments": self._arguments, "state": asdict(state)}
        write_durably(self.folder / "state.json", json.dumps(record))
        self.state = state

    def move_to(self, out: Path, replace: bool) -> None:
        """Move the complete store into place. May be repeated after an interruption."""
        if meta_sha256(out) != self.state.meta_sha256:
            move_into_place(self.store, out, check_replaceable if replace else None)
            sync_folder(out.parent)

    def start_anew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.folder, self.store, self.parts):
            folder.mkdir()
        self.save(State())


@contextmanager
def work_folder(out: Path, arguments: dict[str, Any], overwrite: bool) -> Iterator[WorkFolder]:
    """The work folder of the store `out`, new or left by an interrupted run with these arguments.

    It is kept if the block raises after some work was saved, else deleted at the end.

    Args:
        out: the store's final path.
        arguments: everything the result depends on, as JSON.
        overwrite: discard an interrupted preparation with other arguments.

    Raises:
        DataError: in use by another process, left by a run with other arguments, or the system refuses to write.
    """
    folder = _folder_for(out)
    remedy = "choose another folder"
    with write_errors(out, remedy):
        make_parent(out, remedy)
        with _locked(out, folder.with_name(folder.name + ".lock")):
            work = _open(folder, arguments, overwrite)
            try:
                yield work
            except BaseException:
                if work.state.is_new:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder)


def kept_tokens(out: Path) -> int:
    """Tokens saved by an interrupted preparation of `out`."""
    with contextlib.suppress(DataError, OSError):
        return _read(_folder_for(out))[1].writer.num_tokens
    return 0


def _folder_for(out: Path) -> Path:
    return out.with_name(f".{out.name}{_SUFFIX}")


def _open(folder: Path, arguments: dict[str, Any], overwrite: bool) -> WorkFolder:
    _check_own(folder)
    left, state = _read(folder)
    work = WorkFolder(folder, arguments, state)
    if left == arguments:
        # Parts that an interrupted preparation wrote but did not record.
        kept = {path for part in state.waiting for path in part.paths(work.parts)}
        for path in {*work.parts.iterdir()} - kept:
            path.unlink()
        return work
    if not state.is_new and not overwrite:
        problem = "holds an interrupted preparation" + _difference(left, arguments)
        raise DataError(folder, problem, f"give the same arguments to continue it, or {_START_ANEW}")
    work.start_anew()
    return work


def _check_own(folder: Path) -> None:
    # Not a folder of another kind, nor links, through which files elsewhere would be written or deleted.
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    known = {"store", "parts", "state.json"}
    others = {path for path in found if path.parts[0] not in known and not path.name.startswith(".state.json.")}
    links = {path for path in found if (folder / path).is_symlink()}
    if folder.is_symlink() or links | others:
        name = folder / min(links | others, default="")
        raise DataError(name, "is not a preparation's", "move it away, or choose another --out")


def _read(folder: Path) -> tuple[dict[str, Any] | None, State]:
    try:
        record = read_json(folder / "state.json")
        if record["version"] != _VERSION:
            # Not a new state, so it is discarded only with --overwrite.
            return {"version": record["version"]}, State(phase="of another version")
        values = record["state"]
        writer = WriterState(**{**values["writer"], "full_shards": tuple(values["writer"]["full_shards"])})
        waiting = tuple(Part(**part) for part in values["waiting"])
        # Its files are deleted in the end.
        if wrong := next((part.name for part in waiting if not is_plain_name(part.name)), None):
            raise ValueError(f"part {wrong!r:.80} is no file of the folder")
        return record["arguments"], State(**{**values, "writer": writer, "waiting": waiting})
    except FileNotFoundError:
        return None, State()
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(folder / "state.json", f"cannot be read ({error})", f"delete {folder}") from error


def _difference(left: dict[str, Any] | None, arguments: dict[str, Any]) -> str:
    for name in {**(left or {}), **arguments}:
        before, now = (left or {}).get(name), arguments.get(name)
        if before != now:
            return f" with {name} {before!r}, not {now!r}"
    return ""


@contextmanager
def _locked(out: Path, path: Path) -> Iterator[None]:
    try:
        # On network file systems without locks, the user must start only one process.
        lock, _ = take_lock(path)
    except BlockingIOError as error:
        raise DataError(out, "another process is preparing it", "wait for it, or choose another --out") from error
    try:
        yield
    finally:
        # In this order: once unlocked, the path may be the lock of another process.
        path.unlink(missing_ok=True)
        os.close(lock)


def meta_sha256(store: Path) -> str:
    """Digest of a store's meta.json; "" if there is none."""
    try:
        return hashlib.sha256((store / META_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""
