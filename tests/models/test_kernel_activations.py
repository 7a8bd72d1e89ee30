"""Measured activations on GPUs, where kernels keep other tensors than the PyTorch passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.config import LanguageModelConfig
from models.mixer_registry import MIXERS
from models.mixers.delta_net import DeltaNetConfig
from models.mixers.kda import KDAConfig
from models.mixers.linear import LinearAttentionConfig
from tests.support.planning import case_of, kept_by_token, make_case
from zeco_train.ops.delta.chunked import CHUNKED
from zeco_train.ops.hgrn.chunked import CHUNKED as CHUNKED_HGRN
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import ForwardPass, Passes
from zeco_train.ops.scalar_decay.chunked import CHUNKED_FIXED, CHUNKED_SCALAR
from zeco_train.plan.devices import Gpu, machine
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

ON_GPU = "gpu=h200", "train.recompute=none"
OTHERS = [name for name in MIXERS if name not in ("gla", "hgrn2")]


def _saving_like(kernels: Passes, plain: Passes) -> Passes:
    """Passes in PyTorch whose forward pass saves tensors of the kernels' shapes."""

    def forward(operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> ForwardPass:
        done: Any = plain.forward(operands, scale, doc_ids)
        done.saved = kernels.saved_like(operands)
        return done

    return kernels._replace(forward=forward)


@pytest.mark.few(2, quick=1)
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("name", OTHERS)
def test_activations_are_what_autograd_keeps_with_kernels(name: str, dtype: Dtype) -> None:
    """To the byte, without a compiler; that kernels save what they promise is tested with them."""
    from zeco_train.ops.delta.kernels import launch as delta
    from zeco_train.ops.hgrn.kernels import CUDA as CUDA_HGRN
    from zeco_train.ops.scalar_decay.kernels import launch as cuda

    gated = delta.CUDA_GATED, CHUNKED
    pairs = {
        "fixed_decay": (cuda.CUDA_FIXED, CHUNKED_FIXED),
        "scalar_decay": (cuda.CUDA_SCALAR, CHUNKED_SCALAR),
        "delta": (delta.CUDA_DELTA, CHUNKED),
        "gated_delta": gated,
        "kda": gated,
        "hgrn": (CUDA_HGRN, CHUNKED_HGRN),
    }
    saving = {operator: _saving_like(*pair) for operator, pair in pairs.items()}
    with_kernels = {
        operator: dataclasses.replace(OPERATORS[operator], portable=passes, cuda=None)
        for operator, passes in saving.items()
    }
    config = MIXERS[name].config_class(num_layers=1)

    def with_one_program(module: Any) -> Any:
        plain = module.options_for
        return mock.patch.object(module, "options_for", lambda *x: dataclasses.replace(plain(*x), programs=1))

    # One program walks over all tokens, so the states that it starts from do not depend on their number.
    with mock.patch.dict(OPERATORS, with_kernels), with_one_program(cuda), with_one_program(delta):
        kept = kept_by_token(config, dtype.compute)
    case = case_of(config, *ON_GPU, f"train.dtype={dtype.value}")
    assert kept == case.measured(name).kept.by_token


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [
        KDAConfig(hidden_size=640, num_heads=1, head_dim=640),
        DeltaNetConfig(hidden_size=640, num_heads=1),
        LinearAttentionConfig(causal=False),
    ],
    ids=["kda", "delta_net", "unmasked"],
)
def test_activations_without_kernels_are_those_of_cpus(config: LanguageModelConfig) -> None:
    """Heads of more channels than kernels of delta rules take, and no mask."""
    case = case_of(config, *ON_GPU)
    block = next(iter(case.spec.blocks.values()))
    assert case.in_pytorch(block)
    on_cpu = dataclasses.replace(case, machine=machine(Gpu.cpu))
    (kind,) = case.spec.blocks
    assert case.measured(kind).kept.by_token == on_cpu.measured(kind).kept.by_token


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["retnet_340m", "retnet_1b", "lightning_1b", "cosformer_1b", "mamba2_1b"])
@pytest.mark.parametrize("batch", [1, 8])
def test_planned_starts_of_walks_are_those_of_the_kernels(name: str, batch: int) -> None:
    """Of many tokens, by far more than those of the measurement."""
    from zeco_train.ops.scalar_decay.kernels import launch as cuda

    sizes = f"data.micro_batch={batch}", f"data.global_batch={batch}"
    case = make_case(f"model={name}", "gpu=h200", "train.dtype=bf16", "train.compile=never", *sizes)
    heads, key_dim, value_dim = next(iter(case.spec.blocks.values())).state_shape
    meta: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    q, v = (torch.empty(batch, 1 << 18, *shape, **meta) for shape in ((1, key_dim), (heads, value_dim)))
    (starts,) = cuda.CUDA_FIXED.saved_like((q, q, v, torch.empty(heads, device="meta")))
    (kind,) = case.spec.blocks
    # Beside them are decays of heads, and constants.
    assert case.measured(kind).kept.fixed == pytest.approx(starts.numel() * 4, rel=0.05)
