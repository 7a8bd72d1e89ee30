"""`--help`: each key has a meaning in one line, from its docstring; sections, keys and mixers are explained in full."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from omegaconf import OmegaConf

from models.mixer_registry import LAYERS, MIXERS, describe_mixer
from tests.support.commands import REPOSITORY, run_here
from zeco_train.attach.__main__ import ProofSettings
from zeco_train.bench import __main__ as bench
from zeco_train.bench.__main__ import CASES
from zeco_train.config.help import WIDTH, describe_settings, first_clause, keys_of, meanings
from zeco_train.config.overrides import _keys
from zeco_train.config.schema import Config, defaults_of, describe, load_config
from zeco_train.errors import ConfigError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.evaluate.task_registry import LM_EVAL, STANDARD, TASKS
from zeco_train.export import ExportSettings
from zeco_train.hf.parity import ParitySettings
from zeco_train.plan import __main__ as plan
from zeco_train.plan.config import PlanSettings
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.verify.config import VerifyConfig

SETTINGS: dict[str, Any] = {
    **{f"bench {name}": case.config for name, case in CASES.items()},
    **{f"evaluate {name}": kind.load() for name, kind in {**TASKS, LM_EVAL: STANDARD}.items()},
    **{kind.__name__: kind for kind in (VerifyConfig, PlanSettings, ExportSettings, ParitySettings, ProofSettings)},
}


class Way(Enum):
    """How to go. `left` is quicker."""

    left = 0
    right = 1


@dataclass
class Walk:
    """A walk.

    Attributes:
        first, second: two numbers, one after the other; not three.
            (Which one is first?)
        steps: their number.
    """

    first: int = 1
    second: int = 2
    steps: int = 3
    way: Way = Way.left
    silent: bool = False


@dataclass
class LongWalk(Walk):
    """A walk.

    Attributes:
        steps: of many (at least 4; or 5) kinds. More text.
    """


def test_meanings_are_those_of_the_nearest_class() -> None:
    both = "two numbers, one after the other; not three. (Which one is first?)"
    assert meanings(Walk) == {
        "way": "How to go. `left` is quicker",
        "first": both,
        "second": both,
        "steps": "their number",
    }
    assert meanings(LongWalk)["steps"] == "of many (at least 4; or 5) kinds. More text"
    assert first_clause(meanings(LongWalk)["steps"]) == "of many (at least 4; or 5) kinds"
    assert first_clause("1e-5 in fla.") == "1e-5 in fla"
    text = describe_settings(Walk)
    # An option that the meaning does not name is listed.
    assert "How to go. `left` is quicker (of left, right)" in text
    assert "\n  silent=false" in text
    brief = describe_settings(LongWalk, brief=True, among=["steps"])
    assert re.fullmatch(r"  steps=3 {31}of many \(at least 4; or 5\) kinds", brief), brief


def _check(settings: Any) -> None:
    for key in keys_of(settings):
        assert key.meaning, f"{key.name} needs a line under Attributes: of its class"
        assert len(key.brief) <= WIDTH, f"{key.name}: its first clause is too long: {key.brief}"
        # More than a symbol.
        assert len(first_clause(key.meaning)) > 3, key.brief
        assert not re.search(r"\bNone\b", key.meaning), f"{key.name}: the command line says null"
        assert all(len(line) <= WIDTH or "=" in line for line in key.whole.splitlines()), key.whole


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_key_of_training_has_a_line(mixer: str) -> None:
    config = load_config([f"model.mixer={mixer}"])
    _check(config)
    # None is left out of those that the command line knows.
    known = _keys(OmegaConf.get_type(defaults_of(type(config.model))))
    leaves = {name for name in known if not any(other.startswith(f"{name}.") for other in known)}
    assert {key.name for key in keys_of(config) if ".N." not in key.name} == leaves


@pytest.mark.parametrize("name", SETTINGS)
def test_every_key_of_commands_has_a_line(name: str) -> None:
    schema = SETTINGS[name]
    _check(schema())
    assert {key.name for key in keys_of(schema())} >= {field.name for field in dataclasses.fields(schema)}


def test_overview_has_each_section_once_and_the_values_of_the_command_line() -> None:
    lines = describe(["train.steps=7", "data.seq_len=128"]).splitlines()
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default_factory):
            assert sum(line.startswith(f"{section.name}: ") for line in lines) == 1, section.name
    assert any(
        line.startswith("  train.steps=7 ") and line.endswith("  optimizer steps of the whole run") for line in lines
    )
    assert any(line.startswith("  data.seq_len=128 ") for line in lines)
    for name in ("auto", *METHODS):
        assert any(line.startswith(f"  sp.attention={name} ") for line in lines)


def test_a_section_or_key_is_explained_in_full() -> None:
    text = describe(["data", "data=synthetic"])
    assert "  data.kind=synthetic " in text
    assert "only answers count in the loss" in " ".join(text.split())
    assert "  data.synthetic.task=recall " in text
    assert "  data.stores.N.weight=1.0 " in text
    assert "data=embedded | mixture | synthetic" in text
    assert "train.steps" not in text
    assert describe(["model.attn.every"]).count("\n") == 0
    with pytest.raises(ConfigError) as found:
        describe(["dat"])
    assert found.value.field == "--help"
    assert "data" in str(found.value)


@pytest.mark.parametrize(
    ("main", "arguments", "shown"),
    [
        (plan.main, [], "  world_size="),
        (evaluate.main, [], "batch_tokens=16384"),
        # A shared setting stands once; one case is explained in full, with the settings that it shares.
        (bench.main, [], "  dims=[[64,128],[128,128]]  "),
        (bench.main, ["operator"], "Case operator:"),
    ],
)
def test_commands_print_their_settings(main: Any, arguments: list[str], shown: str) -> None:
    outcome = run_here(main, *arguments, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert shown in outcome.out
    assert main is not bench.main or outcome.out.count("  budget_seconds=") == 1
    assert arguments != ["operator"] or "Case decode" not in outcome.out


@pytest.mark.slow
def test_help_imports_nothing_that_only_training_needs() -> None:
    """They take as long as torch itself."""
    code = "import sys; from zeco_train.cli import main; main(['--help', 'data']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    heavy = {f"torch.distributed.{name}" for name in ("tensor", "checkpoint", "fsdp")}
    heavy |= {"sympy", "zeco_train.training.build"}
    assert "zeco_train.config.schema" in loaded
    assert not heavy & {*loaded}


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("name", MIXERS)
def test_mixers_are_explained_by_paper_layer_and_recurrence(name: str) -> None:
    text = describe(["model", f"model.mixer={name}"])
    explained = describe_mixer(name)
    assert text.startswith(explained)
    title, layer, recurrence = explained.split("\n\n")[0], explained.split("\n\n")[1], explained.split("\n\n")[-1]
    assert title.startswith(f"Mixer {name}: ")
    assert "arXiv" in title
    assert "\n    y " in layer
    # Each line of a layer stands once, also where a mixer replaces one of a base class.
    names = [line.partition(" = ")[0] for line in layer.splitlines()[1:]]
    assert len(set(names)) == len(names) or name in ("linear", "based", "rebased", "cosformer")
    assert "_{t-1}" in recurrence
    assert all(f"  model.{key.name}=" in text for key in keys_of(MIXERS[name].config_class(), among=["num_layers"]))
    assert all(mixer.title for mixer in LAYERS.values() if mixer in MIXERS.values())
