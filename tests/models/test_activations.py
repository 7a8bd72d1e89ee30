"""Activations as the planner measures them against what autograd keeps: on CPUs, with kernels, of softmax layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.attn import AttnConfig
from models.config import SOFTMAX, LanguageModelConfig
from models.mixer_registry import MIXERS
from models.mixers.delta_net import DeltaNetConfig
from models.mixers.gla import GLAConfig
from models.mixers.kda import KDAConfig
from models.mixers.linear import LinearAttentionConfig
from models.spec import AttentionSpec, spec_of
from tests.support.planning import case_of, kept_by_token, make_case
from zeco_train.ops.delta.chunked import CHUNKED
from zeco_train.ops.gla import GLA
from zeco_train.ops.gsa import GSA
from zeco_train.ops.hgrn.chunked import CHUNKED as CHUNKED_HGRN
from zeco_train.ops.mamba1.chunked import CHUNKED as CHUNKED_MAMBA1
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import ForwardPass, Passes
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.scalar_decay.chunked import CHUNKED_FIXED, CHUNKED_SCALAR
from zeco_train.plan.devices import Gpu, machine
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

ON_GPU = "gpu=h200", "train.recompute=none"


@pytest.mark.few(2, quick=1)
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective])
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("name", MIXERS)
def test_activations_are_what_autograd_keeps(name: str, dtype: Dtype, recompute: Recompute) -> None:
    """On CPUs and without a compiler, to the byte."""
    config = MIXERS[name].config_class(num_layers=1)
    case = case_of(config, "gpu=cpu", f"train.dtype={dtype.value}", f"train.recompute={recompute.value}")
    assert kept_by_token(config, dtype.compute, recompute) == case.measured(name).kept.by_token


def _saving_like(kernels: Passes, plain: Passes) -> Passes:
    """Passes in PyTorch whose forward pass saves tensors of the kernels' shapes."""

    def forward(operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> ForwardPass:
        done: Any = plain.forward(operands, scale, doc_ids)
        done.saved = kernels.saved_like(operands)
        return done

    return kernels._replace(forward=forward)


@pytest.mark.few(2, quick=1)
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("name", MIXERS)
def test_activations_are_what_autograd_keeps_with_kernels(name: str, dtype: Dtype) -> None:
    """To the byte, without a compiler; that kernels save what they promise is tested with them."""
    from zeco_train.ops.delta.kernels import launch as delta
    from zeco_train.ops.gla.kernels import launch as gla
    from zeco_train.ops.gsa import kernels as gsa
    from zeco_train.ops.hgrn.kernels import CUDA as CUDA_HGRN
    from zeco_train.ops.mamba1 import kernels as mamba1
    from zeco_train.ops.scalar_decay.kernels import launch as cuda

    gated = delta.CUDA_GATED, CHUNKED
    pairs = {
        "fixed_decay": (cuda.CUDA_FIXED, CHUNKED_FIXED),
        "scalar_decay": (cuda.CUDA_SCALAR, CHUNKED_SCALAR),
        "delta": (delta.CUDA_DELTA, CHUNKED),
        "gated_delta": gated,
        "kda": gated,
        "hgrn": (CUDA_HGRN, CHUNKED_HGRN),
        "gla": (gla.CUDA, GLA.portable),
        "gsa": (gsa.CUDA, GSA.portable),
        "mamba1": (mamba1.CUDA, CHUNKED_MAMBA1),
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(OPERATORS, with_kernels))
        # On CPUs it keeps a second tensor.
        stack.enter_context(mock.patch.object(F, "logsigmoid", lambda x: -F.softplus(-x)))
        for module in (cuda, delta, gla, gsa):
            stack.enter_context(with_one_program(module))
        stack.enter_context(mock.patch.object(mamba1, "WALK", mamba1.WALK._replace(programs=1)))
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


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, no positions": {"num_kv_heads": 1, "rope_theta": None},
    "normed and gated": {"qk_norm": True, "gate": True},
    "wide window": {"head_dim": 48, "num_heads": 6, "num_kv_heads": 2, "window": 64, "qk_norm": True},
    "gated, no positions": {"gate": True, "rope_theta": None},
    "normed over all heads, a part rotated, norms after": {
        "qk_norm": True,
        "qk_norm_all_heads": True,
        "num_kv_heads": 2,
        "rotary_dim": 8,
        "norm_after": True,
    },
}


