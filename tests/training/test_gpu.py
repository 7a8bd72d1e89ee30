"""Tests that need GPUs (CI has none; the last results are in `tests/gpu_results.md`).

The trainer on NCCL against the same run on one CPU; `hf/test_export.py` has fla with its kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import check_line, run_here, train_here
from tests.support.distributed import run_distributed
from tests.support.training import largest_difference, train
from zeco_train.generate import __main__ as generate

pytestmark = pytest.mark.gpu

BACKEND = "cpu:gloo,cuda:nccl"
STEPS = ["train.steps=5", "checkpoint.every=0", "train.dtype=fp64"]
SPLITS = {
    "dp": ["sp=dp", "parallel=zero3"],
    "lasp1": ["sp=lasp1", "parallel=ddp"],
    "lasp2": ["sp=lasp2", "parallel=zero2"],
    "zeco": ["sp=zeco", "parallel=hsdp"],
    **{
        f"zeco {algorithm} {transport}": [
            "sp=zeco",
            f"sp.all_scan.algorithm={algorithm}",
            f"sp.all_scan.transport={transport}",
            "parallel=zero3",
        ]
        for algorithm in ("chain", "two_shot")
        for transport in ("p2p", "symmetric")
    },
}


def _on_cpu(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return train(rank, world_size, folder, "sp=dp", "train.device=cpu", *STEPS)


def _on_gpus(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    names = SPLITS if world_size > 1 else ["dp"]
    results = {}
    for name in names:
        result = train(rank, world_size, f"{folder}/{name}", *SPLITS[name], *STEPS)
        results[name] = {"rows": result["rows"]}
    results["bf16"] = {"rows": train(rank, world_size, f"{folder}/bf16", "train.steps=3", "train.dtype=bf16")["rows"]}
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_on_gpus_equals_one_cpu(tmp_path: Path, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    expected = run_distributed(_on_cpu, 1, str(tmp_path / "cpu"))[0]["rows"]
    runs = run_distributed(_on_gpus, world_size, str(tmp_path / "gpu"), backend=BACKEND)[0]
    for name, run in runs.items():
        if name == "bf16":
            # 8 bits in each activation; the mean over 3,072 tokens is closer than one of them.
            assert abs(run["rows"][0]["loss"] - expected[0]["loss"]) <= 4e-3 * expected[0]["loss"]
            continue
        for key in ("loss", "grad_norm", "val_loss"):
            difference = largest_difference(run["rows"], expected, key)
            print(f"{world_size} GPUs, {name}: {key} differs by {difference:.1e}")
            assert difference <= 1e-9, (name, key)
        assert run["rows"][-1]["memory_gb"] > 0


def test_slow_paths_are_warned_of_once_and_refused_on_request(tmp_path: Path) -> None:
    """Heads of V 288, which the kernels of fixed decays do not serve, and steps, which have none."""
    heads = ["model.hidden_size=288", "model.num_heads=1", "model.expand_k=0.5", "model.expand_v=1"]
    model = ["model.mixer=retnet", *heads, "model.num_layers=2"]
    settings = [*model, "train.dtype=bf16", "train.steps=2", f"run_dir='{tmp_path / 'run'}'"]
    path = "layers 0 to 1 (retnet): fixed_decay of K 144, V 288 in bf16"
    check_line(train_here(*settings, "train.kernels=require"), 2, f"train.kernels=require: {path}: head dims")
    assert not (tmp_path / "run").exists()
    trained = train_here(*settings)
    assert trained.code == 0, trained
    assert trained.err.count(f"warning: {path} runs in PyTorch") == 1
    texts = [str(tmp_path / "run"), "--prompt", "a", "--max-tokens", "2"]
    check_line(run_here(generate.main, *texts, "train.kernels=require"), 2, f"train.kernels=require: {path}")
    # Whatever kernels serve is not refused.
    served = ["train.dtype=bf16", "train.steps=1", f"run_dir='{tmp_path / 'served'}'", "train.kernels=require"]
    found = train_here(*served)
    assert found.code == 0, found
    assert "in PyTorch" not in found.err
