"""Scoring requests: equal to scoring one text at a time, however they are packed, cut and distributed."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models.attn import AttnConfig
from models.language_model import LanguageModel
from tests.models.test_model import build, whole
from tests.support.distributed import run_distributed
from tests.support.steps import TINY, make_mesh
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.parallelize import parallelize
from zeco_train.evaluate.scoring import Score, ScoreRequest, _deal, score
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.sp.exchange import connect, connect_model
from zeco_train.training.forward import SequenceForward

# (tokens, first scored): one scored token, one token of context, longer than a rank's limit, and equal lengths.
HYBRID = AttnConfig(every=2, num_kv_heads=1)
LENGTHS = [(2, 1), (3, 1), (9, 8), (9, 4), (33, 1), (40, 1), (40, 39), (1, 1), (70, 50)]


def requests() -> list[ScoreRequest]:
    generator = np.random.default_rng(0)
    found = [ScoreRequest(generator.integers(0, TINY.vocab_size, n), first) for n, first in LENGTHS]
    # One continuation is the model's own argmax, so that one score is greedy.
    model, tokens = build(TINY, spread=1.0), found[3].tokens.copy()
    for place in range(4, len(tokens)):
        tokens[place] = int(_logits(model, tokens[:place])[-1].argmax())
    return [*found, ScoreRequest(tokens, 4)]


def scores_of_hybrid(rank: int, world_size: int) -> list[list[Score]]:
    mesh, config = make_mesh(rank, world_size, world_size), dataclasses.replace(TINY, attn=HYBRID)
    scan = connect_model(SPConfig(Backend.zeco), config, mesh)
    forward = SequenceForward(build(config, spread=1.0), scan, mesh)
    return [score(forward, requests(), batch_tokens) for batch_tokens in (16, 1 << 14)]


@pytest.mark.slow
def test_scores_of_a_hybrid_do_not_depend_on_segments_and_ranks() -> None:
    """Later segments of a text read the keys of earlier ones from caches."""
    expected = [one.log_likelihood for one in one_by_one(build(dataclasses.replace(TINY, attn=HYBRID), spread=1.0))]
    for of_rank in run_distributed(scores_of_hybrid, 2):
        for scores in of_rank:
            assert [score.log_likelihood for score in scores] == pytest.approx(expected, rel=1e-11)


def _logits(model: LanguageModel, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], whole(len(tokens)))[0]


def one_by_one(model: LanguageModel) -> list[Score]:
    found = []
    for request in requests():
        if len(request.tokens) == 1:
            found.append(Score(0.0, True))
            continue
        logits = _logits(model, request.tokens[:-1])[request.first - 1 :]
        wanted = torch.from_numpy(request.tokens[request.first :])
        loss = F.cross_entropy(logits, wanted, reduction="sum").item()
        found.append(Score(-loss, bool((logits.argmax(-1) == wanted).all())))
    return found


def score_on_ranks(rank: int, world_size: int, sp_size: int, strategy: Strategy, batch_tokens: int) -> list[Score]:
    mesh, model = make_mesh(rank, world_size, sp_size), build(TINY, spread=1.0)
    parallelize(model, model.sharding_units(), strategy, torch.float64, mesh)
    forward = SequenceForward(model, connect(SPConfig(Backend.zeco), mesh.scan_groups, mesh.timeout), mesh)
    assert score(forward, [], batch_tokens) == []
    return score(forward, requests(), batch_tokens)


@pytest.mark.parametrize(
    ("sp_size", "strategy", "batch_tokens"),
    [
        (2, Strategy.zero3, 16),
        pytest.param(1, Strategy.zero3, 16, marks=pytest.mark.slow),
        pytest.param(2, Strategy.ddp, 1 << 14, marks=pytest.mark.slow),
    ],
)
def test_scores_equal_one_by_one_reference(sp_size: int, strategy: Strategy, batch_tokens: int) -> None:
    expected = one_by_one(build(TINY, spread=1.0))
    assert {one.is_greedy for one in expected if one.log_likelihood} == {True, False}
    for of_rank in run_distributed(score_on_ranks, 2, sp_size, strategy, batch_tokens):
        for number, (own, other) in enumerate(zip(of_rank, expected, strict=True)):
            assert own.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-11), number
            assert own.is_greedy == other.is_greedy, number


@pytest.mark.slow
@pytest.mark.parametrize(("dp_size", "sp_size", "batch_tokens"), [(1, 1, 64), (3, 1, 50), (2, 4, 8), (4, 2, 1)])
def test_requests_are_dealt_once_with_equal_passes_per_group(dp_size: int, sp_size: int, batch_tokens: int) -> None:
    work = requests()
    plan = _deal(work, batch_tokens, dp_size, sp_size)
    assert sorted(number for own in plan for numbers, _ in own for number in numbers) == list(range(len(work)))
    assert len({sum(cut.segments for _, cut in own) for own in plan}) == 1
    for numbers, cut in itertools.chain(*plan):
        assert cut.length >= cut.segments * sp_size
        per_rank = -(-cut.length // (cut.segments * sp_size))
        assert max(len(numbers), 1) * per_rank <= batch_tokens
        assert all(len(work[number].tokens) - 1 <= cut.length for number in numbers)
