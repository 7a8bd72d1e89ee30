"""Kernels compiled in a thread while the model is built: what the thread runs, and that it disturbs nothing."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from models.mixer_registry import MIXERS
from zeco_train.config.schema import load_config
from zeco_train.ops.linear import Matmul
from zeco_train.training import kernels_ahead
from zeco_train.training.config import Dtype, TrainConfig

CPU = torch.device("cpu")


def _operators(name: str, documents: bool, matmul: Matmul = Matmul.bf16, **more: str) -> list[str]:
    """The operators that were launched, forward and backward, for a tiny model."""
    config = load_config([f"model={name}", *(f"{key}={value}" for key, value in more.items())])
    train = TrainConfig(dtype=Dtype.fp32, matmul=matmul)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kernels_ahead.run_blocks(config.model, train, (1, 96), documents, CPU)
    return sorted({event.name for event in profile.events() or () if event.name.startswith("zeco::")})


@pytest.mark.few(1)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_blocks_of_every_mixer_run_forward_and_backward(mixer: str, documents: bool) -> None:
    launched = _operators(f"{mixer}_tiny", documents)
    assert {"zeco::mix", "zeco::mix_backward"} <= {*launched}


def test_softmax_layers_and_fp8_products_run_too() -> None:
    launched = _operators("gla_tiny", False, Matmul.fp8, **{"model.attn.every": "2"})
    assert {"zeco::mix_backward", "zeco::attend", "zeco::attend_backward", "zeco::parallel_linear"} <= {*launched}


def test_the_thread_leaves_random_numbers_alone_and_its_errors_are_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["model=gla_tiny"])
    before = torch.get_rng_state()
    kernels_ahead.run_blocks(config.model, TrainConfig(dtype=Dtype.fp32), (1, 64), False, CPU)
    assert torch.equal(before, torch.get_rng_state())
    device = torch.device("cuda", 0)
    with (
        mock.patch.object(kernels_ahead, "run_blocks", side_effect=RuntimeError("no such GPU")) as work,
        mock.patch.object(torch, "cuda"),
        mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", create=True),
        mock.patch.object(kernels_ahead, "_has_room", return_value=True),
        caplog.at_level("DEBUG"),
        kernels_ahead.kernels_ahead(config.model, TrainConfig(), (1, 64), False, device),
    ):
        pass
    work.assert_called_once()
    assert "kernels were not compiled ahead" in caplog.text
    with mock.patch.object(kernels_ahead, "run_blocks") as work:
        with kernels_ahead.kernels_ahead(config.model, TrainConfig(), (1, 64), False, CPU):
            pass
        work.assert_not_called()


def test_blocks_have_fewer_tokens_and_no_memory_that_the_model_needs() -> None:
    assert kernels_ahead._fewer((1, 16_384)) == (1, 16_384)
    assert kernels_ahead._fewer((1, 40_000)) == (1, 32_768)
    assert kernels_ahead._fewer((3, 16_384)) == (3, 10_240)
    assert kernels_ahead._fewer((64, 4096)) == (64, 1024)
    assert kernels_ahead._fewer((64, 700)) == (64, 700)
    model, train = load_config(["model=gla_1b"]).model, TrainConfig(dtype=Dtype.bf16)
    for free, has_room in ((80e9, True), (10e9, False)):
        with mock.patch.object(torch.cuda, "mem_get_info", return_value=(int(free), int(80e9))):
            assert kernels_ahead._has_room(model, train, (1, 16_384), torch.device("cuda", 0)) is has_room


def test_too_little_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, device = load_config(["model=gla_tiny"]).model, torch.device("cuda", 0)
    with (
        mock.patch.object(kernels_ahead, "run_blocks") as work,
        mock.patch.object(kernels_ahead, "_has_room", return_value=False),
        caplog.at_level("INFO"),
        kernels_ahead.kernels_ahead(model, TrainConfig(), (1, 64), False, device),
    ):
        pass
    work.assert_not_called()
    assert "too little memory" in caplog.text
