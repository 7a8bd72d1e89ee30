"""Question: how long does a rank take to read its slice of a long sequence, and does it read more than that?
Command: torchrun --nproc-per-node 4 -m lab.loader
Date: 2026-11-21, 2 CPU cores
Answer: of 8,388,608 tokens 15 to 112 ms cold, 10 ms warm; 1.0000005 bytes requested for a byte of its own tokens. A
    wrong slice, or more than 1.01, fails.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from data.loader import Batch, DataSplit, SequenceLoader, Source
from data.store import TokenStore
from data.store.documents import Documents
from data.store.writer import StoreWriter
from lab.bench_case import LabCase
from zeco_train.bench.case import Report
from zeco_train.bench.config import CaseConfig
from zeco_train.bench.session import Row, Session
from zeco_train.system.numbers import check_least
from zeco_train.system.signals import run_command

LARGEST_RATIO = 1.01
COLUMNS = {
    "rank": ("rank", ">4"),
    "tokens": ("tokens", ">10:,"),
    "cold_ms": ("cold ms", ">9:.1f"),
    "warm_ms": ("warm ms", ">9:.1f"),
    "bytes_requested": ("bytes requested", ">17:,"),
    "ratio": ("/ own tokens", ">14:.7f"),
    "disk_bytes": ("from disk", ">11:,"),
}
_VOCAB_SIZE = 32_000
_EOS_ID = 1
_WARM_READS = 5


@dataclass
class LoaderConfig(CaseConfig):
    """Settings of case `loader`.

    Attributes:
        tokens: length of the sequence, over all ranks.
    """

    tokens: int = 8_388_608

    def validate(self) -> None:
        """See `CaseConfig.validate`."""
        super().validate()
        check_least(self, tokens=1)


def run(config: LoaderConfig, session: Session, report: Report) -> None:
    """Measure on each rank into the report."""
    tokens = np.random.default_rng(config.seed).integers(2, _VOCAB_SIZE, config.tokens + 1, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(session.gather(folder)[0], "store")
        if session.mesh.is_main:
            make_store(store, tokens)
        for rank in range(session.world_size):
            dist.barrier()
            if rank == session.rank:
                row, batch = measure(store, config.tokens, rank, session.world_size)
        # Rank 0 deletes the store when it leaves this block.
        dist.barrier()
    length = config.tokens // session.world_size
    own = torch.from_numpy(tokens[session.rank * length : (session.rank + 1) * length + 1].astype(np.int64))
    is_own = torch.equal(batch.input_ids[0], own[:-1]) and torch.equal(batch.labels[0], own[1:])
    report.note(f"one sequence of {config.tokens:,} tokens, {session.world_size} ranks, uint16")
    rows = session.gather(row)
    for rank, (row, read_its_own) in enumerate(zip(rows, session.gather(is_own), strict=True)):
        if not read_its_own:
            report.fail(f"rank {rank} read other tokens than its own")
        if row["ratio"] > LARGEST_RATIO:
            report.fail(f"rank {rank} requested {row['ratio']:.4f} × its tokens, more than {LARGEST_RATIO}")
    report.add(rows)


def make_store(folder: Path, tokens: NDArray[np.uint16]) -> None:
    """Write `tokens` as documents of 8,192 tokens."""
    ends = np.arange(8192, len(tokens), 8192, dtype=np.int64)
    lengths = np.diff(np.concatenate(([0], ends, [len(tokens)])))
    with StoreWriter(folder, vocab_size=_VOCAB_SIZE, eos_id=_EOS_ID, tokenizer={"kind": "random"}) as writer:
        writer.append(tokens, lengths)
        writer.finish(sources_sha256="")


def measure(path: Path, seq_len: int, rank: int, sp_size: int) -> tuple[Row, Batch]:
    """Read the slice of `rank` of the first sequence, cold and warm.

    Returns:
        The results and the batch. `cold_ms` is the first read after dropping the file's pages from the page cache (on a
        best-effort basis), `warm_ms` the median of further reads, conversion to tensors included. `disk_bytes` is the
        number of bytes that the cold read fetched from the disk, read-ahead included; None if the system does not
        report it.
    """
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
    requested, count = store.bytes_requested, batch.input_ids.numel()
    row = {
        "rank": rank,
        "tokens": count,
        "cold_ms": cold_ms,
        "warm_ms": statistics.median(_timed_batch(loader)[1] for _ in range(_WARM_READS)),
        "bytes_requested": requested,
        "disk_bytes": after - before if before is not None and after is not None else None,
        "ratio": requested / (count * store.itemsize),
    }
    return row, batch


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


CASE = LabCase("loader", LoaderConfig, COLUMNS, run, keeps_log=False)
main = CASE.main

if __name__ == "__main__":
    run_command("lab.loader")
