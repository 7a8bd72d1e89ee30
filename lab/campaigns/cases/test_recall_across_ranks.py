"""Training learns recall across ranks, which needs the states that cross ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY, TORCHRUN, Command
from tests.support.waiting import ENOUGH

pytestmark = pytest.mark.campaign

# The first stage of lab/recall.sh, in smaller batches.
STAGE = ["data.seq_len=16", "data.global_batch=32", "data.micro_batch=32", "train.steps=350"]
TASK = ["data.synthetic.facts=2", "data.synthetic.keys=2", "data.synthetic.queries=1"]
QUIET = ["train.eval_every=0", "train.eval_sequences=0", "checkpoint.every=0"]


def run_on_two_ranks(*command: str) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    with Command([*launcher, *command], REPOSITORY) as running:
        outcome = running.wait(4 * ENOUGH)
    assert outcome.code == 0, outcome


@pytest.mark.processes
def test_recall_across_ranks_depends_on_states(tmp_path: Path) -> None:
    run = f"run_dir={tmp_path}/run"
    run_on_two_ranks("train.py", "+experiment=gla_recall", run, *TASK, *STAGE, *QUIET)
    asked = ["recall.depths=0", "recall.examples=400", "recall.queries=1", "recall.zeroed=true"]
    command = ["-m", "zeco_train.evaluate", f"{tmp_path}/run", "--tasks", "recall", "--out", f"{tmp_path}/out"]
    run_on_two_ranks(*command, *asked)
    recall = json.loads((tmp_path / "out" / "results.json").read_bytes())["tasks"]["recall"]
    [[whole]], [[zeroed]] = recall["whole"]["accuracy"], recall["zeroed"]["accuracy"]
    assert whole > 0.9
    # Within four standard errors of chance.
    assert abs(zeroed - recall["chance"]) < 4 * (recall["chance"] / 400) ** 0.5
