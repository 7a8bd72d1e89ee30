"""Every mixer trains alike on one rank and on several: every scan, documents, segments, recompute, strategies."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch.distributed as dist

from models.config import LanguageModelConfig
from models.registry import MIXERS
from tests.support.distributed import run_distributed
from tests.support.sp_reference import build_scans
from tests.support.steps import TINY, Case, Result, check, make_mesh, run_steps, worst, write_documents
from zeco_train.distributed.parallelize import Strategy
from zeco_train.ops.recompute import Recompute

pytestmark = pytest.mark.numeric

# The contract is 1e-9, for losses and norms of three steps; here it also holds for gradients and parameters.
TOLERANCE = 1e-9
STEPS = 3
# What a mixer needs besides the widths of `TINY`, which are its own configuration's where it has these fields.
OWN: dict[str, dict[str, Any]] = {
    # Two heads share keys and queries.
    "mamba2": {"num_heads": 6, "head_dim": 8, "n_groups": 3, "state_size": 5, "intermediate_size": 0},
}
# Mixers with states, parameters or messages that the others have not. By default only these are trained, and the
# others are compared on two ranks by tests/models/test_mixers.py; the whole matrix has all.
SPECIAL = [name for name, mixer in MIXERS.items() if mixer.needs_halo or mixer.shared is not None]
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
    return Case(documents=documents, segments=segments, steps=STEPS, model=tiny(name), **settings)


def _reference(rank: int, world_size: int, store: str, names: list[str]) -> dict[tuple[str, bool], Result]:
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,))["dp"]
    return {
        (name, documents): run_steps(_case(name, documents), scan, mesh, store)
        for name, documents in itertools.product(names, (False, True))
    }


def _matrix(
    rank: int, world_size: int, store: str, names: list[str], expected: bytes, is_whole: bool
) -> list[tuple[str, str, dict[str, float]]]:
    """The worst error of each quantity, by mixer and case."""
    whole: dict[tuple[str, bool], Result] = pickle.loads(expected)
    mesh, scans = make_mesh(rank, world_size, world_size), build_scans(tuple(range(world_size)))
    rows = []
    for name in names:
        cases = [
            (scan, _case(name, documents, segments, recompute=recompute, strategy=strategy))
            for scan, documents, segments, recompute, strategy in COVERING
        ]
        if is_whole:
            cases += [(scan, _case(name, documents)) for scan, documents in itertools.product(PLAIN, (False, True))]
        for scan, case in cases if is_whole else cases[:2]:
            result = run_steps(case, scans[scan], mesh, store)
            words = [scan, "documents" if case.documents else "plain", case.strategy.value, case.recompute.value]
            where = ", ".join([*words, f"{case.segments} segments"])
            check(result, whole[name, case.documents], TOLERANCE, f"{name}: {where}, {world_size} ranks")
            rows.append((name, where, worst(result, whole[name, case.documents])))
    for used in scans.values():
        used.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("family") / "store"))


def _compare(names: list[str], world_size: int, store: str, is_whole: bool) -> None:
    expected = run_distributed(_reference, 1, store, names, timeout=600)[0]
    rows = run_distributed(_matrix, world_size, store, names, pickle.dumps(expected), is_whole, timeout=1200)[0]
    for name, where, errors in rows:
        figures = "  ".join(f"{kind} {error:.0e}" for kind, error in errors.items())
        print(f"{name:10} {where:55} {figures}")


@pytest.mark.parametrize("name", SPECIAL)
def test_mixer_trains_alike_on_two_ranks(name: str, store: str) -> None:
    _compare([name], 2, store, is_whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_trains_alike_on_four_ranks_with_every_scan(name: str, store: str) -> None:
    _compare([name], 4, store, is_whole=True)


def test_documents_change_losses(store: str) -> None:
    found = run_distributed(_reference, 1, store, ["gla"])[0]
    assert worst(found["gla", True], found["gla", False])["losses"] > 1e-3
