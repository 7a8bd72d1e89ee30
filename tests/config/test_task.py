"""What a model may read must fit what it is to predict: tasks, unmasked models, and the identity of runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from data.loader.masking import TaskConfig, TaskName
from data.tokenizer import ByteTokenizer
from models.mixer_registry import MIXERS, unmasked_mixers
from models.mixers.gla import GLAConfig
from tests.support.unmasked import UnmaskedMixer
from zeco_train.config.schema import config_of, load_config, to_plain
from zeco_train.errors import CheckpointError, ConfigError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.generate import __main__ as generate
from zeco_train.hf.config_json import to_config_json
from zeco_train.hf.trained import Trained
from zeco_train.tracking.run_folder import RunFolder

MASKED = ["task=mlm", "model.causal=false"]


@pytest.fixture
def unmasked() -> Any:
    with mock.patch.dict(MIXERS, gla=UnmaskedMixer):
        yield


def test_default_is_the_next_token_and_a_causal_model() -> None:
    config = load_config([])
    assert (config.task, config.model.causal) == (TaskConfig(TaskName.lm, 0.15, None), True)
    assert load_config(["task=lm"]).task == config.task


@pytest.mark.usefixtures("unmasked")
def test_masked_task_of_an_unmasked_model() -> None:
    config = load_config([*MASKED, "task.mask_fraction=0.3", "task.mask_token=0"])
    assert (config.task, config.model.causal) == (TaskConfig(TaskName.mlm, 0.3, 0), False)
    assert config_of(to_plain(config)) == config


@pytest.mark.usefixtures("unmasked")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=mlm"], "task=mlm: a causal model would not read the tokens after a mask; set model.causal=false"),
        ([*MASKED, "data=synthetic"], "task=mlm: data=synthetic has labels of its own; take another data="),
        (
            [*MASKED, "data.labels_across_documents=false"],
            "data.labels_across_documents=false: labels of task=mlm are the tokens themselves; must be true or null",
        ),
        ([*MASKED, "task.mask_fraction=0"], "task.mask_fraction=0.0: must be > 0 and ≤ 1"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert str(caught.value) == message


def test_mixers_with_decays_are_always_causal() -> None:
    able = ", ".join(unmasked_mixers()) or "none yet"
    with pytest.raises(ConfigError) as caught:
        load_config(MASKED)
    message = f"model.causal=false: the decays of gla need an order; mixers without: {able}"
    assert str(caught.value) == message


@pytest.mark.usefixtures("unmasked")
def test_identity_has_the_task_and_its_masks() -> None:
    masked = load_config(MASKED).identity()
    assert (masked["task.name"], masked["task.mask_fraction"], masked["task.mask_token"]) == ("mlm", 0.15, None)
    assert load_config([*MASKED, "task.mask_fraction=0.2"]).identity() != masked
    causal = load_config([]).identity()
    assert causal["task.name"] == "lm"
    assert "task.mask_fraction" not in causal


@pytest.mark.usefixtures("unmasked")
def test_run_goes_on_with_its_task_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", load_config([]).identity())
    folder.begin({}, [])
    folder.release()
    RunFolder(tmp_path / "run", load_config([]).identity()).release()
    with pytest.raises(CheckpointError, match="has True and can only go on with that"):
        RunFolder(tmp_path / "run", load_config(MASKED).identity())


def _unmasked_run(path: str) -> Trained:
    return Trained(Path(path), GLAConfig(causal=False), None, None, {})


@pytest.mark.parametrize(
    ("arguments", "task"), [(["--tasks", "validation,recall"], "recall"), (["--tasks", "needle"], "needle")]
)
def test_evaluations_of_next_tokens_refuse_unmasked_models(arguments: list[str], task: str) -> None:
    job: Any = SimpleNamespace(launch=SimpleNamespace(rank=0))
    message = f"--tasks={task}: asks for next tokens, which this model (model.causal=false) reads; only validation"
    with (
        mock.patch.object(evaluate, "find_trained", _unmasked_run),
        pytest.raises(ConfigError, match=f"^{re.escape(message)}"),
    ):
        evaluate._evaluate(["run", *arguments], job)


def test_generation_refuses_unmasked_models() -> None:
    job: Any = SimpleNamespace(launch=SimpleNamespace(rank=0))
    with (
        mock.patch.object(generate, "find_trained", _unmasked_run),
        pytest.raises(ConfigError, match=r"^RUN=run: reads in both directions \(model\.causal=false\)"),
    ):
        generate._generate(["run", "--prompt", "a"], job)


def test_export_refuses_unmasked_models() -> None:
    with pytest.raises(ConfigError, match=r"^model\.causal=false: fla's GLA has true only"):
        to_config_json(GLAConfig(causal=False), ByteTokenizer(), 0, 16, "float32")
