"""How long a sequence-parallel rank takes to read its slice of an 8M-token sequence, and how much of the file it reads.

    python -m zeco_train.bench.loader [--tokens N] [--sp P]

Each rank reads in a process of its own. Exits with 1 if a slice is wrong or a rank requests more than 1.01 × its own.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.bench.loader")

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.documents import Documents
from data.loader import Batch, DataSplit, SequenceLoader, Source
from data.store import TokenStore
from data.store_writer import StoreWriter

LARGEST_RATIO = 1.01
_VOCAB_SIZE = 32_000
_EOS_ID = 1
_WARM_READS = 5


@dataclass(frozen=True)
class Measurement:
    """One rank's figures. Times are of a whole `SequenceLoader.batch`, tensors included.

    Attributes:
        rank: sequence-parallel rank.
        tokens: tokens of its shard.
        cold_ms: first read after the file's pages were dropped from the page cache (as far as the system obliges).
        warm_ms: median of further reads.
        bytes_requested: of the cold read.
        disk_bytes: what the cold read fetched from the disk, read-ahead included; None where the system cannot tell.
        ratio: bytes requested over the bytes of the rank's own tokens.
        digest: of inputs and labels.
    """

    rank: int
    tokens: int
    cold_ms: float
    warm_ms: float
    bytes_requested: int
    disk_bytes: int | None
    ratio: float
    digest: str


def make_store(folder: Path, tokens: NDArray[np.uint16]) -> None:
    """Write `tokens` as documents of 8,192 tokens."""
    ends = np.arange(8192, len(tokens), 8192, dtype=np.int64)
    lengths = np.diff(np.concatenate(([0], ends, [len(tokens)])))
    with StoreWriter(folder, vocab_size=_VOCAB_SIZE, eos_id=_EOS_ID, tokenizer={"kind": "random"}) as writer:
        writer.append(tokens, lengths)
        writer.finish(sources_sha256="")


def measure(path: Path, seq_len: int, rank: int, sp_size: int) -> Measurement:
    """Read the slice of `rank` of the first sequence, cold and warm."""
    store = TokenStore.open(path)
    split = DataSplit(seq_len, sp_rank=rank, sp_size=sp_size)
    loader = SequenceLoader([Source(Documents(store))], split, seed=0, global_batch=1)
    for shard in store.meta.shards:
        descriptor = os.open(path / shard.name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = _disk_bytes()
    batch, cold_ms = _timed_batch(loader)
    after = _disk_bytes()
    requested = store.bytes_requested
    warm_ms = statistics.median(_timed_batch(loader)[1] for _ in range(_WARM_READS))
    own_bytes = batch.input_ids.numel() * store.itemsize
    return Measurement(
        rank=rank,
        tokens=batch.input_ids.numel(),
        cold_ms=cold_ms,
        warm_ms=warm_ms,
        bytes_requested=requested,
        disk_bytes=after - before if before is not None and after is not None else None,
        ratio=requested / own_bytes,
        digest=_digest(batch.input_ids.numpy(), batch.labels.numpy()),
    )


def main(arguments: Sequence[str]) -> int:
    """Run all ranks, print one line each and a JSON record. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_388_608, help="tokens of the sequence")
    parser.add_argument("--sp", type=int, default=4, help="ranks that share it")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        print(json.dumps(asdict(measure(options.store, options.tokens, options.rank, options.sp))))
        return 0
    tokens = np.random.default_rng(0).integers(2, _VOCAB_SIZE, options.tokens + 1, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        make_store(store, tokens)
        results = [_measure_in_process(store, options.tokens, rank, options.sp) for rank in range(options.sp)]
    length = options.tokens // options.sp
    failures = []
    print(f"one sequence of {options.tokens:,} tokens, {options.sp} ranks, uint16")
    print("rank     tokens   cold ms   warm ms   bytes requested   / own tokens   from disk")
    for result in results:
        disk = "?" if result.disk_bytes is None else f"{result.disk_bytes:,}"
        times = f"{result.cold_ms:9.1f} {result.warm_ms:9.1f}"
        print(
            f"{result.rank:4} {result.tokens:10,} {times} {result.bytes_requested:17,} {result.ratio:14.7f} {disk:>11}"
        )
        own = tokens[result.rank * length : (result.rank + 1) * length + 1].astype(np.int64)
        if result.digest != _digest(own[:-1], own[1:]):
            failures.append(f"rank {result.rank} read other tokens than its own")
        if result.ratio > LARGEST_RATIO:
            failures.append(f"rank {result.rank} requested {result.ratio:.4f} × its tokens, more than {LARGEST_RATIO}")
    versions = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.platform()}
    print(json.dumps({"benchmark": "loader", "ranks": [asdict(result) for result in results], **versions}))
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _measure_in_process(store: Path, seq_len: int, rank: int, sp_size: int) -> Measurement:
    command = [sys.executable, "-m", "zeco_train.bench.loader", "--store", str(store)]
    command += ["--tokens", str(seq_len), "--rank", str(rank), "--sp", str(sp_size)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Measurement(**json.loads(output))


def _timed_batch(loader: SequenceLoader) -> tuple[Batch, float]:
    start = time.perf_counter()
    batch = loader.batch(0, 0)
    return batch, 1e3 * (time.perf_counter() - start)


def _disk_bytes() -> int | None:
    """Bytes that this process has fetched from storage so far (Linux)."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _digest(*arrays: NDArray[np.int64]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
