"""Checks of the settings against the machine."""

from __future__ import annotations

import pytest
import torch

from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.ops import operator
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import stored_slow_downs
from zeco_train.training.checks import check_machine, slow_paths

FP8 = ["name=x", "train.matmul=fp8"]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr("zeco_train.training.checks.total_memory", lambda device: (1 << 40, "this toy"))
    monkeypatch.setattr(operator, "_of", lambda device: Target(device.type, capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy")
    return torch.device("cuda", 0)


def test_gpu_without_fp8_products_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_gpu(monkeypatch, (8, 0))
    message = r"train\.matmul=fp8: needs compute capability 8\.9, Toy has 8\.0; take bf16"
    with pytest.raises(ConfigError, match=message):
        check_machine(load_config(FP8), device)
    check_machine(load_config(["name=x"]), device)


@pytest.mark.few(quick=3)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["train.dtype=bf16"], []),
        (["train.dtype=bf16", "train.matmul=fp8"], []),
        (["train.dtype=fp32", "train.matmul=fp8"], ["train.matmul=fp8: fp8 products"]),
        (
            ["train.dtype=fp64"],
            [
                "layers 0 to 3 (gla): gla",
                "layers 0 to 3 (gla): gated_norm",
                "the optimizer: adamw",
                "the gradients: packing",
            ],
        ),
        (["model.attn.layers=[0,2]", "train.dtype=fp32"], ["layers 0, 2 (softmax): softmax"]),
        (["model.attn.layers=[1]", "model.attn.head_dim=36"], ["layer 1 (softmax): softmax"]),
    ],
)  # fmt: skip
def test_what_kernels_do_not_serve_is_named_and_refused_on_request(settings: list[str], expected: list[str]) -> None:
    gpu = Target("cuda")
    found = slow_paths(load_config(["name=x", "train.dtype=bf16", *settings]), gpu)
    assert [f"{path.where}: {path.call.operator}" for path in found] == expected
    required = load_config(["name=x", "train.dtype=bf16", *settings, "train.kernels=require"])
    if not expected:
        assert not slow_paths(required, gpu)
        return
    with pytest.raises(ConfigError) as caught:
        slow_paths(required, gpu)
    assert str(caught.value).startswith(f"train.kernels=require: {expected[0]}")


def test_head_dims_without_kernels_name_the_measured_slow_down() -> None:
    kda = load_config(["name=x", "model=kda_1b", "model.num_heads=4", "model.head_dim=512", "train.dtype=bf16"])
    (path,) = slow_paths(kda, Target("cuda"))
    # Of the nearest measured head dims.
    assert path.slow_down in {row.slow_down for row in stored_slow_downs().rows if row.operator == "kda"}
    what = "layers 0 to 19 (kda): kda of K 512, V 512 in bf16"
    assert str(path).startswith(f"{what} runs in PyTorch, about {path.slow_down:.3g} times as slow as kernels")
    assert "head dims K 512, V 512 have no kernels, at most " in str(path)
    retnet = load_config(["name=x", "model=retnet_1b", "model.num_heads=8", "train.dtype=bf16"])
    assert not slow_paths(retnet, Target("cuda"))


def test_cpus_are_not_warned_of_but_refused_where_kernels_are_required() -> None:
    cpu = torch.device("cpu")
    assert not slow_paths(load_config(["name=x", "train.dtype=fp64"]), Target("cpu"))
    with pytest.raises(ConfigError, match=r"^train\.kernels=require: there are no kernels on CPUs"):
        check_machine(load_config(["name=x", "train.kernels=require"]), cpu)


def test_widths_that_fp8_products_cannot_have_are_named() -> None:
    message = (
        r"train\.matmul=fp8: gla_tiny has a linear layer of 100 inputs and 128 outputs; both must be multiples of 16"
    )
    with pytest.raises(ConfigError, match=message):
        check_machine(load_config([*FP8, "model.intermediate_size=100"]), torch.device("cpu"))
