"""Tests that need GPUs (CI has none; the last results are in `tests/gpu_results.md`).

The trainer on NCCL against the same run on one CPU, and our model against fla's with its Triton kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.mixers.gla import GLAConfig
from models.spec import ModelSpec
from tests.support.commands import check_line, run_here, train_here
from tests.support.distributed import run_distributed
from tests.support.training import largest_difference, train
from zeco_train.generate import __main__ as generate
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

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


@pytest.mark.parametrize(
    ("dtype", "ours_from_exact", "ours_from_fla"),
    # fla's kernels multiply fp32 in tf32 (10 bits of mantissa), whatever torch's setting; ours do not.
    [(torch.float32, 1e-5, 2e-3), (torch.bfloat16, 1.5e-2, 2e-2)],
    ids=["fp32", "bf16"],
)
def test_logits_equal_fla(dtype: torch.dtype, ours_from_exact: float, ours_from_fla: float) -> None:
    fla = pytest.importorskip("fla.models")
    torch.backends.cuda.matmul.allow_tf32 = False
    config = GLAConfig(vocab_size=512, hidden_size=512, num_layers=2, num_heads=4, intermediate_size=1024)
    model = ModelSpec(config).build()
    model.init_weights(0)
    theirs = fla.GLAForCausalLM(
        fla.GLAConfig(
            vocab_size=512,
            hidden_size=512,
            num_hidden_layers=2,
            num_heads=4,
            intermediate_size=1024,
            norm_eps=config.norm_eps,
            fuse_cross_entropy=False,
            attn_mode="chunk",
            tie_word_embeddings=False,
        )
    )
    assert not any(theirs.load_state_dict(model.state_dict(), strict=True))
    tokens, shard = torch.randint(512, (1, 1024), generator=torch.Generator().manual_seed(0)), _whole(1024)
    with torch.no_grad():
        # Round the weights first, so that all three models have the same.
        exact = model.to(dtype).double()(tokens, shard)
        ours = model.to("cuda", dtype)(tokens.cuda(), shard).double().cpu()
        fla_logits = theirs.to("cuda", dtype)(tokens.cuda()).logits.double().cpu()
    errors = {
        "ours from fp64": _relative(ours, exact),
        "fla's from fp64": _relative(fla_logits, exact),
        "ours from fla's": _relative(ours, fla_logits),
    }
    print(dtype, {name: f"{error:.1e}" for name, error in errors.items()})
    assert errors["ours from fp64"] <= ours_from_exact
    assert errors["ours from fp64"] <= 1.1 * errors["fla's from fp64"]
    assert errors["ours from fla's"] <= ours_from_fla


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


def _whole(seq_len: int) -> SequencePosition:
    return SequencePosition((0, seq_len), exchange=local_exchange())


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()
