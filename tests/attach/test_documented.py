"""The examples of docs/attach.md, as they stand there: ranks train as one does."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.data.test_tokenizer import byte_pairs, folder_of
from tests.support.attach_models import InDouble, build, hide_fla, make_batch, save
from tests.support.commands import REPOSITORY
from tests.support.distributed import on_ranks, run_distributed

PAGE = REPOSITORY / "docs" / "attach.md"
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE.read_text(), re.S | re.M))
LOGGED = re.compile(r"'(?:loss|eval_loss|grad_norm)': '?([\d.]+)|(?:loss|norm) ([\d.]+)")


def printed(rank: int, size: int, name: str, folder: str) -> list[float]:
    """Losses and norms that an example prints on the first rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="1", HF_HUB_OFFLINE="1")
    hide_fla()
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


@pytest.mark.numeric
@on_ranks(2)
def test_torchtitans_step_by_its_parallelize_function(rank: int, size: int) -> None:
    """Its trainer's contract at commit b5bcd76: slices, positions, a loss that is a sum, gradients that add up."""
    hide_fla()
    model = build("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    names = [*model.state_dict()]
    ids, labels = (x[:, :96] for x in make_batch(1, 97).values())
    positions = torch.cat([torch.arange(30), torch.arange(66)])[None]
    valid, own = (labels != -100).sum(), slice(48 * rank, 48 * rank + 48)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid

    with InDouble():
        logits = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split([30, 66], 1)], 1)
        loss_of(logits, labels).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    example: dict[str, Any] = {}
    exec(compile(EXAMPLES["titan"], "titan.py", "exec"), example)
    settings = dict.fromkeys(("training", "parallelism", "compile_config", "ac_config", "dump_folder"))
    forward = example["parallelize"](model, parallel_dims=SimpleNamespace(get_mesh=lambda _: mesh), **settings)
    assert [*model.state_dict()] == names
    with InDouble():
        loss_of(forward(ids[:, own], positions=positions[:, own]), labels[:, own]).backward()
    largest = max(float(grad.norm()) for grad in wanted.values())
    for name, parameter in model.named_parameters():
        error = (parameter.grad.full_tensor() - wanted[name]).norm()
        assert error <= 1e-12 * max(float(wanted[name].norm()), 1e-3 * largest), (name, error)
