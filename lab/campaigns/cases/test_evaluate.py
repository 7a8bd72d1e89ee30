"""Tasks of lm_eval, and an export's tokenizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from data import prepare
from tests.data.test_prepare import hugging_face
from tests.evaluate.test_evaluate import (
    evaluate,
    results,
    run,
)
from tests.support.commands import REPOSITORY, TORCHRUN, Command, check_line, run_here, train_here
from tests.support.stores import write_lines
from zeco_train import export

pytestmark = pytest.mark.campaign
# Fixtures.
__all__ = ["hugging_face", "run"]


needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")


# Common part of lm_eval tasks on a local file; FILE is replaced by its path.
DATA = """
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
metadata: {version: 1.0}
"""


TASKS = {
    "zeco_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    # An empty context: leading blanks belong to the answer.
    "zeco_blank": """
output_type: multiple_choice
doc_to_text: " "
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "zeco_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
    "zeco_reply": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["|"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def test_export_is_evaluated_with_its_tokenizer_only(hugging_face: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "export"
    source = write_lines(tmp_path / "text.jsonl", [{"text": "w5 w7 " * 100} for _ in range(4)])
    prepared = ["--tokenizer", str(hugging_face / "whole"), "--validation-fraction", "0.5", "--out", str(store)]
    assert prepare.main([str(source), *prepared]) == 0
    model = ("model.vocab_size=70003", "model.hidden_size=8", f"run_dir={tmp_path / 'run'}", "train.steps=1")
    assert train_here("data=tokens", f"data.path={store}", *model).code == 0
    assert run_here(export.main, str(tmp_path / "run"), str(out)).code == 0
    assert evaluate(out, "--out", tmp_path / "results").code == 0
    tokenizer = out / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("w9999", "v9999"))
    check_line(evaluate(out), 3, "its tokenizer is {'kind': 'huggingface', 'sha256': ", "the model's is")


def write_tasks(folder: Path) -> Path:
    """Write tasks on texts of several lengths; the model need not answer correctly."""
    rows = [
        {
            "question": "def f(x):\n" * (1 + 7 * n),
            "choices": ["    return x\n", "§", "\n\n"],
            "answer": n % 3,
            "reply": "?",
        }
        for n in range(5)
    ]
    path = write_lines(folder / "rows.jsonl", rows)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{text}{DATA.replace('FILE', str(path))}")
    return folder


@pytest.mark.processes
@needs_lm_eval
def test_lm_eval_scores_equal_on_one_and_two_ranks(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    tasks = [f"--tasks=validation,{','.join(TASKS)}", f"lm_eval.include_path={write_tasks(tmp_path / 'tasks')}"]
    outcome = evaluate(run, *tasks, "--out", tmp_path / "one")
    assert outcome.code == 0, outcome
    for name in TASKS:
        assert f"  {name} " in outcome.out
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    split = ["sp=zeco", "sp.size=2", "parallel=zero3", "lm_eval.batch_tokens=32", "--out", str(tmp_path / "two")]
    with Command([*launcher, "-m", "zeco_train.evaluate", str(run), *tasks, *split], REPOSITORY) as command:
        assert command.wait().code == 0, command.err
    one, two = (results(tmp_path / name)["tasks"] for name in ("one", "two"))
    assert set(one["lm_eval"]["metrics"]) == {
        "zeco_choice/acc",
        "zeco_blank/acc",
        "zeco_text/bits_per_byte",
        "zeco_reply/exact_match",
    }
    for task in ("validation", "lm_eval"):
        assert two[task]["metrics"] == pytest.approx(one[task]["metrics"], rel=1e-9)
    assert one["lm_eval"]["n-samples"]["zeco_choice"] == {"original": 5, "effective": 5}


@needs_lm_eval
def test_unknown_lm_eval_task_or_missing_data_is_reported(run: Path, tmp_path: Path) -> None:
    check_line(evaluate(run, "--tasks=hellaswagg"), 2, "--tasks=hellaswagg", "did you mean", "hellaswag")
    write_tasks(tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    own = f"lm_eval.include_path={tmp_path}"
    check_line(evaluate(run, "--tasks=zeco_choice", own), 3, "--tasks zeco_choice: lm_eval: ", "rows.jsonl")
