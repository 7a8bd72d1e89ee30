"""What shuffled documents cost on a store of many: opening it, making an epoch's index, reading sequences of it.

    python -m zeco_train.bench.documents [--documents N] [--mean-tokens M] [--seq-len T]

The tokens are holes in a file, so they take no disk and their reads measure this program, not a disk. Exits with 1 if a
batch requests more than its own tokens.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.bench.documents")

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.config import Shuffle
from data.documents import Documents
from data.loader import DataSplit, SequenceLoader, Source
from data.store import FORMAT, META_FILE, OFFSETS_FILE, VERSION, ShardMeta, StoreMeta, TokenStore, shard_name

_READS = 50
_SHARD_TOKENS = 1 << 38


def make_store(folder: Path, documents: int, mean_tokens: int) -> None:
    """A store of documents of random lengths, whose tokens are holes."""
    lengths = np.random.default_rng(0).exponential(mean_tokens, documents).astype(np.int64) + 1
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    folder.mkdir()
    np.save(folder / OFFSETS_FILE, offsets)
    total, shards = int(offsets[-1]), []
    for index, start in enumerate(range(0, total, _SHARD_TOKENS)):
        count = min(_SHARD_TOKENS, total - start)
        (folder / shard_name(index)).touch()
        os.truncate(folder / shard_name(index), 2 * count)
        shards.append(ShardMeta(shard_name(index), count, sha256="holes"))
    meta = StoreMeta("uint16", 32_000, {"kind": "random"}, 1, total, documents, tuple(shards), "holes", "", "bench")
    record = {"format": FORMAT, "version": VERSION, **asdict(meta)}
    (folder / META_FILE).write_text(json.dumps(record), encoding="utf-8")


def measure(path: Path, cache_dir: Path, seq_len: int, shuffle: Shuffle, shortest: int) -> tuple[dict[str, float], int]:
    """Figures by name, `cpu` being processor time; and how many bytes more than their own the batches requested."""
    record: dict[str, float] = {}

    def timed(name: str, start: float) -> None:
        record[name] = time.perf_counter() - start

    start = time.perf_counter()
    store = TokenStore.open(path)
    timed("open_s", start)
    for attempt in ("first", "again"):
        start, cpu = time.perf_counter(), time.process_time()
        documents = Documents(store, shortest, cache_dir, smallest_cached=0)
        loader = SequenceLoader([Source(documents)], DataSplit(seq_len), seed=0, global_batch=1, shuffle=shuffle)
        loader.batch(0, 0)
        timed(f"first_batch_{attempt}_s", start)
        record[f"first_batch_{attempt}_cpu_s"] = time.process_time() - cpu
    before, times, cpu = store.bytes_requested, [], time.process_time()
    for position in range(1, 1 + _READS):
        start = time.perf_counter()
        loader.batch(position, 0)
        times.append(time.perf_counter() - start)
    record["batch_ms"] = 1e3 * statistics.median(times)
    record["batch_cpu_ms"] = 1e3 * (time.process_time() - cpu) / _READS
    record["index_mb"] = sum(file.stat().st_size for file in (cache_dir / "indices").glob("*.npy")) / 1e6
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    record["anonymous_mb"] = int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1e3
    return record, store.bytes_requested - before - _READS * (seq_len + 1) * store.itemsize


def main(arguments: Sequence[str]) -> int:
    """Print one line a setting and a JSON record. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of the store")
    parser.add_argument("--mean-tokens", type=int, default=1000, help="mean length of a document")
    parser.add_argument("--seq-len", type=int, default=65_536, help="tokens of a sequence")
    options = parser.parse_args(arguments)
    rows, beyond = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        make_store(store, options.documents, options.mean_tokens)
        print(
            f"{options.documents:,} documents, {TokenStore.open(store).num_tokens:,} tokens, {options.seq_len:,} each"
        )
        for shuffle, shortest in [(Shuffle.sequences, 0), (Shuffle.documents, 0), (Shuffle.documents, 4000)]:
            name = f"shuffle={shuffle.value}, min_document_tokens={shortest}"
            rows[name], more = measure(store, Path(folder, name), options.seq_len, shuffle, shortest)
            beyond += more
            print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in rows[name].items()), flush=True)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.platform()}
    print(json.dumps({"benchmark": "documents", **vars(options), "rows": rows, **versions}))
    if beyond:
        print(f"FAILED: {beyond} bytes more were requested than the ranks' own", file=sys.stderr)
    return 1 if beyond else 0
