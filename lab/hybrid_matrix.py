"""Question: are hybrids exact over ranks: three models × five scans × three methods, with and without documents?
Command: python -m lab.hybrid_matrix [--ranks 2 4]
Date: 2026-11-23, 367f3a9, 2 CPU cores
Answer: yes, all 90 cells within 1e-9 in fp64, on 2 and 4 ranks, in 2 min 14 s. `tests/sp/test_hybrids.py` runs a part.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pickle
import tempfile
from pathlib import Path

import torch.distributed as dist

from lab.exactness_matrix import PLAIN, TOLERANCE, tiny
from models.attn import AttnConfig
from models.config import LanguageModelConfig
from tests.support.distributed import run_distributed
from tests.support.sp_reference import TIMEOUT, build_scans
from tests.support.steps import GLOBAL_BATCH, Case, Result, check, make_mesh, run_steps, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.method_registry import METHODS, build_attention

# Of two shards of 120 tokens and four of 60, a window within a shard, and one wider than any; and no window.
ATTN = AttnConfig(every=2, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True, gate=True)
HYBRIDS: dict[str, LanguageModelConfig] = {
    "gla, window": dataclasses.replace(tiny("gla"), attn=dataclasses.replace(ATTN, window=50)),
    "gla, wide window": dataclasses.replace(tiny("gla"), attn=dataclasses.replace(ATTN, window=150)),
    "mamba2": dataclasses.replace(tiny("mamba2"), attn=dataclasses.replace(ATTN, offset=0)),
}
# (model, scan, method, documents, recompute, strategy)
Row = tuple[str, str, str, bool, Recompute, Strategy]
# Results on one rank by model and documents.
Whole = dict[tuple[str, bool], Result]


def case_of(model: str, documents: bool, recompute: Recompute = Recompute.none, **settings: Strategy) -> Case:
    # Gradients of two micro-batches are added in the cases with documents.
    batch = 1 if documents else GLOBAL_BATCH
    return Case(documents=documents, micro_batch=batch, steps=1, model=HYBRIDS[model], recompute=recompute, **settings)


def reference(rank: int, world_size: int, store: str) -> Whole:
    """What one rank has."""
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,), "dp")["dp"]
    cells = itertools.product(HYBRIDS, (False, True))
    return {cell: run_steps(case_of(*cell), scan, mesh, store) for cell in cells}


def sharded(rank: int, world_size: int, store: str, expected: bytes, rows: list[Row]) -> None:
    """Train the rows on this rank, and compare."""
    whole: Whole = pickle.loads(expected)
    mesh, scans = make_mesh(rank, world_size, world_size), build_scans(tuple(range(world_size)))
    methods = {
        name: build_attention(spec, dist.new_group(range(world_size)), TIMEOUT) for name, spec in METHODS.items()
    }
    for model, scan, method, documents, recompute, strategy in rows:
        exchange = scans[scan].replaced(attention=methods[method])
        result = run_steps(case_of(model, documents, recompute, strategy=strategy), exchange, mesh, store)
        where = f"{model}, {scan}, {method}, {recompute.value}, {strategy.value}, {world_size} ranks"
        check(result, whole[model, documents], TOLERANCE, f"{where}{', documents' * documents}")
        if rank == 0:
            print(f"{where}{', documents' * documents}: the same", flush=True)
    for used in scans.values():
        used.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


def compare(world_size: int, store: str, expected: Whole, rows: list[Row]) -> None:
    """Train for one step on several ranks: gradients, and the losses before and after an update.

    Args:
        world_size: ranks.
        store: of documents, by `write_documents`.
        expected: by `reference`.
        rows: what to train.

    Raises:
        AssertionError: a result differs by more than `TOLERANCE`.
    """
    run_distributed(sharded, world_size, store, pickle.dumps(expected), rows, timeout=1800)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    with tempfile.TemporaryDirectory() as folder:
        store = str(write_documents(Path(folder) / "store"))
        expected = run_distributed(reference, 1, store)[0]
        cells = itertools.product(HYBRIDS, PLAIN, METHODS, (False, True))
        rows = [(*cell, kind, Strategy.zero2) for cell, kind in zip(cells, itertools.cycle(Recompute))]
        for world_size in parser.parse_args().ranks:
            compare(world_size, store, expected, rows)


if __name__ == "__main__":
    main()
