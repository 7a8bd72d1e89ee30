"""Ranks with any numbers of tokens compute what one rank does: every mixer, backend and method of softmax attention."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader.batches import Batch
from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.mixer_registry import MIXERS
from models.mixers.gla import GLAConfig
from models.spec import spec_of
from tests.support.distributed import run_distributed
from tests.support.sp_reference import TIMEOUT, build_scans
from tests.support.training import train
from zeco_train.distributed.config import Strategy
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.sp.attention.method_registry import METHODS, build_attention
from zeco_train.sp.exchange import local_exchange
from zeco_train.training import step as step_module
from zeco_train.training.step import TrainingStep

pytestmark = pytest.mark.numeric

# Tokens of the ranks, segment by segment; those of models with convolutions reach over one neighbour only.
LENGTHS, WITH_HALO = (1, 7, 2, 1, 13, 3, 1, 1, 20, 5), (4, 9, 5, 4, 13, 6, 4, 7, 20, 5)
# fp64: sums of some 60 tokens and 2 layers in another order.
TOLERANCE = 1e-12
# Heads that ulysses can spread over 2, 3 and 5 ranks.
SHAPE = {"vocab_size": 31, "hidden_size": 60, "num_layers": 2, "intermediate_size": 40}
HYBRID = GLAConfig(**SHAPE, num_heads=2, attn=AttnConfig(every=2, num_heads=30, head_dim=2))
MODELS: dict[str, LanguageModelConfig] = {
    **{name: mixer.config_class(vocab_size=31, num_layers=2) for name, mixer in MIXERS.items()},
    "softmax": HYBRID,
    "softmax, window": dataclasses.replace(HYBRID, attn=dataclasses.replace(HYBRID.attn, window=9)),
}


def positions(lengths: Sequence[int], ranks: int, rank: int, documents: bool) -> list[SequencePosition]:
    """Of this rank's tokens, segment by segment; documents begin at the second rank's first token, and elsewhere."""
    bounds = [0, *itertools.accumulate(lengths)]
    borders = sorted({0, lengths[0], bounds[-1] // 2, bounds[-1] - 1, bounds[-1]})
    segments = len(lengths) // ranks
    return [
        SequencePosition(
            bounds[segment * ranks : (segment + 1) * ranks + 1],
            rank,
            seq_len=bounds[-1],
            documents=[borders] if documents else None,
            segment=segment,
            num_segments=segments,
        )
        for segment in range(segments)
    ]


def loss_and_gradients(name: str, exchange: Exchange, places: Sequence[SequencePosition]) -> list[Tensor]:
    """Of this rank's tokens, by the trainer's passes over the segments."""
    model = spec_of(MODELS[name]).build().double()
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # So large that every path matters.
            parameter *= 5 if parameter.ndim > 1 else 1
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(31, (1, places[0].seq_len + 1), generator=generator)
    batches = [Batch(ids[:, p.start : p.stop], ids[:, p.start + 1 : p.stop + 1], p, [0]) for p in places]
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    settings: dict[str, Any] = {"strategy": Strategy.ddp, "grad_clip": 1.0, "tokens_per_step": places[0].seq_len}
    step = TrainingStep(model, torch.optim.SGD(model.parameters()), exchange, mesh, **settings)
    with mock.patch.object(step_module, "begin_micro_batch"):
        assert step.backward(batches, last=True)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [step.totals.loss.reshape(1), *gradients]


def suite(rank: int, world_size: int, name: str, sizes: Sequence[int], quick: bool = False) -> None:
    config = MODELS[name]
    lengths = WITH_HALO if spec_of(config).needs_halo else LENGTHS
    # Softmax layers have no gradient over segments.
    layouts = [(1, False), (1, True)] if "softmax" in name else [(2, False), (1, True)]
    if quick:
        layouts = layouts[1:] if "softmax" in name else [(2, True)]
    names = ("lasp2",) if "softmax" in name else ("auto",)
    for size in sizes:
        ranks = tuple(range(size))
        groups, scans = dist.new_group(ranks), build_scans(ranks, *(() if not quick else names))
        exchanges: dict[str, Exchange] = {**scans}
        if "softmax" in name:
            own = {method: dist.new_group(ranks) for method in METHODS}
            exchanges = {
                method: scans["lasp2"].replaced(attention=build_attention(METHODS[method], group, TIMEOUT))
                for method, group in own.items()
                if rank in ranks
            }
        for segments, documents in layouts if rank in ranks else ():
            tokens = lengths[: size * segments]
            whole = loss_and_gradients(name, local_exchange(), positions([sum(tokens)], 1, 0, False))
            if documents:
                borders = positions(tokens, size, rank, True)[0].documents
                place = SequencePosition((0, sum(tokens)), documents=borders)
                plain, whole = whole, loss_and_gradients(name, local_exchange(), [place])
                assert (plain[0] - whole[0]).abs() > 1e-6 * plain[0], "documents matter"
            for backend, exchange in exchanges.items():
                found = loss_and_gradients(name, exchange, positions(tokens, size, rank, documents))
                for ours, expected in zip(found, whole, strict=True):
                    dist.all_reduce(ours, group=groups)
                    where = f"{backend}, {tokens}, {segments=}, {documents=}, {list(expected.shape)}"
                    assert (ours - expected).norm() <= TOLERANCE * expected.norm(), where
        for scan in scans.values() if rank in ranks else ():
            scan.drain()


@pytest.mark.parametrize(
    ("name", "sizes", "quick"),
    [
        ("mamba2", (3,), True),
        *(pytest.param(n, of, False, marks=pytest.mark.campaign) for n in MODELS for of in ((3,), (2, 5))),
    ],
)
def test_uneven_ranks_compute_what_one_does(name: str, sizes: Sequence[int], quick: bool) -> None:
    run_distributed(suite, max(sizes), name, sizes, quick)


@pytest.mark.slow
def test_training_with_a_length_that_does_not_divide(tmp_path: Path) -> None:
    """130 tokens over 3 ranks, in 2 segments, train as over one; so does validation."""
    settings = ["data.seq_len=130", "train.steps=1", "train.dtype=fp64", "train.eval_every=1", "sp=zeco"]
    expected, found = (
        run_distributed(train, ranks, tmp_path / f"{ranks}", *settings, f"train.segments={segments}")[0]["rows"]
        for ranks, segments in ((1, 1), (3, 2))
    )
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert "val_loss" in expected[-1]
    for row, other in zip(found, expected, strict=True):
        for name in {"loss", "grad_norm", "val_loss"} & other.keys():
            assert abs(row[name] - other[name]) <= 1e-11 * other[name], name
