"""Scores of answers on any split, against a model on one rank; and the synthetic tasks of the command."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.synthetic.tasks import Answer, Example, Tokens
from models.language_model import LanguageModel
from models.spec import ModelSpec
from tests.support.commands import check_line, run_here, train_here
from tests.support.distributed import run_distributed
from tests.support.steps import TINY
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import init_mesh
from zeco_train.evaluate.__main__ import main
from zeco_train.evaluate.scoring import Cut, Scores, score_examples
from zeco_train.evaluate.synthetic import ZeroedScan
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.sp.exchange import connect, local_exchange
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig
from zeco_train.training.forward import SequenceForward

pytestmark = pytest.mark.numeric

LENGTH, SHARDS = 24, 6
# Across the shard borders at 4, 8, 12, 16 and 20, next to them, and at both ends.
ANSWERS = [Answer(1, 2), Answer(3, 5), Answer(12, 13), Answer(15, 16), Answer(16, 18), Answer(23, 25)]


class Given:
    """A filler of given tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def read(self, start: int, stop: int) -> Tokens:
        return self._tokens[start:stop]


def logits(model: LanguageModel, tokens: Tokens) -> Tensor:
    ids = torch.from_numpy(tokens)[None]
    return model(ids, SequencePosition((0, len(tokens)), exchange=local_exchange()))[0]


@torch.no_grad()
def examples_of(model: LanguageModel, count: int) -> list[Example]:
    """Examples of random tokens; half of the answers are the model's argmax."""
    rng, made = np.random.default_rng(0), []
    for index in range(count):
        tokens = rng.integers(0, TINY.vocab_size, LENGTH + 1)
        for number, answer in enumerate(ANSWERS):
            for place in range(*answer):
                if (index + number) % 2:
                    tokens[place] = logits(model, tokens[:place])[-1].argmax()
        made.append(Example(LENGTH, Given(tokens), [], ANSWERS))
    return made


@torch.no_grad()
def expected_scores(model: LanguageModel, examples: list[Example], parts: int = 1) -> Scores:
    """Scores with each part of the sequence run separately, from a zero state."""
    right, losses = [], []
    for example in examples:
        tokens = example.read(0, LENGTH + 1)
        borders = itertools.pairwise(LENGTH * part // parts for part in range(parts + 1))
        found = torch.cat([logits(model, tokens[start:stop]) for start, stop in borders])
        labels = torch.from_numpy(tokens[1:])
        hits, counts = found.argmax(-1) == labels, torch.from_numpy(example.counts(0, LENGTH))
        right.append([bool(hits[answer.start - 1 : answer.stop - 1].all()) for answer in example.answers])
        losses.append(torch.nn.functional.cross_entropy(found[counts], labels[counts]))
    return Scores(torch.tensor(right), torch.stack(losses))


def _check_split(rank: int, world_size: int, sp_size: int) -> None:
    device = torch.device("cpu")
    mesh = init_mesh(Launch(rank, world_size, rank), sp_size, device, timedelta(seconds=60))
    model = build_model(TINY, TrainConfig(dtype=Dtype.fp64), Strategy.zero3, mesh, seed=0)
    whole = ModelSpec(TINY).build().to(torch.float64)
    whole.init_weights(0)
    examples = examples_of(whole, 3)
    made: list[Any] = [lambda example=example: example for example in examples]
    backend = Backend.zeco if sp_size > 1 else Backend.dp
    scan = connect(SPConfig(backend), mesh.scan_groups, mesh.timeout)
    # The last one has parts of different lengths.
    for cut in (Cut(LENGTH, 1, 2), Cut(LENGTH, SHARDS // sp_size, 3), Cut.of(LENGTH, sp_size, 1, 5)):
        plain = score_examples(made, SequenceForward(model, scan, mesh), cut, lambda activity: None)
        _assert_same(plain, expected_scores(whole, examples), f"sp {sp_size}, {cut}")
        assert plain.right[0].tolist() == [False, True] * 3, plain.right
        zeroed = SequenceForward(model, scan.wrapped(ZeroedScan), mesh)
        alone = score_examples(made, zeroed, cut, lambda activity: None)
        parts = sp_size * cut.segments
        _assert_same(alone, expected_scores(whole, examples, parts), f"zeroed, sp {sp_size}, {cut}")
    scan.drain()


def _assert_same(found: Scores, expected: Scores, where: str) -> None:
    assert torch.equal(found.right, expected.right), where
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=0.0, msg=lambda text: f"{where}: {text}")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("world_size", "sp_size"), [(2, 2), (2, 1), (3, 3)])
def test_scores_do_not_depend_on_the_split(world_size: int, sp_size: int) -> None:
    run_distributed(_check_split, world_size, sp_size)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1 << 20, 2, 1, 16384), Cut(1 << 20, 32, 1)),
        ((512, 1, 1, 16384), Cut(512, 1, 32)),
        ((96, 2, 4, 5), Cut(96, 12, 1)),
        ((97, 1, 1, 50), Cut(97, 2, 1)),
        ((97, 1, 1, 96), Cut(97, 2, 1)),
        ((7, 3, 1, 1), Cut(9, 3, 1)),
        ((16411, 1, 4, 16384), Cut(16411, 4, 3)),
    ],
)
def test_cut_pads_length_and_limits_tokens_per_rank(arguments: tuple[int, int, int, int], expected: Cut) -> None:
    assert Cut.of(*arguments) == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "run"
    ended = train_here(f"run_dir={folder}", "data=synthetic", "data.synthetic.facts=2", "train.steps=2")
    assert ended.code == 0, ended
    return folder


