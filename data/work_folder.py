"""What an interrupted preparation leaves beside the place of its store, and how the next one takes it up.

`.NAME.preparing` beside NAME holds

    store/         the store as far as it has been written (data.store_writer), without its meta.json
    parts/         tokenised text that waits for its turn (data.pipeline)
    state.json     State: what of the two counts; replaced in one step, after what it speaks of is on disk

A process has it to itself as long as it holds the lock on `.NAME.preparing.lock`.
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

from data.atomic import make_parent, move_into_place
from data.pipeline import Part
from data.store import META_FILE
from data.store_writer import WriterState
from zeco_train.errors import DataError
from zeco_train.system.files import sync_file, sync_folder, take_lock, write_durably, write_errors
from zeco_train.system.small_files import read_json

_VERSION = 1
_SUFFIX = ".preparing"
_START_ANEW = "give --overwrite to start anew, or choose another --out"

READING, READ, SPLIT, MOVING = "reading", "read", "split", "moving"


@dataclass(frozen=True)
class State:
    """How far a preparation is.

    Attributes:
        phase: "reading" the text; all is "read"; the validation part is "split" off; the store is whole and "moving".
        writer: of the store.
        unit, first: the unit that is next, and how many of its documents are done.
        stamps: digest of the stamps of the units that were begun, in order.
        waiting: parts of later documents.
        short_documents, amount: left out, and done, so far.
        commit: of the hub's data set, if it is from there.
        meta_sha256: of the whole store's meta.json.
    """

    phase: str = READING
    writer: WriterState = field(default_factory=WriterState)
    unit: int = 0
    first: int = 0
    stamps: str = ""
    waiting: tuple[Part, ...] = ()
    short_documents: int = 0
    amount: float = 0.0
    commit: str | None = None
    meta_sha256: str = ""

    @property
    def is_new(self) -> bool:
        """Whether nothing would be lost with it."""
        return self == State()


class WorkFolder:
    """A locked work folder.

    Attributes:
        store, parts: its folders.
        state: the last one that was saved; of this process or of one that was interrupted.
    """

    def __init__(self, folder: Path, arguments: dict[str, Any], state: State) -> None:
        self.folder, self.state, self._arguments = folder, state, arguments
        self.store, self.parts = folder / "store", folder / "parts"

    def save(self, state: State) -> None:
        """Make `state` the one to go on from. All that it speaks of is on disk by now, but for the parts."""
        known = {part.name for part in self.state.waiting}
        for part in state.waiting:
            if part.name not in known:
                for path in part.paths(self.parts):
                    sync_file(path)
        sync_folder(self.parts)
        sync_folder(self.store)
        record = {"version": _VERSION, "arguments": self._arguments, "state": asdict(state)}
        write_durably(self.folder / "state.json", json.dumps(record))
        self.state = state

    def move_to(self, out: Path, replace: bool) -> None:
        """Put the store, which is whole, in its place. May be repeated after an interruption."""
        if meta_sha256(out) != self.state.meta_sha256:
            move_into_place(self.store, out, replace)
            sync_folder(out.parent)


@contextmanager
def work_folder(out: Path, arguments: dict[str, Any], overwrite: bool) -> Iterator[WorkFolder]:
    """Give the work folder of the store `out`, new or as an interrupted preparation with these arguments left it.

    It stays if the block raises and something would be lost with it; else it is deleted in the end.

    Args:
        arguments: all that the result depends on, as JSON.
        overwrite: what was done with other arguments may be dropped.

    Raises:
        DataError: another process has it, it was left with other arguments, or the system refuses to write.
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
    """Tokens that an interrupted preparation of `out` has left."""
    with contextlib.suppress(DataError, OSError):
        return _read(_folder_for(out))[1].writer.num_tokens
    return 0


def start_anew(work: WorkFolder) -> None:
    """Empty the folder."""
    shutil.rmtree(work.folder, ignore_errors=True)
    for folder in (work.folder, work.store, work.parts):
        folder.mkdir()
    work.save(State())


def drop_unknown_parts(work: WorkFolder) -> None:
    """Delete the parts that an interrupted preparation made and could not save."""
    known = {path for part in work.state.waiting for path in part.paths(work.parts)}
    for path in work.parts.iterdir():
        if path not in known:
            path.unlink()


def _folder_for(out: Path) -> Path:
    return out.with_name(f".{out.name}{_SUFFIX}")


def _open(folder: Path, arguments: dict[str, Any], overwrite: bool) -> WorkFolder:
    left, state = _read(folder)
    work = WorkFolder(folder, arguments, state)
    if left == arguments:
        drop_unknown_parts(work)
        return work
    if not state.is_new and not overwrite:
        problem = "holds an interrupted preparation" + _difference(left, arguments)
        raise DataError(folder, problem, f"give the same arguments to continue it, or {_START_ANEW}")
    start_anew(work)
    return work


def _read(folder: Path) -> tuple[dict[str, Any] | None, State]:
    """The arguments and the state that were saved; None and a new state where there are none."""
    try:
        record = read_json(folder / "state.json")
        if record["version"] != _VERSION:
            return {"version": record["version"]}, State(phase="of another version")
        values = record["state"]
        writer = WriterState(**{**values["writer"], "full_shards": tuple(values["writer"]["full_shards"])})
        waiting = tuple(Part(**part) for part in values["waiting"])
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
        # Some network file systems have no locks: then it is the user who starts one process only.
        lock, _ = take_lock(path)
    except BlockingIOError as error:
        raise DataError(out, "another process is preparing it", "wait for it, or choose another --out") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def meta_sha256(store: Path) -> str:
    """Digest of a store's meta.json; "" where there is none."""
    try:
        return hashlib.sha256((store / META_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""
