"""Detects changes of a run's data since its last start.

A run's identity contains the digests in meta.json, which do not reveal a token file that changes later, and hashing a
terabyte at each start would take hours. So `data_seen.json` in the run's folder records size and modification time of
each token file at the last start, and a start compares:

- A file without a record (at the first start, or the first one of an older run without `data_seen.json`) is recorded
  and not hashed. `data.verify=true` hashes all files at each start.
- A file with the recorded size and time counts as unchanged. A change that keeps both (`touch -r`, disk corruption) is
  detected by `data.verify=true` only.
- Any other file is hashed once and compared with meta.json. If it matches (a copy), its size and time are recorded; if
  not, the start is refused. With `data.verify_changed=false` it is neither hashed nor recorded but named in the log, so
  a later start without that setting hashes it.

doc_offsets.npy, the starts of documents, is compared with meta.json whenever a store is opened, and the digests in
meta.json with those of the last start.

Nodes may have their own copies under one path, with different times. Files are therefore recorded by their digest in
meta.json, without path and host, with the size and time of every copy. Ranks that see the same files share the hashing;
ranks of a node with its own copy hash that copy. Inode and device numbers are not recorded: they change with each mount
of a network file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from data.config import DataConfig, DataKind
from data.digests import COPY_AGAIN, hash_in_parts
from data.reader import TRAINING, OpenedData
from data.store import META_FILE, TokenStore
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.errors import ConfigError, DataError
from zeco_train.lifecycle.join import check_same, gather
from zeco_train.system.files import write_durably
from zeco_train.system.numbers import clock, compact
from zeco_train.system.small_files import read_json

RECORD_FILE = "data_seen.json"
_SKIP = "data.verify_changed=false"
# Ranks synchronise this often while hashing, so that no rank waits longer in a collective for ranks with more to read.
_ROUND_SECONDS = 2.0
_REPORT_SECONDS = 10.0
# Period of saving the record: how much of the hashing a kill can lose.
_SAVE_SECONDS = 30.0
# Recorded copies of one file (on as many nodes), and of all files together, so that the record stays a small file.
_MOST_COPIES, _MOST_NOTES = 64, 1_000_000
_NAMED_FILES = 5

# Size in bytes and modification time in ns of a copy of a file.
Note = tuple[int, int]


@dataclass
class DataRecord:
    """The contents of `data_seen.json`.

    Attributes:
        stores: `path` and, from meta.json, the digests `tokens` and `documents` of each store, by name as in
            `OpenedData.stores`.
        files: the copies of each token file, newest last, by the digest in meta.json.
    """

    stores: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, list[Note]] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> DataRecord:
        """Read a run's record.

        Raises:
            OSError: it is missing, or cannot be read.
            ValueError: it is damaged.
        """
        match read_json(run_dir / RECORD_FILE):
            case {"stores": dict(stores), "files": dict(files)}:
                if all(map(_is_store, stores.values())) and all(map(_is_notes, files.values())):
                    return cls(stores, {digest: [(size, time) for size, time in files[digest]] for digest in files})
        raise ValueError("not a record of a run's data")

    def note(self, digest: str, note: Note) -> None:
        """Add a copy of a file, or make it the newest."""
        notes = self.files.setdefault(digest, [])
        if note in notes:
            notes.remove(note)
        notes.append(note)

    def write(self, run_dir: Path) -> None:
        """Write and flush the record to disk. Raises `ConfigError` if the folder cannot be written."""
        most = max(1, min(_MOST_COPIES, _MOST_NOTES // max(1, len(self.files))))
        files = {digest: notes[-most:] for digest, notes in self.files.items()}
        try:
            write_durably(run_dir / RECORD_FILE, json.dumps({"stores": self.stores, "files": files}))
        except OSError as error:
            problem = f"{RECORD_FILE} cannot be written ({error.strerror}); name another folder"
            raise ConfigError("run_dir", run_dir, problem) from error


def _is_store(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("path", "tokens", "documents"))


def _is_notes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(note, list) and len(note) == 2 and all(type(number) is int for number in note) for note in value
    )


@dataclass(frozen=True)
class _File:
    """A token file, as this rank sees it."""

    store: TokenStore
    index: int

    @property
    def path(self) -> Path:
        return self.store.shard_path(self.index)

    @property
    def digest(self) -> str:
        return self.store.meta.shards[self.index].sha256

    @property
    def note(self) -> Note:
        _, size, modified = self.store.versions[self.index]
        return size, modified

    def is_noted(self, record: DataRecord) -> bool:
        return self.note in record.files.get(self.digest, ())

    def is_changed(self, record: DataRecord) -> bool:
        return self.digest in record.files and not self.is_noted(record)


Explain = Callable[[_File], DataError]


@dataclass
class SeenData:
    """The result of `check_seen` on this rank.

    Attributes:
        record: on rank 0, the record of this start.
        messages: log messages, each with its level.
    """

    record: DataRecord = field(default_factory=DataRecord)
    messages: list[tuple[int, str]] = field(default_factory=list)


def check_alike(data: OpenedData, world_size: int) -> None:
    """Check by meta.json that all ranks have the same stores. Collective.

    Nodes may have different ones under the same path.

    Raises:
        ConfigError: see `check_same`.
    """
    values = data.identity()
    for name, store in data.stores().items():
        values |= {f"tokens of {name}": store.meta.tokens_sha256[:12]}
        values |= {f"documents of {name}": store.meta.doc_offsets_sha256[:12]}
    check_same(values, world_size, "copy the token store to all nodes again")


def check_seen(data: OpenedData, config: DataConfig, run_dir: Path, has_begun: bool, mesh: ProcessMesh) -> SeenData:
    """Compare the data with those of the run's last start, and hash changed files. Collective.

    Args:
        data: of this start.
        config: the data settings.
        run_dir: the run's folder, locked by rank 0.
        has_begun: on rank 0, whether the folder has a run from an earlier start.
        mesh: the ranks.

    Raises:
        DataError: on every rank; names the first file that differs from its digest in meta.json, or a store whose
            meta.json has other digests than at the last start.
    """
    seen = SeenData()
    if not data.stores():
        return seen
    found: list[DataRecord | None] = [_read(run_dir, has_begun, seen) if mesh.is_main else None]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    earlier = found[0]
    # A copy: `earlier` stays as it is, for the comparisons below.
    seen.record = DataRecord(dict(earlier.stores), {digest: [*notes] for digest, notes in earlier.files.items()})
    agree(mesh, lambda: _compare_stores(data.stores(), earlier, config, seen) if mesh.is_main else None)

    # By path: one store may have several names.
    stores = {store.path: store for store in data.stores().values()}
    files = [_File(store, index) for store in stores.values() for index in range(store.num_shards)]
    sharing = _ranks_with_these(files, mesh)
    changed = [file for file in files if file.is_changed(earlier)]
    if changed and not config.verify and not config.verify_changed and mesh.rank == sharing[0]:
        seen.messages.append((logging.WARNING, f"{_SKIP}: {_list(changed)}, changed since the last start, not checked"))
    if not config.verify:
        _note_unhashed([file for file in files if not file.is_changed(earlier)], sharing, seen.record, earlier, mesh)
    wanted = files if config.verify else changed if config.verify_changed else []
    own = wanted[sharing.index(mesh.rank) :: len(sharing)]
    _hash(own, lambda file: _different(file, config, earlier), seen, run_dir if has_begun else None, mesh)
    return seen


def _read(run_dir: Path, has_begun: bool, seen: SeenData) -> DataRecord:
    """The record of the last start; an empty one if there is none."""
    path = run_dir / RECORD_FILE
    try:
        return DataRecord.read(run_dir)
    except FileNotFoundError:
        if has_begun:
            text = f"{path}: not there yet; the data are noted as they are now, and compared from the next start on"
            seen.messages.append((logging.INFO, text))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        text = f"{path}: cannot be read ({reason}); the data are noted as they are now, without a comparison"
        seen.messages.append((logging.WARNING, text))
    return DataRecord()


def _compare_stores(stores: Mapping[str, TokenStore], earlier: DataRecord, config: DataConfig, seen: SeenData) -> None:
    """Compare the digests in each meta.json with those of the last start, on rank 0."""
    for name, store in stores.items():
        now = {
            "path": str(store.path.resolve()),
            "tokens": store.meta.tokens_sha256,
            "documents": store.meta.doc_offsets_sha256,
        }
        before = earlier.stores.get(name, now)
        others = [what for what in ("tokens", "documents") if before[what] != now[what]]
        # A restart may change the validation store; another training store means another run.
        if others and (name.startswith(TRAINING) or before["path"] == now["path"]):
            kinds = " and ".join(others)
            problem = f"gives other {kinds} than at the run's last start (a store prepared again, or replaced)"
            if config.verify_changed:
                remedy = f"bring back the earlier store, or go on with this one by {_SKIP}"
                raise DataError(store.path / META_FILE, problem, remedy)
            seen.messages.append((logging.WARNING, f"{_SKIP}: {store.path / META_FILE} {problem}"))
            continue
        seen.record.stores[name] = now


def _ranks_with_these(files: Sequence[_File], mesh: ProcessMesh) -> list[int]:
    """The ranks that see the same files as this one, including itself."""
    view = [(file.digest, file.store.versions[file.index]) for file in files]
    views = gather(hashlib.sha256(repr(view).encode()).hexdigest(), mesh.world_size)
    return [rank for rank in range(mesh.world_size) if views[rank] == views[mesh.rank]]


def _note_unhashed(
    files: Sequence[_File], sharing: Sequence[int], record: DataRecord, earlier: DataRecord, mesh: ProcessMesh
) -> None:
    """Add files to rank 0's record without hashing them: new ones of all nodes, and unchanged ones."""
    if mesh.is_main:
        for file in files:
            record.note(file.digest, file.note)
    # One rank reports each further set of copies.
    own = sharing[0] == mesh.rank and not mesh.is_main
    news = [(file.digest, file.note) for file in files if own and not file.is_noted(earlier)]
    everyone: list[list[tuple[str, Note]]] | None = [[]] * mesh.world_size if mesh.is_main else None
    dist.gather_object(news, everyone, dst=0)
    for digest, note in (entry for entries in everyone or () for entry in entries):
        record.note(digest, note)


