"""Question: is each mixer exact over ranks with each scan, with and without packed documents, to 1e-9 in fp64?
Command: python -m lab.exactness_matrix [MIXER …] [--ranks 4]
Date: –
Answer: no result is kept; it ends with an error at the first difference beyond 1e-9. `tests/sp/test_hybrids.py` uses a
    part.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from models.config import LanguageModelConfig
from models.mixer_registry import MIXERS
from tests.support.distributed import run_distributed
from tests.support.sp_reference import build_scans
from tests.support.steps import GLOBAL_BATCH, TINY, Case, Result, check, make_mesh, run_steps, worst, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.ops.recompute import Recompute

# The contract is 1e-9, for losses and norms of three steps; here it also holds for gradients and parameters.
TOLERANCE = 1e-9
STEPS = 3
# What a mixer needs besides the widths of `TINY`, which are its own configuration's where it has these fields.
OWN: dict[str, dict[str, Any]] = {
    # Two heads share keys and queries.
    "mamba2": {"num_heads": 6, "head_dim": 8, "n_groups": 3, "state_size": 5, "intermediate_size": 0},
    "gsa": {"expand_v": 1.0, "num_slots": 7},
}
# Whole cells of the matrix, each with and without documents.
PLAIN = ("lasp1", "lasp2", "chain/3", "two_shot", "doubling")
# (scan, documents, segments, recompute, strategy): each value meets several of the others.
COVERING = (
    ("chain/3", False, 2, Recompute.full, Strategy.zero3),
    ("two_shot", True, 1, Recompute.full, Strategy.ddp),
    ("lasp1", True, 4, Recompute.none, Strategy.hsdp),
    ("lasp2", True, 2, Recompute.selective, Strategy.zero2),
    ("doubling", False, 4, Recompute.full, Strategy.zero2),
)


def tiny(name: str) -> LanguageModelConfig:
    """A small model of a mixer; its widths differ where its configuration allows it."""
    known = MIXERS[name].config_class
    fields = {field.name for field in dataclasses.fields(known)}
    widths = {field.name for field in dataclasses.fields(LanguageModelConfig)} | {"expand_k", "expand_v"}
    shared = {key: getattr(TINY, key) for key in fields & widths - {"mixer", "name"}}
    return known(**{**shared, **OWN.get(name, {})})


def _case(name: str, documents: bool, segments: int = 1, **settings: Any) -> Case:
    # Gradients of two micro-batches are added in the cases with documents.
    batch = 1 if documents else GLOBAL_BATCH
    return Case(documents=documents, segments=segments, micro_batch=batch, steps=STEPS, model=tiny(name), **settings)


def reference(rank: int, world_size: int, store: str, names: list[str]) -> dict[tuple[str, bool], Result]:
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,), "dp")["dp"]
    return {
        (name, documents): run_steps(_case(name, documents), scan, mesh, store)
        for name, documents in itertools.product(names, (False, True))
    }


def _matrix(
    rank: int, world_size: int, store: str, names: list[str], expected: bytes, cases: int | None
) -> list[tuple[str, str, dict[str, float]]]:
    """The worst error of each quantity, by mixer and case."""
    whole: dict[tuple[str, bool], Result] = pickle.loads(expected)
    mesh, scans = make_mesh(rank, world_size, world_size), build_scans(tuple(range(world_size)))
    rows = []
    for name in names:
        chosen = [
            (scan, _case(name, documents, segments, recompute=recompute, strategy=strategy))
            for scan, documents, segments, recompute, strategy in COVERING[:cases]
        ]
        if cases is None:
            chosen += [(scan, _case(name, documents)) for scan, documents in itertools.product(PLAIN, (False, True))]
        for scan, case in chosen:
            result = run_steps(case, scans[scan], mesh, store)
            words = [scan, "documents" if case.documents else "plain", case.strategy.value, case.recompute.value]
            where = ", ".join([*words, f"{case.segments} segments"])
            check(result, whole[name, case.documents], TOLERANCE, f"{name}: {where}, {world_size} ranks")
            rows.append((name, where, worst(result, whole[name, case.documents])))
    for used in scans.values():
        used.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything
    return rows


def compare(names: Sequence[str], world_size: int, store: str, cases: int | None) -> None:
    """Train on one rank and on several; prints a line for each case.

    Args:
        names: mixers.
        world_size: ranks.
        store: of documents, by `write_documents`.
        cases: the first ones of `COVERING` only; None: the whole matrix.

    Raises:
        AssertionError: a result differs by more than `TOLERANCE`.
    """
    expected = run_distributed(reference, 1, store, list(names), timeout=600)[0]
    arguments = store, list(names), pickle.dumps(expected), cases
    for name, where, errors in run_distributed(_matrix, world_size, *arguments, timeout=1200)[0]:
        figures = "  ".join(f"{kind} {error:.0e}" for kind, error in errors.items())
        print(f"{name:10} {where:55} {figures}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", default=[], choices=[*MIXERS, []], metavar="MIXER")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(write_documents(Path(folder) / "store"))
        for name in options.mixers or MIXERS:
            compare([name], options.ranks, store, None)


if __name__ == "__main__":
    main()
