"""Training in segments equals training on whole sequences: on any number of ranks, with documents and recompute."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lab.exactness_matrix import tiny
from tests.support.distributed import on_ranks, run_distributed
from tests.support.sp_reference import RecordedExchange, build_scans
from tests.support.steps import GLOBAL_BATCH, TINY, Case, Result, check, make_mesh, run_steps, worst, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig

pytestmark = pytest.mark.numeric

# The contract is 1e-9. Sums are regrouped: measured 5e-16 for losses, 6e-15 for norms and for the
# gradient of each parameter, and 2e-13 for parameters after two steps of AdamW; here is one.
TOLERANCE = 1e-11
# World size, numbers of segments by backend, and whether with documents only. Only two_shot has the longest cases, to
# save time.
SEGMENTS = [
    (2, {"lasp1": (4,)}, True),
    pytest.param(2, {"chain/3": (4,)}, False, marks=pytest.mark.slow),
    *(
        pytest.param(ranks, backends, False, marks=pytest.mark.campaign)
        for ranks, backends in (
            (1, {"dp": (1, 2, 4, 8), "two_shot": (8,)}),
            (2, {"two_shot": (1, 2, 8), "lasp1": (4,), "lasp2": (2, 4), "chain/3": (4,)}),
            (3, {"two_shot": (2, 8), "lasp1": (4,), "chain/3": (4,)}),
        )
    ),
]


def _case(segments: int, documents: bool, number: int = 0) -> Case:
    """Two micro-batches with documents, else one of two sequences; strategy and recompute cycle with `number`."""
    strategy = [*Strategy][number % len(Strategy)]
    recompute = [Recompute.full, Recompute.none, Recompute.selective][number % 3]
    return Case(
        strategy,
        recompute=recompute,
        segments=segments,
        documents=documents,
        micro_batch=1 if documents else 2,
        steps=1,
    )


def _reference(rank: int, world_size: int, store: str) -> dict[bool, Result]:
    mesh, scan = make_mesh(rank, world_size, 1), build_scans((0,), "dp")["dp"]
    return {documents: run_steps(_case(1, documents, 1), scan, mesh, store) for documents in (False, True)}


def _suite(
    rank: int, world_size: int, store: str, backends: dict[str, tuple[int, ...]], quick: bool, reference: bytes
) -> None:
    expected: dict[bool, Result] = pickle.loads(reference)
    mesh, scans = make_mesh(rank, world_size, world_size), build_scans(tuple(range(world_size)), *backends)
    if not quick and GLOBAL_BATCH % world_size == 0:
        _check_two_groups(make_mesh(rank, world_size, 1), store, expected[True])
    number = 0
    for documents, (name, cuts) in itertools.product((True,) if quick else (False, True), backends.items()):
        for segments in cuts:
            case = _case(segments, documents, number)
            number += 1
            result = run_steps(case, scans[name], mesh, store)
            where = f"{name}, {case}, {world_size} ranks"
            check(result, expected[documents], TOLERANCE, where)
            # One scan per layer, micro-batch and segment in each direction: second passes do not communicate.
            launches = TINY.num_layers * segments * GLOBAL_BATCH // case.micro_batch
            assert result.launches == (launches, launches), f"{result.launches} scans: {where}"
    for scan in scans.values():
        scan.drain()


def _check_two_groups(mesh: ProcessMesh, store: str, expected: Result) -> None:
    """Data parallel: a sequence per rank; gradients are summed after the last segment."""
    for strategy in (Strategy.ddp, Strategy.hsdp):
        case = Case(strategy, recompute=Recompute.full, segments=4, documents=True, steps=1)
        result = run_steps(case, RecordedExchange(local_exchange()), mesh, store)
        check(result, expected, TOLERANCE, f"{case}, two groups")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("segments") / "store"))


@pytest.fixture(scope="module")
def reference(store: str) -> dict[bool, Result]:
    """Whole sequences on one rank, without and with documents."""
    return run_distributed(_reference, 1, store)[0]


@pytest.mark.parametrize(("world_size", "backends", "quick"), SEGMENTS)
def test_segments_train_as_the_whole_sequence(
    world_size: int, backends: dict[str, tuple[int, ...]], quick: bool, store: str, reference: dict[bool, Result]
) -> None:
    run_distributed(_suite, world_size, store, backends, quick, pickle.dumps(reference))


def test_documents_change_losses(reference: dict[bool, Result]) -> None:
    assert worst(reference[True], reference[False])["losses"] > 1e-3


def test_initial_states_are_fp32_for_bf16_model() -> None:
    mesh = make_mesh(0, 1, 1)
    try:
        model = build_model(TINY, TrainConfig(dtype=Dtype.bf16), Strategy.zero2, mesh, seed=0)
        assert isinstance(model, FSDPModule)
        for dtype in (torch.float32, torch.bfloat16):
            # Sharded (fp32) before a step, unsharded (bf16) between micro-batches.
            assert model.model.norm.weight.dtype == dtype
            assert {state.dtype for state in model.zero_states(1, mesh.device)} == {torch.float32}
            model.unshard()
    finally:
        dist.destroy_process_group()


@on_ranks(1)
def test_recomputed_segments_rotate_by_the_positions_in_the_sequence(rank: int, world_size: int, store: str) -> None:
    mesh, scan, model = make_mesh(rank, world_size, 1), build_scans((0,), "dp")["dp"], tiny("retnet")
    whole, cut = (
        run_steps(Case(recompute=recompute, segments=segments, steps=1, model=model), scan, mesh, store)
        for recompute, segments in ((Recompute.none, 1), (Recompute.full, 2))
    )
    check(cut, whole, TOLERANCE, "retnet, recompute=full, 2 segments")
