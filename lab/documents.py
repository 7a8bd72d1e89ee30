"""Question: what does shuffling of many documents cost: opening the store, an epoch's index, reading?
Command: python -m lab.documents
Date: –
Answer: no result is kept. The tokens are holes in a sparse file, so reads measure this program, not a disk; a batch
    that requests more than its own tokens fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data.config import Shuffle
from data.documents import Documents
from data.loader import DataSplit, SequenceLoader, Source
from data.store import FORMAT, META_FILE, OFFSETS_FILE, VERSION, ShardMeta, StoreMeta, TokenStore, shard_name
from zeco_train.bench.case import Case
from zeco_train.bench.config import CaseConfig
from zeco_train.bench.report import Report
from zeco_train.bench.session import Session
from zeco_train.system.environment import process_memory
from zeco_train.system.ranges import check_least
from zeco_train.system.signals import run_command

COLUMNS = {
    "shuffle": ("shuffle", "<10"),
    "min_document_tokens": ("min tokens", ">10"),
    "open_s": ("open s", ">8:.3g"),
    "first_batch_first_s": ("first batch s", ">13:.3g"),
    "first_batch_first_cpu_s": ("CPU s", ">8:.3g"),
    "first_batch_again_s": ("again s", ">8:.3g"),
    "first_batch_again_cpu_s": ("CPU s", ">8:.3g"),
    "batch_ms": ("batch ms", ">9:.3g"),
    "batch_cpu_ms": ("CPU ms", ">8:.3g"),
    "index_mb": ("index MB", ">9:.3g"),
    "anonymous_mb": ("anonymous MB", ">12:.4g"),
}
_READS = 50
_SHARD_TOKENS = 1 << 38


@dataclass
class DocumentsConfig(CaseConfig):
    """Settings of case `documents`.

    Attributes:
        documents: number of documents in the store.
        mean_tokens: their mean length.
        seq_len: tokens per sequence.
    """

    documents: int = 10_000_000
    mean_tokens: int = 1000
    seq_len: int = 65_536

    def validate(self) -> None:
        """See `CaseConfig.validate`."""
        super().validate()
        check_least(self, documents=1, mean_tokens=1, seq_len=1)


def run(config: DocumentsConfig, session: Session) -> Report:
    """Measure each read mode on one rank; results are in the report's folder."""
    session.check_alone()
    report = Report("documents", config, session, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        make_store(store, config.documents, config.mean_tokens)
        total = TokenStore.open(store).num_tokens
        report.note(f"{config.documents:,} documents, {total:,} tokens, {config.seq_len:,} each")
        for shuffle, shortest in [(Shuffle.sequences, 0), (Shuffle.documents, 0), (Shuffle.documents, 4000)]:
            row, beyond = measure(store, Path(folder, f"{shuffle.value} {shortest}"), config.seq_len, shuffle, shortest)
            if beyond:
                report.fail(f"{beyond} bytes more were requested than the rank's own, shuffle={shuffle.value}")
            report.add([{"shuffle": shuffle.value, "min_document_tokens": shortest, **row}])
    return report


def make_store(folder: Path, documents: int, mean_tokens: int) -> None:
    """A store of documents of random lengths, in a sparse file."""
    lengths = np.random.default_rng(0).exponential(mean_tokens, documents).astype(np.int64) + 1
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    folder.mkdir()
    np.save(folder / OFFSETS_FILE, offsets)
    total, shards = int(offsets[-1]), []
    for index, start in enumerate(range(0, total, _SHARD_TOKENS)):
        count = min(_SHARD_TOKENS, total - start)
        (folder / shard_name(index)).touch()
        os.truncate(folder / shard_name(index), 2 * count)
        # Opening a store hashes no shard, so any text will do.
        shards.append(ShardMeta(shard_name(index), count, sha256="holes"))
    digest = hashlib.sha256((folder / OFFSETS_FILE).read_bytes()).hexdigest()
    meta = StoreMeta("uint16", 32_000, {"kind": "random"}, 1, total, documents, tuple(shards), digest, "", "bench")
    record = {"format": FORMAT, "version": VERSION, **asdict(meta)}
    (folder / META_FILE).write_text(json.dumps(record), encoding="utf-8")


def measure(path: Path, cache_dir: Path, seq_len: int, shuffle: Shuffle, shortest: int) -> tuple[dict[str, float], int]:
    """Results by name, `cpu` being CPU time; and the excess bytes that the batches requested."""
    record: dict[str, float] = {}
    start = time.perf_counter()
    store = TokenStore.open(path)
    record["open_s"] = time.perf_counter() - start
    for attempt in ("first", "again"):
        start, cpu = time.perf_counter(), time.process_time()
        # Cached whatever the size: a second opening must find the index of the first.
        documents = Documents(store, shortest, cache_dir, smallest_cached=0)
        loader = SequenceLoader([Source(documents)], DataSplit(seq_len), seed=0, global_batch=1, shuffle=shuffle)
        loader.batch(0, 0)
        record[f"first_batch_{attempt}_s"] = time.perf_counter() - start
        record[f"first_batch_{attempt}_cpu_s"] = time.process_time() - cpu
    before, times, cpu = store.bytes_requested, [], time.process_time()
    for position in range(1, 1 + _READS):
        start = time.perf_counter()
        loader.batch(position, 0)
        times.append(time.perf_counter() - start)
    record["batch_ms"] = 1e3 * statistics.median(times)
    record["batch_cpu_ms"] = 1e3 * (time.process_time() - cpu) / _READS
    record["index_mb"] = sum(file.stat().st_size for file in (cache_dir / "indices").glob("*.npy")) / 1e6
    record["anonymous_mb"] = (process_memory("RssAnon") or 0) / 1e6
    return record, store.bytes_requested - before - _READS * (seq_len + 1) * store.itemsize


CASE = Case(DocumentsConfig, run)
main = CASE.main

if __name__ == "__main__":
    run_command("lab.documents")
