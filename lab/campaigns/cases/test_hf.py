"""Weights of runs and of exports of hybrids on any split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.test_export import exported, run
from tests.hf.test_transformers_models import random_folder
from tests.support.distributed import run_distributed
from tests.support.model_card import run_snippet
from tests.support.training import full, train
from zeco_train.distributed.config import Strategy
from zeco_train.errors import CheckpointError
from zeco_train.hf.folder import WEIGHTS_FILE
from zeco_train.hf.parity import HEADER, ParitySettings, compare, line
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

# Fixtures.
__all__ = ["exported", "run"]
pytestmark = pytest.mark.campaign


LAYOUTS = [(Strategy.zero3, Dtype.fp64), (Strategy.ddp, Dtype.fp64), (Strategy.zero2, Dtype.bf16)]


def _train(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    tied = ["model.tie_word_embeddings=true", "train.dtype=fp64", "parallel.strategy=zero3"]
    return train(rank, world_size, folder, *tied, "train.steps=2", "checkpoint.keep=1")["parameters"]


def _load(rank: int, world_size: int, folder: str) -> list[dict[str, torch.Tensor]]:
    trained = find_trained(folder)
    config = trained.configure(["train.eval_sequences=1"])
    mesh = join_ranks(config, Launch(rank, world_size, rank))
    loaded = []
    for strategy, dtype in LAYOUTS:
        model = load_trained(trained, mesh, dtype=dtype, strategy=strategy)
        assert not model.training
        assert model.lm_head.weight is model.model.embeddings.weight
        loaded.append({name: full(parameter).clone() for name, parameter in model.named_parameters()})
    with (trained.path / "__0_0.distcp").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"damaged: __0_0.distcp is not what was written"):
        load_trained(trained, mesh, dtype=Dtype.fp64, strategy=Strategy.ddp)
    return loaded


def test_weights_load_on_other_splits(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    expected = run_distributed(_train, 2, run)[0]
    for loaded in run_distributed(_load, 3, run):
        for (_, dtype), found in zip(LAYOUTS, loaded, strict=True):
            assert found.keys() == expected.keys()
            for name, parameter in found.items():
                assert torch.equal(parameter, expected[name].to(dtype.compute)), (name, dtype)


def _loaded(rank: int, world_size: int, folder: str) -> list[dict[str, Tensor]]:
    trained = find_trained(folder)
    mesh = join_ranks(trained.configure(["data.seq_len=63", "train.dtype=fp32"]), Launch(rank, world_size, rank))
    strategies = Strategy.zero3, Strategy.hsdp
    models = [load_trained(trained, mesh, dtype=Dtype.fp32, strategy=strategy) for strategy in strategies]
    return [{name: full(p).clone() for name, p in model.named_parameters()} for model in models]


@pytest.mark.parametrize("kind", ["olmo_hybrid", "qwen3_5_text"])
def test_joined_rows_are_read_on_any_split(kind: str, tmp_path: Path) -> None:
    """On 3 ranks, whose shards end inside queries, keys and values."""
    own = random_folder(kind, folder := tmp_path / "folder")
    if kind == "olmo_hybrid":
        # As `save_pretrained` cuts the convolution's rows and names norms.
        stored, renamed = load_file(folder / WEIGHTS_FILE), {}
        for name, tensor in stored.items():
            renamed[name.replace("layers.3.post_attention_layernorm", "layers.3.feedforward_layer_norm")] = tensor
        for layer in range(3):
            names = [f"model.layers.{layer}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
            rows = torch.cat([stored[name] for name in names])
            renamed |= dict(zip(names, (x.clone() for x in rows.chunk(3)), strict=True))
        save_file(renamed, folder / WEIGHTS_FILE)
    for of_rank in run_distributed(_loaded, 3, str(folder)):
        for parameters in of_rank:
            assert parameters.keys() == own.keys()
            assert all(torch.equal(tensor, own[name]) for name, tensor in parameters.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
def test_fla_agrees_with_export_on_gpu(exported: Path, dtype: Dtype) -> None:
    """Takes minutes until fla has tuned its kernels for these shapes; fp32 needs TRITON_F32_DEFAULT=ieee."""
    trained = find_trained(str(exported))
    mesh = join_ranks(trained.configure([]), Launch(0, 1, 0))
    (found,) = compare(trained, mesh, ParitySettings(tokens=1000), [dtype])
    dist.destroy_process_group()
    print(HEADER, line(found), sep="\n")
    assert found.passes
    assert run_snippet(exported).startswith("Once")
