"""Stores, checkpoints and exports written by earlier versions are read, and continue with the same losses.

`fixtures/commit_4117173.tar.gz` holds a run of four steps (fp64, two ranks, zeco as a chain, zero3, two segments), its
export, and that commit's losses and gradient norms: of steps 5 to 7, and of a new run from the export.
`fixtures/v0_2` holds the same of version 0.2.0 with zero2, with the token store that the run read.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from data.store import TokenStore
from tests.support.commands import Outcome, run_here
from zeco_train import cli
from zeco_train.evaluate import command as evaluate
from zeco_train.generate import command as generate
from zeco_train.tracking.metrics import read_metrics

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODEL = [
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.num_heads=2",
    "model.intermediate_size=16",
    "train.dtype=fp64",
    "train.log_every=1",
    "train.eval_sequences=2",
    "sched=constant",
    "sched.warmup_steps=2",
]
SETTINGS = [*MODEL, "data=synthetic", "data.seq_len=64", "data.global_batch=2"]


def extract(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / name) as archive:
        # Python 3.11.2, which is Debian's, has no filters; the file is the project's own.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return extract("commit_4117173.tar.gz", tmp_path)


@pytest.fixture(scope="module")
def version_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract("v0_2/v0_2.tar.xz", tmp_path_factory.mktemp("v0_2"))


def expected_of(folder: Path, key: str) -> Any:
    return json.loads((folder / "expected.json").read_text())[key]


def check(outcome: Outcome, run: Path, expected: dict[str, list[float]]) -> None:
    assert outcome.code == 0, outcome.err
    rows = {row["step"]: row for row in read_metrics(run / "metrics.jsonl")}
    for step, (loss, norm) in expected.items():
        # One rank and another machine: the tolerance between splits. On two ranks of one machine it is bit-identical.
        assert rows[int(step)]["loss"] == pytest.approx(loss, rel=1e-9)
        assert rows[int(step)]["grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_run_of_earlier_version_resumes(earlier: Path) -> None:
    run, expected = earlier / "run", expected_of(earlier, "resumed")
    outcome = run_here(cli.main, *SETTINGS, f"run_dir={run}", "name=run", "train.steps=7", "train.segments=2")
    check(outcome, run, expected)
    assert "from step 4" in outcome.out + outcome.err + (run / "logs" / "rank_0.log").read_text()


def test_export_of_earlier_version_starts_new_run(earlier: Path) -> None:
    run, expected = earlier / "new", expected_of(earlier, "continued")
    load = [f"run_dir={run}", "name=on", "train.steps=3", f"checkpoint.load=hf:{earlier / 'export'}"]
    check(run_here(cli.main, *SETTINGS, *load), run, expected)


@pytest.mark.parametrize("name", ["store", "store/validation"])
def test_store_of_version_0_2_has_its_ids_and_documents(name: str, version_2: Path) -> None:
    store, expected = TokenStore.open(version_2 / name), expected_of(version_2, name)
    ids, offsets = store.read(0, store.meta.num_tokens).tolist(), store.doc_offsets.tolist()
    assert (len(ids), len(offsets) - 1, ids[:16]) == (expected["tokens"], expected["documents"], expected["first"])
    assert hashlib.sha256(json.dumps([ids, offsets]).encode()).hexdigest() == expected["sha256"]


def test_run_of_version_0_2_resumes_on_one_rank(version_2: Path) -> None:
    run = version_2 / "run"
    data = ["data=tokens", f"data.path={version_2 / 'store'}", "data.seq_len=96", "data.global_batch=2"]
    settings = [*MODEL, *data, "data.reset_state_at_document=true", "model.vocab_size=128", "optim.lr=0.03"]
    outcome = run_here(cli.main, *settings, f"run_dir={run}", "name=run", "parallel=zero2", "train.steps=7")
    check(outcome, run, expected_of(version_2, "resumed"))
    assert "from step 4" in (run / "logs" / "rank_0.log").read_text()


def test_export_of_version_0_2_gives_its_losses(version_2: Path, tmp_path: Path) -> None:
    data = ["data=tokens", f"data.path={version_2 / 'store'}", "data.seq_len=96", "data.reset_state_at_document=true"]
    export, out = str(version_2 / "export"), tmp_path / "out"
    outcome = run_here(evaluate.main, export, *data, "train.dtype=fp64", "--out", str(out))
    assert outcome.code == 0, outcome.err
    found = json.loads((out / "results.json").read_text())["tasks"]["validation"]["lengths"]["96"]
    expected = expected_of(version_2, "evaluated")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert found["by_position"]["losses"] == pytest.approx(expected["by_position"]["losses"], rel=1e-9)


@pytest.mark.parametrize("model", ["run/checkpoints/step_00000004", "export"])
def test_models_of_version_0_2_write_its_text(model: str, version_2: Path, tmp_path: Path) -> None:
    expected, out = expected_of(version_2, "generated"), tmp_path / "out.json"
    options = ["--prompt", expected["prompt"], "--seed", "1", "--max-tokens", "24", "--ignore-eos", "--json", str(out)]
    outcome = run_here(generate.main, str(version_2 / model), *options, "train.dtype=fp64")
    assert outcome.code == 0, outcome.err
    assert json.loads(out.read_text())["completions"] == [expected]


def test_transformers_load_an_export_of_version_0_2(version_2: Path) -> None:
    import fla  # noqa: F401 - registers fla's models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, report = AutoModelForCausalLM.from_pretrained(version_2 / "export", output_loading_info=True)
    assert not any(report.values()), report
    written = expected_of(version_2, "generated")
    tokenizer = AutoTokenizer.from_pretrained(version_2 / "export")
    assert tokenizer.decode(written["tokens"]).split() == written["text"].split()
