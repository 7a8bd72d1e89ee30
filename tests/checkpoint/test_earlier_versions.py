"""Token stores and exports of version 0.2 are read; its runs, and files of later versions, are refused in one line.

`fixtures/v0_2` holds a run of four steps of version 0.2.0 (fp64, two ranks, zeco, zero2), its export, the token store
that it read, and what that version computed from them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.store import TokenStore
from tests.checkpoint.test_hostile_checkpoint import COMMANDS, Command, _evaluate, _resume
from tests.support.commands import run_here, snapshot, train_here
from zeco_train import cli, compare, export
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.generate import __main__ as generate

FIXTURE = Path(__file__).parents[1] / "fixtures" / "v0_2" / "v0_2.tar.xz"
MODEL = [
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.num_heads=2",
    "model.intermediate_size=16",
    "model.vocab_size=128",
    "train.dtype=fp64",
]


@pytest.fixture(scope="module")
def version_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v0_2")
    with tarfile.open(FIXTURE) as archive:
        # Python 3.11.2, which is Debian's, has no filters; the file is the project's own.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


def expected_of(folder: Path, key: str) -> Any:
    return json.loads((folder / "expected.json").read_text())[key]


def data_of(version_2: Path) -> list[str]:
    return ["data=tokens", f"data.path={version_2 / 'store'}", "data.seq_len=96", "data.reset_state_at_document=true"]


@pytest.mark.parametrize("name", ["store", "store/validation"])
def test_store_of_version_0_2_has_its_ids_and_documents(name: str, version_2: Path) -> None:
    store, expected = TokenStore.open(version_2 / name), expected_of(version_2, name)
    ids, offsets = store.read(0, store.meta.num_tokens).tolist(), store.doc_offsets.tolist()
    assert (len(ids), len(offsets) - 1, ids[:16]) == (expected["tokens"], expected["documents"], expected["first"])
    assert hashlib.sha256(json.dumps([ids, offsets]).encode()).hexdigest() == expected["sha256"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_run_of_version_0_2_is_refused_with_the_way_on(command: Command, version_2: Path, tmp_path: Path) -> None:
    run, before = version_2 / "run", snapshot(version_2)
    for at in [run] if command is _resume else [run, run / "checkpoints" / "step_00000004"]:
        outcome = command(at, tmp_path / "out")
        (line,) = outcome.errors
        assert outcome.code == 4
        assert "version 0.2" in line
        assert "checkpoint.load=hf:OUT" in line
    assert snapshot(version_2) == before
    assert not (tmp_path / "out").exists()


def test_metrics_of_version_0_2_are_compared(version_2: Path, tmp_path: Path) -> None:
    """A table of steps needs no more than them."""
    again = shutil.copytree(version_2 / "run", tmp_path / "again")
    assert compare.main([str(version_2 / "run"), str(again), "--out", str(tmp_path)]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this version, with an export beside it."""
    folder = tmp_path_factory.mktemp("run")
    assert train_here(f"run_dir={folder / 'run'}", "train.steps=1").code == 0
    assert export.main([str(folder / "run"), str(folder / "export")]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "file", ["run/identity.json", "run/checkpoints/step_00000001/run.json", "export/zeco_train.json"]
)
def test_files_have_numbers_and_those_of_later_versions_are_refused(file: str, run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "folder", symlinks=True)
    stored = json.loads((folder / file).read_text())
    assert stored["format"] == (1 if file.startswith("export") else 2)
    for number in (3, "new", None, [2]):
        (folder / file).write_text(json.dumps({**stored, "format": number}))
        if file == "run/identity.json":
            outcome = train_here(f"run_dir={folder / 'run'}", "train.steps=2")
        else:
            outcome = _evaluate(folder / file.partition("/")[0], tmp_path / "out")
        (line,) = outcome.errors
        assert f"format {number}" in line
        assert outcome.code == 4


@pytest.mark.slow
def test_export_of_version_0_2_gives_its_losses(version_2: Path, tmp_path: Path) -> None:
    """With settings in it that this version has no more."""
    folder, out = shutil.copytree(version_2 / "export", tmp_path / "export"), tmp_path / "out"
    origin = json.loads((folder / "zeco_train.json").read_text())
    origin["config"]["data"]["former"] = origin["config"]["former"] = {"key": 1}
    (folder / "zeco_train.json").write_text(json.dumps(origin))
    outcome = run_here(evaluate.main, str(folder), *data_of(version_2), "train.dtype=fp64", "--out", str(out))
    assert outcome.code == 0, outcome.err
    results = json.loads((out / "results.json").read_text())
    found, expected = results["tasks"]["validation"]["lengths"]["96"], expected_of(version_2, "evaluated")
    assert results["format"] == 1
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert found["by_position"]["losses"] == pytest.approx(expected["by_position"]["losses"], rel=1e-9)


@pytest.mark.slow
def test_run_goes_on_from_an_export_of_version_0_2(version_2: Path, tmp_path: Path) -> None:
    """By a step that changes nothing, and an export: the same weights."""
    load = [f"checkpoint.load=hf:{version_2 / 'export'}", "optim.lr=1e-30", "optim.weight_decay=0", "train.steps=1"]
    outcome = run_here(cli.main, *MODEL, *data_of(version_2), *load, f"run_dir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.err
    assert export.main([str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    first, again = (load_file(folder / "export" / "model.safetensors") for folder in (version_2, tmp_path))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_export_of_version_0_2_writes_its_text(version_2: Path, tmp_path: Path) -> None:
    expected, out = expected_of(version_2, "generated"), tmp_path / "out.json"
    options = ["--prompt", expected["prompt"], "--seed", "1", "--max-tokens", "24", "--ignore-eos", "--json", str(out)]
    outcome = run_here(generate.main, str(version_2 / "export"), *options, "train.dtype=fp64")
    assert outcome.code == 0, outcome.err
    assert json.loads(out.read_text())["completions"] == [expected]


@pytest.mark.slow
def test_transformers_load_an_export_of_version_0_2(version_2: Path) -> None:
    import fla  # noqa: F401 - registers fla's models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, report = AutoModelForCausalLM.from_pretrained(version_2 / "export", output_loading_info=True)
    assert not any(report.values()), report
    written = expected_of(version_2, "generated")
    tokenizer = AutoTokenizer.from_pretrained(version_2 / "export")
    assert tokenizer.decode(written["tokens"]).split() == written["text"].split()