def _hash(own: Sequence[_File], explain: Explain, seen: SeenData, run_dir: Path | None, mesh: ProcessMesh) -> None:
    """Hash files, each rank its share, and add those that match to rank 0's record. Collective.

    Args:
        own: the share of this rank.
        explain: builds the error for a file that does not match.
        seen: gets the messages, and on rank 0 the record.
        run_dir: where to save the record during the hashing; None if the folder has no run yet.
        mesh: the ranks.
    """
    shares = gather((len(own), sum(file.note[0] for file in own)), mesh.world_size)
    count, total = (sum(column) for column in zip(*shares, strict=True))
    if count == 0:
        return
    done, error = 0, None
    started = reported = saved = time.monotonic()
    for read, notes, error in _rounds(own, explain, mesh):
        done += read
        for digest, note in notes if mesh.is_main else ():
            seen.record.note(digest, note)
        now = time.monotonic()
        if mesh.is_main and now - reported >= _REPORT_SECONDS:
            reported = now
            left = f"{clock((total - done) / done * (now - started))} left" if done else "nothing read yet"
            print(f"data: {compact(done, 'B')} of {compact(total, 'B')} compared, {left}", flush=True)
        if mesh.is_main and run_dir is not None and (error is not None or now - saved >= _SAVE_SECONDS):
            saved = now
            # If the folder cannot be written, the final write of the record raises.
            with contextlib.suppress(ConfigError):
                seen.record.write(run_dir)
    if error is not None:
        raise error
    if mesh.is_main:
        text = f"data: {count} token files ({compact(total, 'B')}) hashed in {clock(time.monotonic() - started)}"
        seen.messages.append((logging.INFO, f"{text}; they are as prepared"))