def _config(**attn: Any) -> GLAConfig:
    return GLAConfig(num_layers=1, attn=AttnConfig(**{"every": 1, **attn}))


@pytest.mark.few(quick=1)
@pytest.mark.parametrize(
    ("variant", "dtype", "compiled", "recompute"),
    [
        ("plain", Dtype.bf16, False, Recompute.none),
        ("wide window", Dtype.bf16, False, Recompute.none),
        ("normed over all heads, a part rotated, norms after", Dtype.fp32, False, Recompute.selective),
        *(
            pytest.param(variant, Dtype.bf16, compiled, Recompute.none, marks=pytest.mark.campaign)
            for compiled, variants in ((False, [*VARIANTS][1:]), (True, ("grouped, no positions", "normed and gated")))
            for variant in variants
            if (compiled, variant) != (False, "wide window")
        ),
    ],
)
def test_activations_of_softmax_are_what_autograd_keeps(
    variant: str, dtype: Dtype, compiled: bool, recompute: Recompute
) -> None:
    torch._dynamo.reset()
    config = _config(**VARIANTS[variant])
    settings = "gpu=cpu", f"train.dtype={dtype.value}", f"train.recompute={recompute.value}"
    case = case_of(config, *settings, compiled=compiled)
    # Compiled code keeps the positions in place of a table: 8 bytes per token, for all layers together.
    positions = 8 * (compiled and config.attn.rope_theta is not None)
    assert kept_by_token(config, dtype.compute, recompute, compiled) == (
        case.measured(SOFTMAX).kept.by_token + positions
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.fp32])
def test_full_recompute_keeps_input_output_and_sums(dtype: Dtype) -> None:
    config = _config(num_kv_heads=2)
    case = case_of(config, "gpu=cpu", f"train.dtype={dtype.value}", "train.recompute=full")
    kept = case.measured(SOFTMAX).kept.by_token
    assert kept == 2 * 128 * dtype.compute.itemsize + 4 * 4
    # Positions, 8 bytes per token of all layers together, are not saved by a layer: their record holds them.
    assert kept_by_token(config, dtype.compute, Recompute.full) == kept


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MIXERS)
def test_layers_of_a_hybrid_are_counted_by_kind(name: str) -> None:
    config = MIXERS[name].config_class(num_layers=6, attn=AttnConfig(every=3, num_heads=4, num_kv_heads=2, window=7))
    blocks = spec_of(config).blocks
    plain = spec_of(MIXERS[name].config_class(num_layers=4))
    assert {kind: block.count for kind, block in blocks.items()} == {name: 4, SOFTMAX: 2}
    assert blocks[SOFTMAX].attention == AttentionSpec(4, 2, 32, 7)
    assert (blocks[SOFTMAX].state_shapes, blocks[SOFTMAX].operators) == ((), [])
    assert blocks[name].attention is None
    assert spec_of(config).state_elements == plain.state_elements
    assert spec_of(config).num_parameters == sum(p.numel() for p in spec_of(config).build().parameters())


def test_flops_of_softmax_grow_with_length_up_to_the_window() -> None:
    def operator(seq_len: int, **attn: Any) -> float:
        return spec_of(_config(**attn)).flops_per_token(seq_len, backward=False).operator

    # Two products of 128 channels with the (seq_len + 1) / 2 keys that a query reads on average.
    assert operator(1000) == 4 * 128 * 1001 / 2
    assert operator(1000, head_dim=64) == 2 * operator(1000)
    pairs = sum(min(position + 1, 10) for position in range(1000))
    assert operator(1000, window=10) == pytest.approx(4 * 128 * pairs / 1000)
    assert operator(5, window=10) == operator(5)


def test_full_recompute_does_not_repeat_softmax_attention() -> None:
    spec = spec_of(_config())
    own = spec.flops_per_token(1000, backward=False).operator
    for recompute in Recompute:
        # Scores, which every backward pass computes again.
        assert spec.recomputed_flops_per_token(1000, recompute).operator == own / 2
