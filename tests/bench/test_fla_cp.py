"""Variant `fla_cp` of case `operator`, fla's own context parallelism, and the bytes that each variant sends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import run_distributed
from tests.support.recurrence import naive_of
from zeco_train.bench import operator
from zeco_train.bench.config import OperatorConfig
from zeco_train.bench.operands import Shape, context_parallel
from zeco_train.bench.session import Session
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.operator_registry import OPERATORS

pytestmark = pytest.mark.numeric

SETTINGS = ["device=cpu", "warmup=1", "runs=2", "flush_mb=0", "timeout_seconds=60", "dtype=fp64", "operator=kda"]
HEADS, KEYS, VALUES, TOKENS = 2, 4, 8, 24
SIZES = [f"heads=[{HEADS}]", f"dims=[[{KEYS},{VALUES}]]", f"tokens=[{TOKENS}]", f"check_tokens={TOKENS}"]
# A state, and a matrix transition, in fp64.
STATE, MATRIX = HEADS * KEYS * VALUES * 8e-6, HEADS * KEYS * KEYS * 8e-6


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    into = x.new_empty(dist.get_world_size(group) * x.shape[1], *x.shape[2:])
    dist.all_gather_into_tensor(into, x.detach()[0].contiguous(), group=group)
    return into[None]


def _chunk_kda(*operands: Tensor, cp_context: SimpleNamespace) -> tuple[Tensor, None]:
    """As fla's function takes its operands: this rank's, of the sequence that its context knows."""
    whole = [_gathered(x, cp_context.group) for x in operands]
    assert cp_context.cu_seqlens.tolist() == cp_context.cu_seqlens_cpu.tolist() == [0, whole[0].shape[1]]
    tokens, rank = operands[0].shape[1], dist.get_rank(cp_context.group)
    return naive_of(OPERATORS["kda"])(*whole)[0][:, rank * tokens : (rank + 1) * tokens], None


def _import(session: Session, module: str, variant: str = "fla") -> Any:
    assert variant == "fla_cp"
    return {
        "fla.ops.kda": SimpleNamespace(chunk_kda=_chunk_kda),
        "fla.ops.cp": SimpleNamespace(build_cp_context=SimpleNamespace),
    }[module]


def _run(rank: int, world_size: int, folder: str) -> None:
    variants = "variants=[dp,zeco:chain,lasp1,lasp2,fla_cp]"
    config = OperatorConfig.load([*SETTINGS, *SIZES, variants, "passes=[forward]", f"out={folder}"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    with mock.patch.object(Session, "import_fla", _import):
        operator.CASE.measure(config, session)
    session.drain()


@pytest.mark.slow
def test_fla_cp_shares_a_sequence_and_its_bytes_are_counted(tmp_path: Path) -> None:
    run_distributed(_run, 2, str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["variant"]: row for row in results["rows"]}
    assert [*rows] == ["dp", "zeco:chain", "lasp1", "lasp2", "fla_cp"]
    assert all(row["relative_error"] < 1e-12 for row in rows.values())
    assert all(row["exposed_us"] is None for row in rows.values())
    # The stand-in gathers q, k, g, v and beta.
    gathered = TOKENS * HEADS * (3 * KEYS + VALUES + 1) * 8e-6
    expected = {"dp": None, "zeco:chain": STATE, "lasp1": STATE, "lasp2": STATE + MATRIX, "fla_cp": gathered}
    for name, sent in expected.items():
        assert rows[name]["sent_mb"] == (None if sent is None else pytest.approx(sent)), name


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (Shape(4, 8, 16, 70), "variants=fla_cp: fla has context parallelism for gated_delta and kda, not gla"),
        (Shape(4, 8, 16, 70, "kda", 2), "variants=fla_cp: is measured with as many heads of q and k as of v; not 2"),
        (Shape(4, 8, 16, 70, "kda"), "variants=fla_cp: flash-linear-attention's kernels need CUDA"),
    ],
)
def test_fla_cp_is_refused_by_name(shape: Shape, problem: str) -> None:
    session = mock.Mock(on_cuda=False, world_size=2, device=torch.device("cpu"))
    session.import_fla = lambda *names: Session.import_fla(session, *names)
    with pytest.raises(ConfigError, match=problem):
        context_parallel(shape, session)