def _rounds(
    own: Sequence[_File], explain: Explain, mesh: ProcessMesh
) -> Iterator[tuple[int, list[tuple[str, Note]], DataError | None]]:
    """Hash files on all ranks in rounds. Collective.

    Yields:
        Per round and over all ranks: the bytes read, the matching files, and the first error, which ends the iteration.
    """
    found: list[tuple[str, Note]] = []
    reading = _compare(own, explain, found)
    while True:
        read, has_more, error = 0, False, None
        deadline = time.monotonic() + _ROUND_SECONDS
        try:
            for size in reading:
                read += size
                if has_more := time.monotonic() >= deadline:
                    break
        except DataError as caught:
            error = caught
        everyone = gather((read, found, has_more, error), mesh.world_size)
        # `everyone` has copies: a rank's own values are unpickled, too.
        found.clear()
        reads, notes, more, errors = zip(*everyone, strict=True)
        first = next((error for error in errors if error is not None), None)
        yield sum(reads), [note for some in notes for note in some], first
        if first is not None or not any(more):
            return


def _compare(files: Sequence[_File], explain: Explain, found: list[tuple[str, Note]]) -> Iterator[int]:
    """Hash files one after another, and append those that match to `found`; yields the bytes of each part.

    Raises:
        DataError: a file differs or cannot be read.
    """
    for file in files:
        digest = yield from hash_in_parts(file.path, file.store.versions[file.index])
        if digest != file.digest:
            raise explain(file)
        found.append((file.digest, file.note))


def _different(file: _File, config: DataConfig, earlier: DataRecord) -> DataError:
    """The error for a file that does not match its digest."""
    problem, remedy = "its contents differ from what was prepared", COPY_AGAIN
    if config.kind is DataKind.embedded:
        remedy = f"remove {file.store.path}, which the next start prepares again"
    if file.is_changed(earlier):
        problem = f"changed since the run's last start, and {problem}"
    if not config.verify:
        remedy += f", or go on with it as it is by {_SKIP}"
    return DataError(file.path, problem, remedy)


def _list(files: Sequence[_File]) -> str:
    names = ", ".join(str(file.path) for file in files[:_NAMED_FILES])
    return names if len(files) <= _NAMED_FILES else f"{names} and {len(files) - _NAMED_FILES} more"
