"""Recomputation changes only the saved tensors: neither results nor communication."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.language_model import Block
from models.mixers.gla import GatedLinearAttention
from tests.support.distributed import run_distributed
from tests.support.sp_reference import CONFIGS, RecordedExchange, build_scans
from tests.support.steps import GLOBAL_BATCH, TINY, Case, check, make_mesh, run_steps, write_documents
from zeco_train.distributed.config import Strategy
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange

pytestmark = [pytest.mark.campaign, pytest.mark.numeric]

# Recomputation repeats the same calls: measured 0 for all cases.
TOLERANCE = 1e-12
# A chain of one block equals lasp1, and auto selects one of the others.
BACKENDS = [name for name in CONFIGS if name not in ("chain/1", "auto")]


def _suite(rank: int, world_size: int, store: str) -> set[str]:
    """All backends, strategies and recompute settings of a world size; returns the backends."""
    # dp: whole sequences on each rank; gradients are summed over all ranks.
    splits: dict[int, dict[str, RecordedExchange]] = {1: {"dp": RecordedExchange(local_exchange())}}
    if world_size > 1:
        scans = build_scans(tuple(range(world_size)))
        splits[world_size] = {name: scans[name] for name in BACKENDS}
    for sp_size, scans in splits.items():
        mesh = make_mesh(rank, world_size, sp_size)
        launches = TINY.num_layers * GLOBAL_BATCH // mesh.dp_size
        for (name, scan), strategy in itertools.product(
            scans.items(), Strategy if world_size > 1 else [Strategy.zero3]
        ):
            expected = None
            for recompute in Recompute:
                result = run_steps(Case(strategy, recompute=recompute, steps=world_size), scan, mesh, store)
                expected = expected or result
                where = f"{name} with sp.size={sp_size}, {strategy}, {recompute}"
                check(result, expected, TOLERANCE, where)
                # One scan per layer and micro-batch in each direction: recomputation does not communicate.
                assert result.launches == (launches, launches), f"{result.launches} scans: {where}"
            scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything
    return {name for scans in splits.values() for name in scans}


@pytest.mark.parametrize("world_size", [1, 2])
def test_recompute_gives_same_training_for_every_backend(world_size: int, tmp_path: Path) -> None:
    store = write_documents(tmp_path / "store")
    backends = run_distributed(_suite, world_size, str(store))
    assert backends == [{"dp", *(BACKENDS if world_size > 1 else ())}] * world_size


def kept(recompute: Recompute, tokens: int) -> int:
    """Number of elements that a block saves for its backward pass, without parameters."""
    scan = local_exchange()
    block = Block(TINY, GatedLinearAttention, 0)
    block.recompute = recompute
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        x = torch.randn(1, tokens, TINY.hidden_size).requires_grad_()
        y, *_ = block(x, SequencePosition((0, tokens), exchange=scan))
    y.sum().backward()
    return sum(size for pointer, size in saved.items() if pointer not in {p.data_ptr() for p in block.parameters()})


def test_kept_activations_by_recompute_setting() -> None:
    tokens, width = 100, TINY.hidden_size
    none, selective, full = (kept(recompute, tokens) for recompute in Recompute)
    # The MLP's gate, up and their product, its normed input and the norm's factors.
    assert none - selective == tokens * (3 * TINY.intermediate_size + width + 1)
    # The block's input and the received state.
    assert full == tokens * width + TINY.num_heads * TINY.head_k_dim * TINY.head_v_dim
