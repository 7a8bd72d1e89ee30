"""Writes token stores (format: `data.store`); resumable."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.store import FORMAT, META_FILE, OFFSETS_FILE, VERSION, ShardMeta, StoreMeta, shard_name, token_dtype
from data.tokenizer import Tokenizer
from zeco_train.errors import DataError
from zeco_train.system.files import sha256_of, write_durably
from zeco_train.version import __version__

SHARD_TOKENS = 1 << 28

_BLOCK_BYTES = 1 << 22
# numpy pads the header for the longest shape, so it can be rewritten once the count is known.
_HEADER_BYTES = 128


@dataclass(frozen=True)
class WriterState:
    """Progress of a store, with the digests of full shards; `StoreWriter.resume` truncates data beyond these counts."""

    num_tokens: int = 0
    num_documents: int = 0
    full_shards: tuple[str, ...] = ()


def ids_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer-related arguments of `StoreWriter`."""
    return {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "tokenizer": tokenizer.info}


class StoreWriter:
    """Writes one store, document by document, into a folder, which is a valid store only after `finish` returns.

    Args:
        folder: created if missing; use `atomic_folder` to put it into place.
        vocab_size, eos_id, tokenizer: as in StoreMeta.
        shard_tokens: tokens of every shard but the last.
        state: to resume from; by default existing data is discarded.

    Raises:
        DataError: the folder holds less data than `state` records.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        eos_id: int,
        tokenizer: dict[str, str],
        shard_tokens: int = SHARD_TOKENS,
        state: WriterState | None = None,
    ) -> None:
        assert 0 <= eos_id < vocab_size, (eos_id, vocab_size)
        assert shard_tokens > 0, shard_tokens
        self.folder, self.shard_tokens, self.dtype = folder, shard_tokens, token_dtype(vocab_size)
        self._ids: dict[str, Any] = {"vocab_size": vocab_size, "eos_id": eos_id, "tokenizer": tokenizer}
        self._shard: BinaryIO | None = None
        folder.mkdir(exist_ok=True)
        self._resume(state or WriterState())

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, tokens: NDArray[np.integer], lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Add documents, concatenated in `tokens`, each with its end-of-sequence id.

        Args:
            tokens: [sum of lengths], any integer dtype, ids below the vocabulary size.
            lengths: tokens of each document, at least 1.
        """
        self.append_blocks([tokens.astype(self.dtype, copy=False).tobytes()], lengths)

    def append_blocks(self, blocks: Iterable[bytes], lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """As `append`, with the ids as blocks of bytes in the store's dtype."""
        counts = np.asarray(lengths, dtype=np.int64)
        assert (counts > 0).all()
        before = self._bytes_written
        for block in blocks:
            self._write(memoryview(block))
        assert self._bytes_written - before == int(counts.sum()) * self.dtype.itemsize, int(counts.sum())
        self._offsets.write((self.num_tokens + np.cumsum(counts)).tobytes())
        self.num_tokens += int(counts.sum())
        self.num_documents += len(counts)

    def checkpoint(self) -> WriterState:
        """Flush and fsync all data; returns a state for `resume`."""
        for file in (self._shard, self._offsets):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return WriterState(self.num_tokens, self.num_documents, tuple(self._full_shards))

    def resume(self, state: WriterState) -> None:
        """Restore the folder to a state saved by this process or an earlier one. Raises as the constructor."""
        self.close()
        self._resume(state)

    def tail_state(self, fraction: float) -> WriterState:
        """The state before the tail: the last documents, as many as fit into `fraction` of the tokens.

        Raises DataError if not even the last document fits.
        """
        # Flush first: the offsets are read through the file.
        self.checkpoint()
        offsets = self._mapped_offsets()
        most = int(self.num_tokens * fraction)
        first = int(np.searchsorted(offsets, self.num_tokens - most, side="left"))
        if first >= self.num_documents:
            last = self.num_tokens - int(offsets[-2])
            problem = f"its last document has {last} of {self.num_tokens} tokens, more than {fraction:g} of them"
            least = math.ceil(1000 * last / self.num_tokens) / 1000
            remedy = f"documents stay whole; use --validation-fraction {least:g} or more, or none"
            raise DataError("the validation part", f"would be empty: {problem}", remedy)
        keep = int(offsets[first])
        return WriterState(keep, first, tuple(self._full_shards[: keep // self.shard_tokens]))

    def copy_tail(self, state: WriterState, folder: Path) -> StoreWriter:
        """Copy the documents after `state` to a new writer in `folder`; they stay in this store until `resume`."""
        tail = StoreWriter(folder, shard_tokens=self.shard_tokens, **self._ids)
        tail.append_blocks(self._blocks_from(state.num_tokens), np.diff(self._mapped_offsets()[state.num_documents :]))
        return tail

    def finish(self, sources_sha256: str, preparation: dict[str, Any] | None = None) -> StoreMeta:
        """Write the header of doc_offsets.npy, fsync, and write meta.json last."""
        header = {"descr": "<i8", "fortran_order": False, "shape": (self.num_documents + 1,)}
        self._offsets.seek(0)
        np.lib.format.write_array_header_1_0(self._offsets, header)
        assert self._offsets.tell() == _HEADER_BYTES
        digests = self._full_shards + ([self._sha256.hexdigest()] if self._shard is not None else [])
        sizes = [min(self.shard_tokens, self.num_tokens - i * self.shard_tokens) for i in range(len(digests))]
        self.checkpoint()
        self.close()
        meta = StoreMeta(
            dtype=self.dtype.name,
            **self._ids,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            shards=tuple(ShardMeta(shard_name(i), *of) for i, of in enumerate(zip(sizes, digests, strict=True))),
            doc_offsets_sha256=sha256_of(self.folder / OFFSETS_FILE),
            sources_sha256=sources_sha256,
            created_by=f"zeco-train {__version__}",
            preparation=preparation or {},
        )
        record = {"format": FORMAT, "version": VERSION, **asdict(meta)}
        write_durably(self.folder / META_FILE, json.dumps(record, indent=2) + "\n")
        return meta

    def close(self) -> None:
        """Close the files. Written data stays, but is not a valid store unless `finish` was called."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._offsets.close()

    def _resume(self, state: WriterState) -> None:
        # Without meta.json the folder is not a store, until `finish` writes it.
        (self.folder / META_FILE).unlink(missing_ok=True)
        self.num_tokens, self.num_documents = state.num_tokens, state.num_documents
        self._full_shards = list(state.full_shards)
        self._sha256, self._shard_bytes = hashlib.sha256(), 0
        offsets, size = self.folder / OFFSETS_FILE, _HEADER_BYTES + 8 * (state.num_documents + 1)
        if state.num_documents > 0:
            _check_size(offsets, size)
        offsets.touch()
        self._offsets = offsets.open("r+b")
        if state.num_documents == 0:
            self._offsets.truncate(0)
            # Space for the header, which `finish` writes, and the first offset, 0.
            self._offsets.write(bytes(_HEADER_BYTES) + np.zeros(1, np.int64).tobytes())
        self._offsets.truncate(size)
        self._offsets.seek(0, os.SEEK_END)
        full, rest = divmod(state.num_tokens, self.shard_tokens)
        assert full == len(state.full_shards), state
        for index in range(full + (rest > 0)):
            num_tokens = self.shard_tokens if index < full else rest
            _check_size(self.folder / shard_name(index), num_tokens * self.dtype.itemsize)
        if rest:
            self._shard_bytes = rest * self.dtype.itemsize
            self._shard = (self.folder / shard_name(full)).open("r+b")
            self._shard.truncate(self._shard_bytes)
            # The state cannot hold an unfinished digest, so hash the partial shard again. That leaves the position at
            # its end, where the next write goes.
            for block in _blocks(self._shard):
                self._sha256.update(block)
        beyond = full + (rest > 0)
        # Shards begun after the state was saved.
        while (path := self.folder / shard_name(beyond)).exists():
            path.unlink()
            beyond += 1

    def _write(self, data: memoryview) -> None:
        while data:
            if self._shard is None:
                self._shard = (self.folder / shard_name(len(self._full_shards))).open("wb")
                self._shard_bytes = 0
            part = data[: self.shard_tokens * self.dtype.itemsize - self._shard_bytes]
            self._shard.write(part)
            self._sha256.update(part)
            self._shard_bytes += len(part)
            data = data[len(part) :]
            if self._shard_bytes == self.shard_tokens * self.dtype.itemsize:
                # Now, since `checkpoint` syncs the open shard only.
                self._shard.flush()
                os.fsync(self._shard.fileno())
                self._shard.close()
                self._full_shards.append(self._sha256.hexdigest())
                self._shard, self._sha256, self._shard_bytes = None, hashlib.sha256(), 0

    @property
    def _bytes_written(self) -> int:
        return len(self._full_shards) * self.shard_tokens * self.dtype.itemsize + self._shard_bytes

    def _mapped_offsets(self) -> NDArray[np.int64]:
        return np.memmap(self.folder / OFFSETS_FILE, dtype=np.int64, mode="r", offset=_HEADER_BYTES)

    def _blocks_from(self, position: int) -> Iterator[bytes]:
        self.checkpoint()
        shard, first = divmod(position, self.shard_tokens)
        for index in range(shard, len(self._full_shards) + (self._shard is not None)):
            with (self.folder / shard_name(index)).open("rb") as file:
                file.seek(first * self.dtype.itemsize)
                yield from _blocks(file)
            first = 0


def _check_size(path: Path, num_bytes: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size < num_bytes:
        problem = f"has {size} bytes, {num_bytes} were written"
        raise DataError(path, problem, "prepare the store from the start, with --overwrite")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK_BYTES), b"")
