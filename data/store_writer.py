"""Writes token stores (the format is `data.store`'s), in one go or over several interrupted runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.store import FORMAT, META_FILE, OFFSETS_FILE, VERSION, ShardMeta, StoreMeta, shard_name, token_dtype
from data.tokenizer import Tokenizer
from zeco_train import __version__
from zeco_train.errors import DataError
from zeco_train.system.files import sha256_of, write_durably

SHARD_TOKENS = 1 << 28

_BLOCK_BYTES = 1 << 22
# numpy leaves room in the header for the longest shape, so it can be written again when the count is known.
_HEADER_BYTES = 128


@dataclass(frozen=True)
class WriterState:
    """How far a store has been written: what lies beyond these counts is dropped by `StoreWriter.resume`.

    Attributes:
        num_tokens, num_documents: written so far.
        full_shards: digests of the shards that are full.
    """

    num_tokens: int = 0
    num_documents: int = 0
    full_shards: tuple[str, ...] = ()


def ids_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `StoreWriter` has to know of the tokenizer whose ids it writes."""
    return {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "tokenizer": tokenizer.info}


class StoreWriter:
    """Writes one store, document by document, into a folder, which is a store only once `finish` has returned.

    Memory does not grow with the corpus. The folder is made if it is missing; use `data.atomic` for its final place.

    Args:
        vocab_size, eos_id, tokenizer: as in StoreMeta.
        shard_tokens: tokens of every shard but the last.
        state: go on from there with what an earlier writer has left in the folder; by default nothing of it is kept.

    Raises:
        DataError: less is left than `state` says.
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
        """Add the documents whose ids follow one another in `tokens`, each with its end-of-sequence id.

        Args:
            tokens: [sum of lengths], any integer dtype, ids below the vocabulary size.
            lengths: tokens of each document, at least 1.
        """
        self.append_blocks([tokens.astype(self.dtype, copy=False).tobytes()], lengths)

    def append_document(self, ids: NDArray[np.integer]) -> None:
        """Add one document; `ids` [tokens] without the end of sequence, which is added."""
        self.append(np.append(ids.astype(self.dtype, copy=False), self.dtype.type(self._ids["eos_id"])), [len(ids) + 1])

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
        """Wait until all that was added is on disk; from the state that is returned a later run can `resume`."""
        for file in (self._shard, self._offsets):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return WriterState(self.num_tokens, self.num_documents, tuple(self._full_shards))

    def resume(self, state: WriterState) -> None:
        """Go back (or on) to a state of this folder's writing, this process's or an earlier one's.

        Raises:
            DataError: less is left than `state` says.
        """
        self.close()
        self._resume(state)

    def tail_state(self, fraction: float) -> WriterState:
        """The state without the last documents, as many as fit into `fraction` of the tokens.

        Raises:
            DataError: not even the last document fits.
        """
        self.checkpoint()
        offsets = self._mapped_offsets()
        most = int(self.num_tokens * fraction)
        first = int(np.searchsorted(offsets, self.num_tokens - most, side="left"))
        if first >= self.num_documents:
            last = self.num_tokens - int(offsets[-2])
            problem = f"its last document has {last} of {self.num_tokens} tokens, more than {fraction:g} of them"
            raise DataError("the validation part", f"would be empty: {problem}", "use a larger --validation-fraction")
        keep = int(offsets[first])
        return WriterState(keep, first, tuple(self._full_shards[: keep // self.shard_tokens]))

    def copy_tail(self, state: WriterState, folder: Path) -> StoreWriter:
        """A new writer in `folder` with the documents that come after `state`; they stay here until `resume`."""
        tail = StoreWriter(folder, shard_tokens=self.shard_tokens, **self._ids)
        tail.append_blocks(self._blocks_from(state.num_tokens), np.diff(self._mapped_offsets()[state.num_documents :]))
        return tail

    def finish(self, sources_sha256: str, preparation: dict[str, Any] | None = None) -> StoreMeta:
        """Write the header of doc_offsets.npy, wait for the disk, and write meta.json last."""
        header = {"descr": "<i8", "fortran_order": False, "shape": (self.num_documents + 1,)}
        self._offsets.seek(0)
        np.lib.format.write_array_header_1_0(self._offsets, header)
        assert self._offsets.tell() == _HEADER_BYTES
        digests = self._full_shards + ([self._sha256.hexdigest()] if self._shard is not None else [])
        self.checkpoint()
        self.close()
        meta = StoreMeta(
            dtype=self.dtype.name,
            **self._ids,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            shards=tuple(
                ShardMeta(
                    shard_name(index), min(self.shard_tokens, self.num_tokens - index * self.shard_tokens), sha256
                )
                for index, sha256 in enumerate(digests)
            ),
            doc_offsets_sha256=sha256_of(self.folder / OFFSETS_FILE),
            sources_sha256=sources_sha256,
            created_by=f"zeco-train {__version__}",
            preparation=preparation or {},
        )
        record = {"format": FORMAT, "version": VERSION, **asdict(meta)}
        write_durably(self.folder / META_FILE, json.dumps(record, indent=2) + "\n")
        return meta

    def close(self) -> None:
        """Close the files; what was written stays, and is no store unless `finish` did this."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._offsets.close()

    def _resume(self, state: WriterState) -> None:
        (self.folder / META_FILE).unlink(missing_ok=True)
        self.num_tokens, self.num_documents = state.num_tokens, state.num_documents
        self._full_shards = list(state.full_shards)
        self._sha256, self._shard_bytes = hashlib.sha256(), 0
        offsets = self.folder / OFFSETS_FILE
        offsets.touch()
        self._offsets = offsets.open("r+b")
        if state.num_documents == 0:
            self._offsets.truncate(0)
            self._offsets.write(bytes(_HEADER_BYTES) + np.zeros(1, np.int64).tobytes())
        self._offsets.truncate(_HEADER_BYTES + 8 * (state.num_documents + 1))
        self._offsets.seek(0, os.SEEK_END)
        full, rest = divmod(state.num_tokens, self.shard_tokens)
        assert full == len(state.full_shards), state
        for index in range(full + (rest > 0)):
            self._check_size(index, self.shard_tokens if index < full else rest)
        if rest:
            self._shard_bytes = rest * self.dtype.itemsize
            self._shard = (self.folder / shard_name(full)).open("r+b")
            self._shard.truncate(self._shard_bytes)
            for block in _blocks(self._shard):
                self._sha256.update(block)
        beyond = full + (rest > 0)
        while (path := self.folder / shard_name(beyond)).exists():
            path.unlink()
            beyond += 1

    def _write(self, data: memoryview) -> None:
        """Add bytes to the shards, each up to its full size."""
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
                self._shard.flush()
                os.fsync(self._shard.fileno())
                self._shard.close()
                self._full_shards.append(self._sha256.hexdigest())
                self._shard, self._sha256, self._shard_bytes = None, hashlib.sha256(), 0

    @property
    def _bytes_written(self) -> int:
        return len(self._full_shards) * self.shard_tokens * self.dtype.itemsize + self._shard_bytes

    def _check_size(self, index: int, num_tokens: int) -> None:
        path = self.folder / shard_name(index)
        size = path.stat().st_size if path.exists() else 0
        if size < num_tokens * self.dtype.itemsize:
            problem = f"has {size} bytes, {num_tokens * self.dtype.itemsize} were written"
            raise DataError(path, problem, "prepare the store from the start, with --overwrite")

    def _mapped_offsets(self) -> NDArray[np.int64]:
        return np.memmap(self.folder / OFFSETS_FILE, dtype=np.int64, mode="r", offset=_HEADER_BYTES)

    def _blocks_from(self, position: int) -> Iterator[bytes]:
        """The bytes of all tokens from `position` on."""
        self.checkpoint()
        shard, first = divmod(position, self.shard_tokens)
        for index in range(shard, len(self._full_shards) + (self._shard is not None)):
            with (self.folder / shard_name(index)).open("rb") as file:
                file.seek(first * self.dtype.itemsize)
                yield from _blocks(file)
            first = 0


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK_BYTES), b"")
