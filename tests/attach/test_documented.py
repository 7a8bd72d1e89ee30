"""The examples of docs/attach.md, as they stand there: ranks train as one does."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.data.test_tokenizer import byte_pairs, folder_of
from tests.support.attach_models import save
from tests.support.commands import REPOSITORY
from tests.support.distributed import run_distributed

PAGE = REPOSITORY / "docs" / "attach.md"
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE.read_text(), re.S | re.M))
LOGGED = re.compile(r"'(?:loss|eval_loss|grad_norm)': '?([\d.]+)|(?:loss|norm) ([\d.]+)")


def printed(rank: int, size: int, name: str, folder: str) -> list[float]:
    """Losses and norms that an example prints on the first rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="1", HF_HUB_OFFLINE="1")
    out = io.StringIO()
    code = compile(EXAMPLES[name], f"{name}.py", "exec")
    # The ranks of a test have their group.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", [name, folder, f"{folder}/out"]),
        contextlib.redirect_stdout(out),
    ):
        exec(code, {"__name__": "__main__"})
    return [float(a or b) for a, b in LOGGED.findall(out.getvalue())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = folder_of(byte_pairs(), tmp_path_factory.mktemp("of") / "model", pad_token="<unk>")
    layers = ["linear_attention", "full_attention", "linear_attention"]
    changes: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": layers, "vocab_size": 340}
    run_distributed(save, 1, "qwen3_5", changes, str(folder))
    return str(folder)


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "ranks"), [("loop", 2), ("replicas", 4), ("trainer", 2), ("sft", 2)])
def test_an_example_trains_over_ranks_as_on_one(name: str, ranks: int, model: str) -> None:
    alone, over = ([*map(float, run_distributed(printed, size, name, model)[0])] for size in (1, ranks))
    assert len(alone) >= 3, alone
    assert over == pytest.approx(alone, rel=2e-4)
