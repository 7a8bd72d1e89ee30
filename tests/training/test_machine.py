"""Checks of the settings against the machine."""

from __future__ import annotations

import logging

import pytest
import torch

from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.training.machine import check_machine

FP8 = ["name=x", "train.matmul=fp8"]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr("zeco_train.training.machine.total_memory", lambda device: (1 << 40, "this toy"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy")
    return torch.device("cuda", 0)


def test_gpu_without_fp8_products_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_gpu(monkeypatch, (8, 0))
    message = r"train\.matmul=fp8: needs compute capability 8\.9, Toy has 8\.0; take bf16"
    with pytest.raises(ConfigError, match=message):
        check_machine(load_config(FP8), device)
    check_machine(load_config(["name=x"]), device)


def test_emulation_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    device = pretend_gpu(monkeypatch, (9, 0))
    check_machine(load_config([*FP8, "train.dtype=bf16"]), device)
    assert not caplog.messages
    check_machine(load_config(FP8), device)
    check_machine(load_config(FP8), torch.device("cpu"))
    ends = "where it takes longer than bf16"
    assert caplog.messages == [
        f"train.matmul=fp8: emulated with train.dtype=fp32, {ends}",
        f"train.matmul=fp8: emulated on CPUs, {ends}",
    ]


def test_widths_that_fp8_products_cannot_have_are_named() -> None:
    message = (
        r"train\.matmul=fp8: gla_tiny has a linear layer of 100 inputs and 128 outputs; both must be multiples of 16"
    )
    with pytest.raises(ConfigError, match=message):
        check_machine(load_config([*FP8, "model.intermediate_size=100"]), torch.device("cpu"))
