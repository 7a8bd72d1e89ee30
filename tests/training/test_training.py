"""The loss curve does not depend on the split: backends, sp sizes, strategies, micro-batches, segments, documents,
precision."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.prepare import PrepareOptions, prepare_store
from data.store import TokenStore
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.training import SMALL, largest_difference, train
from zeco_train.config.schema import load_config
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

STEPS, SEQ_LEN = 2, 240
FP64 = ["train.dtype=fp64", f"train.steps={STEPS}", f"data.seq_len={SEQ_LEN}", "checkpoint.every=0"]

# Splits by world size: name → overrides. Every backend at every sp size, every strategy.
QUICK, DP = "zeco, sp 2, zero2, micro-batch 2", "dp, zero3"
SPLITS: dict[int, dict[str, list[str]]] = {
    1: {"reference": ["sp=dp"]},
    2: {
        QUICK: ["sp=zeco", "parallel=zero2", "data.micro_batch=2"],
        "lasp2, sp 2, hsdp": ["sp=lasp2", "parallel=hsdp"],
        DP: ["sp=dp", "parallel=zero3"],
        "lasp1, sp 2, ddp, 2 segments": ["sp=lasp1", "parallel=ddp", "train.segments=2", "train.recompute=selective"],
    },
}


def short_documents(folder: Path) -> Path:
    """A token store of documents of 20 to 400 bytes, many of which cross shards of a sequence."""
    lines = (Path(__file__).parents[2] / "LICENSE").read_text() * 2
    rng, start, texts = np.random.default_rng(0), 0, []
    while start < len(lines):
        stop = start + int(rng.integers(20, 400))
        texts.append(json.dumps({"text": lines[start:stop]}))
        start = stop
    source = folder / "documents.jsonl"
    source.write_text("\n".join(texts))
    prepare_store(PrepareOptions((source,), folder / "store", validation_fraction=0.2, workers=1))
    return folder / "store"


def _quick(rank: int, world_size: int, folder: str, store: str) -> dict[str, dict[str, Any]]:
    """The reference on one rank; on two one split."""
    cases = SPLITS[1] if world_size == 1 else {QUICK: SPLITS[2][QUICK]}
    return {name: train(rank, world_size, f"{folder}/{name}", *FP64, *split) for name, split in cases.items()}


def _of_documents(rank: int, world_size: int, folder: str, store: str) -> dict[str, dict[str, Any]]:
    return {"documents": train(rank, world_size, f"{folder}/documents", *FP64, *documents(store, "sp=dp"))}


def documents(store: str, *more: str) -> list[str]:
    return ["data=tokens", f"data.path='{store}'", "data.reset_state_at_document=true", *more]


def _splits(rank: int, world_size: int, folder: str, store: str) -> dict[str, dict[str, Any]]:
    cases = {name: split for name, split in SPLITS[world_size].items() if name != QUICK}
    return {name: train(rank, world_size, f"{folder}/{name}", *FP64, *split) for name, split in cases.items()}


class Runs:
    """Results of a suite by world size, rank and name; computed once on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, str(short_documents(folder))
        self._done: dict[tuple[Any, int], list[dict[str, dict[str, Any]]]] = {}

    def __call__(self, suite: Any, world_size: int) -> list[dict[str, dict[str, Any]]]:
        if (suite, world_size) not in self._done:
            results = run_distributed(suite, world_size, str(self.folder / str(world_size)), self.store)
            self._done[suite, world_size] = results
        return self._done[suite, world_size]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("splits"))


def test_metrics_count_all_tokens(runs: Runs) -> None:
    for world_size, name in ((1, "reference"), (2, QUICK)):
        rows = runs(_quick, world_size)[0][name]["rows"]
        assert [row["tokens"] for row in rows] == [4 * SEQ_LEN * step for step in range(1, STEPS + 1)]
        for row in rows:
            assert row["tokens_per_second"] == pytest.approx(world_size * row["tokens_per_second_per_device"])
            assert row["tokens_per_second"] == pytest.approx(4 * SEQ_LEN / row["step_seconds"])


@pytest.mark.slow
def test_first_loss_is_the_mean_over_each_document_alone(runs: Runs) -> None:
    """The reference knows no packing: a call for each document, whose tokens but the last predict the next."""
    config = load_config([*SMALL, *FP64, "run_dir=x"])
    model = ModelSpec(config.model).build().double()
    model.init_weights(config.seed)
    store = TokenStore.open(runs.store)
    loss, count, scan = 0.0, 0, local_exchange()
    result = runs(_of_documents, 1)[0]["documents"]
    for sequence in result["sequence_ids"][0]:
        first, beyond = sequence * SEQ_LEN, (sequence + 1) * SEQ_LEN
        for start, stop in itertools.pairwise(store.doc_offsets.tolist()):
            # A sequence begins with a fresh state, and its last token has a label if its document goes on.
            begin, end = max(start, first), min(stop - 1, beyond)
            if begin < end:
                ids = torch.from_numpy(store.read(begin, end + 1))[None]
                with torch.no_grad():
                    shard = SequencePosition((0, end - begin), exchange=scan)
                    loss += model(ids[:, :-1], shard, ids[:, 1:]).item()
                count += end - begin
    assert count < 4 * SEQ_LEN
    assert result["rows"][0]["loss"] == pytest.approx(loss / count, rel=1e-9)


@pytest.mark.parametrize(("suite", "world_size"), [(_quick, 2), pytest.param(_splits, 2, marks=pytest.mark.slow)])
def test_fp64_runs_are_the_same_on_every_split(runs: Runs, suite: Any, world_size: int) -> None:
    alone = runs(_of_documents if suite.__name__ == "_documents" else _quick, 1)[0]
    [expected] = alone.values()
    for name, result in runs(suite, world_size)[0].items():
        for key in ("loss", "grad_norm", "val_loss"):
            # The contract is 1e-9 over the first 100 steps.
            assert largest_difference(result["rows"], expected["rows"], key) <= 1e-9, (name, key)
        for parameter, value in expected["parameters"].items():
            # AdamW divides by the root of tiny second moments, so its steps differ more than the gradients do.
            error = (result["parameters"][parameter] - value).norm() / value.norm()
            assert error <= 1e-8, (name, parameter, error)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "world_size"), [(_splits, 2)])
def test_each_sequence_is_read_by_exactly_one_group(runs: Runs, suite: Any, world_size: int) -> None:
    expected = runs(_quick, 1)[0]["reference"]["sequence_ids"]
    by_rank = [rank[DP]["sequence_ids"] for rank in runs(suite, world_size)]
    for step, ids in enumerate(expected):
        assert sorted(ids) == sorted(i for rank in by_rank for i in rank[step]), step
    split = "lasp2, sp 2, hsdp" if world_size == 2 else "lasp2, sp 4"
    assert all(rank[split]["sequence_ids"] == expected for rank in runs(suite, world_size))


def test_each_rank_has_its_own_log(runs: Runs) -> None:
    runs(_quick, 2)
    logs = runs.folder / "2" / QUICK / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [f"rank_{rank}.log" for rank in range(2)]
