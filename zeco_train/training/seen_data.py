"""Detects changes of a run's data since its last start, by size and time of each token file.

A run's identity has the digests in meta.json, which do not reveal a token file that changes later, and reading a
terabyte at each start would take long. So `data_seen.json` records size and modification time of each token file, and a
later start is refused if one differs, until `data.verify=true` has once read all files and recorded them anew. It alone
finds a change that keeps size and time (`touch -r`, disk corruption).

The record has the files of rank 0; of nodes' own copies, with other times, it has a digest of all sizes and times. Not
inode and device numbers, which change with each mount of a network file system. The embedded corpus is small, may be
made anew in any cache, and is read whole at every start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.config import DataConfig, DataKind
from data.loader.batches import TRAINING, OpenedData
from data.store import COPY_AGAIN, META_FILE, TokenStore, hash_in_parts
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.errors import ConfigError, DataError
from zeco_train.lifecycle.join import check_same, gather, name_ranks
from zeco_train.system.files import write_durably
from zeco_train.system.numbers import clock, compact
from zeco_train.system.small_files import read_json

RECORD_FILE = "data_seen.json"
_REMEDY = (
    "bring it back, or give data.verify=true once, which reads all token files, and records them anew if they are as "
    "prepared; python -m data.inspect STORE checks a store by itself"
)
# Ranks synchronise this often while reading, so that none waits longer in a collective for those that read more.
_ROUND_SECONDS = 2.0
_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class SeenStore:
    """A store at a start of the run.

    Attributes:
        path: resolved.
        tokens, documents: digests in meta.json.
        files: size in bytes and modification time in ns of each token file, as rank 0 sees them.
        copies: a digest of `files` for each copy that some rank sees, rank 0's included.
    """

    path: str
    tokens: str
    documents: str
    files: dict[str, list[int]]
    copies: list[str]

    @classmethod
    def of(cls, store: TokenStore, copies: Sequence[str]) -> SeenStore:
        meta = store.meta
        return cls(str(store.path.resolve()), meta.tokens_sha256, meta.doc_offsets_sha256, _files(store), [*copies])


@dataclass
class SeenData:
    """The record of a start: stores by names as in `OpenedData.stores`, with those of earlier starts; and log lines."""

    stores: dict[str, SeenStore] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def write(self, run_dir: Path) -> None:
        """Write and flush the record to disk. Raises `ConfigError` if the folder cannot be written."""
        record = {"version": 2, "stores": {name: asdict(store) for name, store in self.stores.items()}}
        try:
            write_durably(run_dir / RECORD_FILE, json.dumps(record))
        except OSError as error:
            problem = f"{RECORD_FILE} cannot be written ({error.strerror}); name another folder"
            raise ConfigError("run_dir", run_dir, problem) from error


def check_alike(data: OpenedData, world_size: int) -> None:
    """Check by meta.json that all ranks have the same stores, since nodes may have different ones. Collective."""
    values = data.identity()
    for name, store in data.stores().items():
        values |= {f"tokens of {name}": store.meta.tokens_sha256[:12]}
        values |= {f"documents of {name}": store.meta.doc_offsets_sha256[:12]}
    check_same(values, world_size, "copy the token store to all nodes again")


def check_seen(data: OpenedData, config: DataConfig, run_dir: Path, has_begun: bool, mesh: ProcessMesh) -> SeenData:
    """Compare the data with those of the run's last start, or read them whole. Collective.

    `run_dir` is locked by rank 0, where `has_begun` says whether the folder has a run from an earlier start. Returns
    the record of this start, which rank 0 writes.

    Raises:
        DataError: on every rank; names a file that differs from the last start, or from its digest in meta.json.
    """
    if not (stores := data.stores()):
        return SeenData()
    texts = {name: json.dumps(_files(store), sort_keys=True) for name, store in stores.items()}
    views = gather({name: sha256(text.encode()).hexdigest() for name, text in texts.items()}, mesh.world_size)
    reads_whole = config.verify or config.kind is DataKind.embedded
    own = {name: SeenStore.of(store, sorted({view[name] for view in views})) for name, store in stores.items()}
    seen = SeenData(own)

    def compare() -> None:
        earlier = _read(run_dir, config.verify, seen.messages) if has_begun else {}
        for name, now in own.items():
            if name in earlier:
                _compare(name, now, earlier[name], None if reads_whole else [view[name] for view in views])
        # Without validation its store is not opened, and its record stays.
        seen.stores = earlier | own

    agree(mesh, lambda: compare() if mesh.is_main else None)
    if reads_whole:
        # One rank reads each copy.
        reads = views.index(views[mesh.rank]) == mesh.rank
        # By path: one store may have several names.
        _verify(list({store.path: store for store in stores.values()}.values()) if reads else [], config, seen, mesh)
    return seen


def _files(store: TokenStore) -> dict[str, list[int]]:
    return {shard.name: [*version[1:]] for shard, version in zip(store.meta.shards, store.versions, strict=True)}


def _read(run_dir: Path, verifies: bool, messages: list[str]) -> dict[str, SeenStore]:
    # The stores in the record of the last start. It must be readable unless all is verified.
    path = run_dir / RECORD_FILE
    try:
        match read_json(path):
            case {"version": 2, "stores": dict(stores)}:
                return {name: _store_of(values) for name, values in stores.items()}
        raise ValueError("not a record of version 2")
    except FileNotFoundError:
        # The first start was killed before it wrote the record.
        messages.append(f"{path}: not there yet; the data are recorded as they are now")
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if not verifies:
            remedy = "data.verify=true, given once, reads all token files and writes a new record"
            raise DataError(path, f"cannot be read ({reason})", remedy) from error
        messages.append(f"{path}: cannot be read ({reason}); written anew")
    return {}


def _store_of(values: Any) -> SeenStore:
    match values:
        case {"path": str(), "tokens": str(), "documents": str(), "files": dict(files), "copies": list()}:
            if all(isinstance(note, list) for note in files.values()):
                return SeenStore(**values)
    raise ValueError("not a record of a run's data")


def _compare(name: str, now: SeenStore, before: SeenStore, views: Sequence[str] | None) -> None:
    # Files are compared only with `views`, the digests of each rank's.
    is_moved = before.path != now.path
    # A restart may name another validation store; another training store is another run.
    if is_moved and not name.startswith(TRAINING):
        return
    if others := [what for what in ("tokens", "documents") if getattr(before, what) != getattr(now, what)]:
        what = " and ".join(others)
        problem = f"gives other {what} than at the run's last start (a store prepared again, or replaced)"
        remedy = "bring back the earlier store, or start another run with checkpoint.load=RUN"
        raise DataError(Path(now.path, META_FILE), problem, remedy)
    if views is None:
        return
    changed = [file for file, note in now.files.items() if before.files.get(file) != note]
    if views[0] not in before.copies and changed:
        more = f", with {len(changed) - 1} more files of this store" if len(changed) > 1 else ""
        raise DataError(Path(now.path, changed[0]), f"changed since the run's last start{more}", _REMEDY)
    if ranks := [rank for rank, view in enumerate(views) if view not in before.copies]:
        raise DataError(now.path, f"its copy on {name_ranks(ranks)} changed since the run's last start", _REMEDY)


def _verify(own: Sequence[TokenStore], config: DataConfig, seen: SeenData, mesh: ProcessMesh) -> None:
    # Reads all files of `own` and compares them with their digests in meta.json. Collective, in short rounds.
    total = sum(store.num_tokens * store.itemsize for store in own)
    reading, done = _read_whole(own, config), 0
    started = reported = time.monotonic()

    def read_a_round() -> bool:
        nonlocal done
        end = time.monotonic() + _ROUND_SECONDS
        for size in reading:
            done += size
            if time.monotonic() >= end:
                return True
        return False

    while any(gather(agree(mesh, read_a_round), mesh.world_size)):
        now = time.monotonic()
        if mesh.is_main and done and now - reported >= _REPORT_SECONDS:
            reported = now
            left = clock((total - done) / done * (now - started))
            print(f"data: {compact(done, 'B')} of {compact(total, 'B')} compared, {left} left", flush=True)
    if config.verify:
        count = sum(store.num_shards for store in own)
        text = f"data: {count} token files ({compact(total, 'B')}) read in {clock(time.monotonic() - started)}"
        seen.messages.append(f"{text}; they are as prepared")


def _read_whole(stores: Sequence[TokenStore], config: DataConfig) -> Iterator[int]:
    # Yields the bytes of each part read. Raises DataError for the first file that differs.
    for store in stores:
        for index, shard in enumerate(store.meta.shards):
            digest = yield from hash_in_parts(store.shard_path(index), store.versions[index])
            if digest != shard.sha256:
                is_embedded = config.kind is DataKind.embedded
                remedy = f"remove {store.path}, which the next start prepares again" if is_embedded else COPY_AGAIN
                raise DataError(store.shard_path(index), "its contents differ from what was prepared", remedy)
