"""The page and the notebook "From Python" run as they stand."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from data import prepare
from tests.support.commands import REPOSITORY, run_here
from tests.support.notebook import code_cells
from zeco_train import cli
from zeco_train.tracking import recorder

DOCS = REPOSITORY / "docs"


@pytest.mark.slow
def test_code_of_the_page_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(run)
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    monkeypatch.chdir(tmp_path)
    assert run_here(prepare.main, "text.txt", "--out", "store").code == 0
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", (DOCS / "from_python.md").read_text(), re.S | re.M):
        if "init_process_group() before" in block:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        exec(compile(block, "from_python.md", "exec"), names)
    dist.destroy_process_group()
    assert len(names["ids"]) == 4096
    assert names["logits"].shape == (1, 10, 259)
    assert names["layer"].ranks.size == 1


def test_outputs_are_those_of_a_run() -> None:
    cells = code_cells(json.loads((DOCS / "from_python.ipynb").read_text(encoding="utf-8")))
    for cell in cells:
        prints = "print(" in "".join(cell["source"])
        assert [output["output_type"] for output in cell["outputs"]] == ["stream"] * prints
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: its training, too, a command of its own."""
    monkeypatch.chdir(tmp_path)
    run = subprocess.run

    def train(command: list[str], **options: Any) -> Any:
        if command[1:4] != ["-m", "zeco_train", "train"]:
            return run(command, **options)
        with mock.patch.multiple(recorder, plot_run=mock.DEFAULT, plot_validations=mock.DEFAULT):
            done = run_here(cli.main, *command[4:])
        return subprocess.CompletedProcess(command, done.code, done.out, done.err)

    monkeypatch.setattr(subprocess, "run", train)
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in code_cells(json.loads((DOCS / "from_python.ipynb").read_text(encoding="utf-8"))):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), "from_python.ipynb", "exec"), names)
        stored = "".join("".join(output["text"]) for output in cell["outputs"])
        # Losses and texts differ between processors, in the last digit and after it.
        assert bool(out.getvalue()) == bool(stored)
        if "True" in stored or "torch" in stored:
            assert out.getvalue() == stored
