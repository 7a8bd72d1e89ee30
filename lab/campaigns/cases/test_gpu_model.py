"""The 1B model on a GPU, at full size, and compiled blocks. The last results are in gpu_results.md."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from data.loader.batches import Batch
from models.language_model import LanguageModel
from models.parameters import parameter_rules
from models.spec import spec_of
from zeco_train.config.schema import load_config
from zeco_train.distributed.mesh import init_mesh
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.build import build_model, build_step
from zeco_train.training.optim.optimizer_registry import build_optimizer
from zeco_train.training.step import TrainingStep

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEQ_LEN, SEGMENTS = 262_144, 8
# bf16: matrix products of other heights, and weight gradients that are sums of 8 rounded ones. Differences by rounding
# grow from layer to layer: a whole model's gradient in bf16 is 0.17 from that in fp32 (12 layers, on a CPU).
TOLERANCE = {2: 1e-2, 20: 0.15}


def batches(segments: int) -> list[Batch]:
    tokens = torch.randint(0, 32_000, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    length = SEQ_LEN // segments
    return [
        Batch(
            input_ids=tokens[:, start : start + length].contiguous(),
            labels=tokens[:, start + 1 : start + length + 1].contiguous(),
            position=SequencePosition(
                (start, start + length), seq_len=SEQ_LEN, segment=start // length, num_segments=segments
            ),
            sequence_ids=[0],
        )
        for start in range(0, SEQ_LEN, length)
    ]


def gradients(model: LanguageModel, step: TrainingStep, segments: int) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients on the CPU, and the peak of memory in GB."""
    step.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    step.backward(batches(segments), last=True)
    grads = {name: parameter.grad.to_local().cpu() for name, parameter in model.named_parameters()}
    return step.totals.loss.item(), grads, torch.cuda.max_memory_allocated() / 1e9


@pytest.mark.parametrize("layers", TOLERANCE)
def test_segments_give_the_gradient_of_the_whole_sequence(layers: int) -> None:
    """256k tokens of gla_1b, or two of its layers: 8 segments without recomputation against one with full recompute."""
    device = torch.device("cuda", 0)
    mesh = init_mesh(Launch.from_environment(), 1, device, timedelta(seconds=60))
    config = load_config(["model=gla_1b", f"model.num_layers={layers}", "train.dtype=bf16", "sp=dp", "name=segments"])
    model = build_model(config.model, config.train, config.parallel.strategy, mesh, seed=0)
    step = TrainingStep(
        model,
        build_optimizer(parameter_rules(model), config.optim, config.train.dtype.compute),
        scan := local_exchange(),
        mesh,
        strategy=config.parallel.strategy,
        grad_clip=1.0,
        tokens_per_step=SEQ_LEN,
    )
    model.set_recompute(Recompute.full)
    loss, expected, whole_gb = gradients(model, step, 1)
    model.set_recompute(Recompute.none)
    found_loss, found, segments_gb = gradients(model, step, SEGMENTS)
    scan.drain()

    distance = {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    worst = max(distance, key=lambda name: distance[name])
    total = sum(float((found[name] - grad).norm()) ** 2 for name, grad in expected.items()) ** 0.5
    total /= sum(float(grad.norm()) ** 2 for grad in expected.values()) ** 0.5
    print(
        f"{layers} layers: losses {loss:.6f} {found_loss:.6f}; "
        f"gradient {total:.2e}, worst {distance[worst]:.2e} ({worst}); "
        f"peak {whole_gb:.1f} GB whole with recompute=full, {segments_gb:.1f} GB in {SEGMENTS} segments"
    )
    assert found_loss == pytest.approx(loss, rel=1e-3)
    assert total <= TOLERANCE[layers]


@pytest.mark.parametrize("name", ["gla_tiny", "lightning_tiny", "kda_tiny"])
def test_compiled_blocks_have_the_gradients_of_launched_ones(name: str) -> None:
    """In fp32: there torch 2.11 lost all gradients of a gated norm that was an `autograd.Function`."""
    config = load_config([f"model={name}", "name=block"]).model
    torch.manual_seed(0)
    model = spec_of(config).build().cuda()
    model.init_weights(0)
    block, shard = model.model.blocks()[0], SequencePosition((0, 300), exchange=local_exchange())
    like = next(block.parameters()).new_empty(1, 300)
    place = shard.on(like, with_positions=block.attn.reads_positions)
    x = torch.randn(1, 300, config.hidden_size, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)
    found = []
    for is_compiled in (False, True):
        if is_compiled:
            block.compile_compute()
        y, *_ = block(x, place, (), None if block.attn.wide_parameters is None else block.attn.wide_parameters())
        found.append([y, *torch.autograd.grad(y, [x, *block.parameters()], dy, allow_unused=True)])
    # Sums in fp32 in another order; a gradient that is lost is off by its whole norm.
    for launched, compiled in zip(*found, strict=True):
        assert (launched is None) == (compiled is None)
        if launched is not None:
            assert float((compiled - launched).norm()) <= 1e-4 * float(launched.norm())


@pytest.mark.parametrize("name", ["gla_1b", "kda_1b"])
def test_compiled_models_have_the_gradient_of_launched_ones(name: str) -> None:
    """In bf16, with nothing recomputed: other layers run between a block's two passes and use the memory it has freed.

    With torch 2.11 the gradient of gla_1b was off by 1.2 of its norm while a compiled block also returned the detached
    residual sum in its middle; blocks alone, fp32, and whole blocks recomputed showed nothing.
    """
    mesh = init_mesh(Launch.from_environment(), 1, torch.device("cuda", 0), timedelta(seconds=60))
    settings = [
        f"model={name}",
        "model.num_layers=2",
        "train.dtype=bf16",
        "sp=dp",
        "data.seq_len=8192",
        "name=compiled",
    ]
    found = []
    for compiled in ("never", "always"):
        torch.compiler.reset()
        config = load_config([*settings, f"train.compile={compiled}"])
        model = build_model(config.model, config.train, config.parallel.strategy, mesh, seed=0)
        optimizer = build_optimizer(parameter_rules(model), config.optim, config.train.dtype.compute)
        step = build_step(config, model, optimizer, local_exchange(), mesh)
        step.backward(batches(SEQ_LEN // 8192)[:1], last=True)
        found.append([parameter.grad.to_local().cpu() for parameter in model.parameters()])
    launched, compiled_ones = found
    off = sum(float((a - b).norm()) ** 2 for a, b in zip(compiled_ones, launched, strict=True))
    # Measured: 1.8e-2, as by recomputation; other orders of bf16 rounding.
    assert off <= 0.05**2 * sum(float(x.norm()) ** 2 for x in launched)
