"""Untrusted stored configurations: plain values of bounded size and depth, no environment variables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data.sources.hugging_face import load_recipe
from tests.support.commands import SMALL, Outcome, run_here, train_here
from zeco_train import export
from zeco_train.config.schema import load_config, read_config
from zeco_train.distributed.mesh import Device
from zeco_train.errors import ConfigError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.system.stored_values import flatten, read_values

SECRET = "hunter2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and its export."""
    run = tmp_path_factory.mktemp("stored") / "run"
    outcome = train_here(f"run_dir={run}", "train.steps=1", "checkpoint.every=1")
    assert outcome.code == 0, outcome.err
    assert run_here(export.main, str(run), str(run.with_name("out"))).code == 0
    return run, run.with_name("out")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZECO_TEST_SECRET", SECRET)


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _in_run(run: Path, *arguments: str) -> list[Outcome]:
    return [run_here(evaluate.main, str(run), *arguments), run_here(export.main, str(run), str(run.with_name("again")))]


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:ZECO_TEST_SECRET}",
        '"\\x24{seed}"',
        *(pytest.param(value, marks=pytest.mark.slow) for value in ("a${seed}", "${oc.env:HOME")),
    ],
)
def test_interpolation_in_run_configuration_is_refused(value: str, trained: tuple[Path, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run", symlinks=True))
    _change(run / "config.yaml", "name: default", f"name: {value}")
    shown = "${seed}" if value.startswith('"') else value
    problem = f"cannot be read as a run's configuration (name={shown}: stored configurations hold values, not"
    for outcome in _in_run(run):
        assert outcome.code == 2
        assert outcome.errors == [f"config.yaml={run / 'config.yaml'}: {problem} interpolations)"]
        assert SECRET not in outcome.out + outcome.err
    assert not (tmp_path / "again").exists()


def test_interpolation_in_export_is_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    out = Path(shutil.copytree(trained[1], tmp_path / "out"))
    origin = json.loads((out / "zeco_train.json").read_text())
    origin["config"]["logger"]["tags"] = ["a", "${oc.env:ZECO_TEST_SECRET}"]
    (out / "zeco_train.json").write_text(json.dumps(origin))
    outcome = run_here(evaluate.main, str(out))
    assert outcome.code == 4
    (error,) = outcome.errors
    assert error.startswith(f"{out / 'zeco_train.json'}: cannot be read: logger.tags.1=${{oc.env:ZECO_TEST_SECRET}}: ")
    assert SECRET not in outcome.out + outcome.err


def test_interpolation_in_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("dataset: ${oc.env:ZECO_TEST_SECRET}\n")
    with pytest.raises(ConfigError, match=r"dataset=\$\{oc\.env:ZECO_TEST_SECRET\}: stored configurations hold values"):
        load_recipe(str(tmp_path / "a.yaml"))


def test_start_resolves_interpolations_and_refuses_leftovers() -> None:
    """Interpolations are resolved before a run stores its values; a value that still has one is refused."""
    assert load_config(["name=${oc.env:ZECO_TEST_SECRET}"]).name == SECRET
    with pytest.raises(ConfigError, match=r"^name=a\$\{seed\}: stored configurations hold values, not inter"):
        load_config(["name='a\\${seed}'"])


def _bomb(levels: int = 12) -> str:
    lines = ["a0: &a0 [x, x]"]
    return "\n".join([*lines, *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels))])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_bomb(), r"has an alias \(\*a0\)"),
        ("a: &a {x: 1}\nb: {<<: *a}", r"has an alias \(\*a\)"),
        ("&a [*a]", r"has an alias \(\*a\)"),
        ("a: " + "[" * 100_000, "nested deeper than 32 levels"),
        ("a:\n" + "".join(" " * i + "a:\n" for i in range(1, 900)), "nested deeper than 32 levels"),
        ("a: !!python/object/apply:os.system ['exit 1']", "could not determine a constructor"),
        ("seed: 0x" + "f" * 1000, "seed is a number of more than 64 bits"),
        ("seed: " + "9" * 5000, "Exceeds the limit"),
        ("- 1", "not a mapping"),
        ("a: 1\na: 2", "duplicate key a"),
        ("a: [", "while parsing"),
        ("# " + "x" * (1 << 20), "larger than 1,048,576 bytes"),
    ],
)
def test_hostile_yaml_is_refused_with_one_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises((ValueError, OSError), match=problem) as raised:
        read_values(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"cannot be read as a run's configuration"):
        read_config(path)


def test_invalid_stored_model_is_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run", symlinks=True))
    _change(run / "config.yaml", "num_heads: 2", "num_heads: 0")
    for outcome in _in_run(run):
        assert outcome.code == 2
        assert "(model.num_heads=0: must be a whole number ≥ 1)" in outcome.errors[0]


def test_stored_configuration_is_read_back(trained: tuple[Path, Path]) -> None:
    """With the device, the split and the rule of labels that the run has chosen itself."""
    config = read_config(trained[0] / "config.yaml")
    assert config.train.device is not Device.auto
    found = ["sp.size=1", f"train.device={config.train.device.value}", "data.labels_across_documents=true"]
    assert config == load_config([*SMALL, f"run_dir={trained[0]}", "train.steps=1", "checkpoint.every=1", *found])


def test_flattened_lists_have_a_key_an_item() -> None:
    nested = {"data": {"stores": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]}, "seed": 0}
    assert list(flatten(nested)) == [
        ("data.stores.0.path", "a"),
        ("data.stores.0.weight", 1.0),
        ("data.stores.1.path", "b"),
        ("data.stores.1.weight", 2.0),
        ("seed", 0),
    ]
    assert dict(flatten(nested, lists=False)) == {"data.stores": nested["data"]["stores"], "seed": 0}  # type: ignore[index]
