"""What `train`, `generate` and `evaluate` import, and the campaign that measures their starts and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.campaigns import start_marks
from lab.campaigns.start_times import COMMANDS, STEPS, _add_end, measure, table
from tests.support.commands import REPOSITORY, SMALL

# Of the large packages those that a command needs on a CPU with the byte tokenizer, without a tracker: matplotlib's
# pictures of a run, and of a loss by position. What is compiled needs Dynamo, which torch imports for custom ops, too.
NEEDED = {"torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"}
NEEDED |= {"numpy", "hydra", "sympy", "triton"}
IMPORTED = {"train": NEEDED | {"matplotlib"}, "generate": NEEDED, "evaluate": NEEDED | {"matplotlib"}}


@pytest.mark.slow
@pytest.mark.processes
def test_commands_import_what_they_use_and_their_moments_are_measured(tmp_path: Path) -> None:
    settings = [*SMALL, "train.device=cpu", "data.validation_fraction=0.01"]
    found = measure(REPOSITORY, COMMANDS, ["warm"], settings, 200.0, tmp_path)
    assert {key: done.code for key, done in found.items()} == {(command, "warm"): 0 for command in COMMANDS}
    for command in COMMANDS:
        durations = found[command, "warm"].durations
        imported = {name for name in start_marks.LARGE if f"import {name} (s)" in durations}
        assert imported <= IMPORTED[command], command
    train = found["train", "warm"]
    _add_end(train, tmp_path, 2, {})
    order = ["Python runs", "building the model", "first output", "step 2: its line", f"step {STEPS}: its line", "exit"]
    moments = [train.moments[label] for label in order]
    assert moments == sorted(moments)
    assert train.durations["bytes of the checkpoint (GB)"] > 0
    assert train.durations["end - last step (s)"] > train.durations["end beyond the disk (s)"]
    assert all(label in table({"this": train}) for label in (*order, "end beyond the disk (s)"))
    # Nothing is left, whatever the size of the checkpoint.
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "caches").exists()