@pytest.mark.slow
def test_synthetic_tasks_write_results_and_plots(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    grid = [
        "recall.lengths=[64,256]",
        "recall.depths=3",
        "recall.examples=2",
        "recall.tokens=128",
        "recall.zeroed=true",
    ]
    needle = ["needle.lengths=[512]", "needle.depths=0", "needle.examples=1"]
    ended = run_here(main, str(run), "--tasks", "recall,needle", "--out", str(out), *grid, *needle)
    assert ended.code == 0, ended
    results = json.loads((out / "results.json").read_text())["tasks"]
    recall = results["recall"]
    assert recall["asked"]["facts"] == 2
    assert recall["lengths"] == [64, 256]
    assert recall["depths"] == [0.0, 0.5, 1.0]
    assert recall["segments"] == {"64": 1, "256": 2}
    assert recall["chance"] == 1 / 64
    assert np.array(recall["whole"]["accuracy"]).shape == (3, 2)
    # The shorter sequence is a single segment, so nothing is zeroed.
    assert recall["whole"]["loss"]["64"] == recall["zeroed"]["loss"]["64"]
    assert recall["whole"]["loss"]["256"] != recall["zeroed"]["loss"]["256"]
    assert results["needle"]["depths"] == [None]
    for picture in ("recall.png", "recall_zeroed.png", "needle.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    again = run_here(main, str(run), "--tasks", "recall", "--out", str(tmp_path / "again"), *grid[:-1])
    assert again.code == 0, again
    repeated = json.loads((tmp_path / "again" / "results.json").read_text())["tasks"]["recall"]
    assert repeated["whole"] == recall["whole"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["recall.lengths=[4]"],
            "recall.lengths=4: too short for 2 pairs and 2 queries of recall; least legal value: 8",
        ),
        (["recall.lengths=[64,64]"], "recall.lengths=[64, 64]: names one twice"),
        (["recall.zeroed=true"], "recall.zeroed=true: no state crosses ranks or segments here"),
    ],
)
def test_invalid_task_settings_are_reported(run: Path, arguments: list[str], expected: str) -> None:
    ended = run_here(main, str(run), "--tasks", "recall", *arguments)
    check_line(ended, 2, expected)
    assert not (run / "evaluation").exists()
