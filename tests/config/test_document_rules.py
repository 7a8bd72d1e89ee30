"""Mixers that are defined up to a length refuse longer documents before anything runs, in one line, on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.store import TokenStore
from tests.support.commands import run_here, train_here
from tests.support.distributed import run_distributed
from tests.support.stores import write_tokens
from tests.support.training import train
from zeco_train.config.schema import check_documents, load_config
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.evaluate.scoring import ScoreRequest
from zeco_train.evaluate.service import Service
from zeco_train.generate import __main__ as generate

LENGTHS = [3000, 100, 500, 9000]
LIMITED = ["model=cosformer_tiny", "model.num_layers=1", "model.max_document=64"]
SMALL = [*LIMITED, "train.steps=1", "train.eval_sequences=1", "data.global_batch=2", "sched.warmup_steps=1"]
DEFINED = "the model is defined for documents of at most 64 tokens (model.max_document)"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("limit") / "store", LENGTHS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    outcome = train_here(*SMALL, "data=tokens", f"data.path={store}", "data.seq_len=64", "name=a", f"run_dir={folder}")
    assert outcome.code == 0, outcome
    return folder


def write(folder: Path, lengths: list[int]) -> Path:
    tokens = np.random.default_rng(0).integers(2, 256, sum(lengths))
    tokens[np.cumsum(lengths) - 1] = 1
    return write_tokens(folder, tokens, lengths)


def test_sequences_without_documents_are_refused_before_data_is_opened(tmp_path: Path) -> None:
    gone = ["data=tokens", f"data.path={tmp_path}/gone", "name=a", f"run_dir={tmp_path}/run"]
    outcome = train_here(*SMALL, *gone, "data.seq_len=65")
    assert (outcome.code, outcome.err) == (ConfigError.exit_code, f"error: data.seq_len=65: {DEFINED}\n")
    load_config([*LIMITED, "data.seq_len=64"])
    load_config([*LIMITED, "data.seq_len=65", "data.reset_state_at_document=true"])
    load_config(["data.seq_len=1048576"])


def test_longest_document_counts_up_to_a_sequence(store: Path) -> None:
    opened = TokenStore.open(store)
    assert opened.longest_document() == 9000
    for longest, seq_len, allowed in [
        (9000, 1 << 20, True),
        (8999, 1 << 20, False),
        (512, 1024, False),
        (64, 64, True),
    ]:
        config = load_config([*LIMITED, f"model.max_document={longest}", "data.seq_len=64"])
        config.data.reset_state_at_document = True
        if allowed:
            check_documents(config.model, config.data, seq_len, [opened])
            continue
        expected = f"{store} within data.seq_len={seq_len}={min(9000, seq_len)}: the model is defined"
        with pytest.raises(ConfigError) as caught:
            check_documents(config.model, config.data, seq_len, [opened])
        assert expected in str(caught.value)


def _start(rank: int, world_size: int, folder: str) -> list[str]:
    documents = ["data=tokens", "data.reset_state_at_document=true", "data.seq_len=1024", "sp=zeco", "sp.size=2"]
    messages = []
    for name in ("long", "long_validation", "short"):
        settings = [*SMALL, *documents, f"data.path={folder}/{name}", "model.hidden_size=128", "model.num_heads=4"]
        try:
            train(rank, world_size, f"{folder}/runs/{name}", *settings)
            messages.append("trained")
        except ZecoError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_every_rank_refuses_a_long_document_and_none_waits(tmp_path: Path) -> None:
    """Training and validation stores; the model trains where each document is short enough."""
    short = [40] * 100
    for name, lengths, held_out in [("long", [300, *short], short), ("long_validation", short, [300, *short])]:
        write(tmp_path / name, lengths)
        write(tmp_path / name / "validation", held_out)
    write(tmp_path / "short", short)
    first, second = run_distributed(_start, 2, str(tmp_path))
    within = f"within data.seq_len=1024=300: {DEFINED}"
    path = tmp_path / "long_validation" / "validation"
    assert first == second
    assert first == [
        f"tokens of the longest document of {tmp_path / 'long'} {within}",
        f"tokens of the longest document of {path} {within}",
        "trained",
    ]
    assert not (tmp_path / "runs" / "long").exists()


@pytest.mark.slow
def test_evaluations_refuse_longer_sequences(run: Path, store: Path) -> None:
    validation = ["validation.lengths=[64,128]", "data=tokens", f"data.validation_path={store}", f"data.path={store}"]
    for task, field, settings in (
        ("validation", "validation.lengths=128", validation),
        ("recall", "recall.lengths=512", ["recall.lengths=[512]"]),
    ):
        found = run_here(evaluate.main, str(run), "--tasks", task, *settings)
        assert (found.code, found.err) == (ConfigError.exit_code, f"error: {field}: {DEFINED}\n")


def test_standard_tasks_refuse_longer_texts() -> None:
    service: Any = Service.__new__(Service)
    service._evaluation = SimpleNamespace(config=load_config([*LIMITED, "data.seq_len=64"]))
    with pytest.raises(ConfigError, match=r"^tokens of a text=65: .* at most 64 tokens"):
        service.score([ScoreRequest(np.zeros(n, dtype=np.int64), 1) for n in (20, 66, 3)])


@pytest.mark.slow
def test_generation_refuses_a_prompt_whose_text_may_become_too_long(run: Path) -> None:
    prompt = ["--prompt", "a" * 40, "--ignore-eos"]
    assert run_here(generate.main, str(run), *prompt, "--max-tokens", "24").code == 0
    refused = run_here(generate.main, str(run), *prompt, "--max-tokens", "25")
    assert (refused.code, refused.out) == (ConfigError.exit_code, "")
    assert refused.err == f"error: tokens of a prompt and max_tokens=65: {DEFINED}\n"
