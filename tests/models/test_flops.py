"""Recomputed FLOPs (`recomputed_flops_per_token`) against counts of the executed matrix products."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from data.loader.batches import Batch
from models import language_model
from models.mixers import gla
from models.mixers.gla import GLAConfig
from models.spec import ModelSpec, TokenFLOPs, spec_of
from tests.models.test_model import SMALL
from zeco_train.distributed.config import Strategy
from zeco_train.ops import CHUNK
from zeco_train.ops.gla.chunked import CHUNKED, intra_scores, local_states
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange
from zeco_train.training import step as step_module
from zeco_train.training.step import TrainingStep

TOKENS = 30
# Linear layers without and with bias; the operator uses batched products, which are counted separately.
_LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)


def count_step(monkeypatch: pytest.MonkeyPatch, recompute: Recompute, segments: int) -> int:
    """FLOPs of the linear layers and the head in the forward and backward passes of a step of TOKENS tokens."""
    monkeypatch.setattr(step_module, "begin_micro_batch", lambda *arguments, **options: None)
    # The counter does not see products inside custom ops, such as those of projections that share an input.
    for module in (gla, language_model):
        monkeypatch.setattr(module, "project", lambda x, *layers: [F.linear(x, layer.weight) for layer in layers])
    model = ModelSpec(SMALL).build()
    model.init_weights(0)
    for layer in model.model.layers:
        layer.recompute = recompute
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), sp_rank=0, sp_size=1)
    optimizer = torch.optim.AdamW(model.parameters())
    settings: dict[str, Any] = {"strategy": Strategy.ddp, "grad_clip": 1.0}
    step = TrainingStep(model, optimizer, local_exchange(), mesh, tokens_per_step=TOKENS, **settings)
    ids = torch.randint(SMALL.vocab_size, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    length = TOKENS // segments
    batches = [
        Batch(ids[:, i : i + length], ids[:, i + 1 : i + length + 1], SequencePosition((i, i + length)), [0])
        for i in range(0, TOKENS, length)
    ]
    unread = torch.ops.zeco.product_after
    with FlopCounterMode(display=False, custom_mapping={unread: of_unread_output}) as counter:
        assert step.backward(batches, last=True)
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(op, 0) for op in (*_LINEAR, unread))


def of_unread_output(dy: Any, weight: Any, first: Any, **options: Any) -> int:
    """The gradient of the input of a layer whose output no backward pass reads: the last of a recomputed MLP."""
    return 2 * math.prod(dy) * weight[1]


def flops_of(config: GLAConfig, recompute: Recompute, segments: int) -> TokenFLOPs:
    """All FLOPs per token of a step of TOKENS tokens."""
    spec = spec_of(config)
    return spec.flops_per_token(TOKENS) + spec.recomputed_flops_per_token(TOKENS, recompute, segments)


@pytest.mark.few(1)
@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize("recompute", Recompute)
def test_linear_flops_equal_counted_flops(monkeypatch: pytest.MonkeyPatch, recompute: Recompute, segments: int) -> None:
    flops = flops_of(SMALL, recompute, segments)
    assert count_step(monkeypatch, recompute, segments) == pytest.approx(
        TOKENS * (flops.linear + flops.head), rel=1e-12
    )
    # Two backward products for each forward one.
    forward, both = (spec_of(SMALL).flops_per_token(TOKENS, backward=backward) for backward in (False, True))
    assert (3 * forward.linear, 3 * forward.head) == (both.linear, both.head)


def in_place_product(added_to: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], **options: Any) -> int:
    """FLOPs of `baddbmm_`, by shapes; torch's counter does not support it."""
    return 2 * a[0] * a[1] * a[2] * b[2]


def counted(call: Any, *arguments: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place_product}) as counter:
        result = call(*arguments)
    return counter.get_total_flops(), result


def test_recomputed_operator_flops_equal_counted_flops() -> None:
    """The backward pass has two products for each forward one and recomputes the states; in PyTorch also the scores,
    which the kernels keep."""
    key, value, chunks = SMALL.head_k_dim, SMALL.head_v_dim, 3
    shape = (1, chunks * CHUNK, SMALL.num_heads)
    q, k, v, do = (torch.ones(*shape, size) for size in (key, key, value, value))
    g, scale = torch.full((*shape, key), -0.1), 1.0

    def forward() -> None:
        local = CHUNKED.forward((q, k, v, g), scale, None)
        local.overlap()
        local.outputs(zero)

    def backward() -> None:
        local = CHUNKED.backward((q, k, v, g), do, (), zero, scale, None)
        local.overlap()
        local.operand_grads(zero)

    zero = torch.zeros(1, SMALL.num_heads, key, value)
    of_forward, _ = counted(forward)
    of_backward, _ = counted(backward)
    of_states, _ = counted(local_states, k, v, g, None)
    of_scores, _ = counted(intra_scores, q, k, g, None, scale)
    assert of_scores > 0
    assert of_backward == 2 * of_forward + of_states + of_scores

    formula = spec_of(SMALL).recomputed_flops_per_token(TOKENS, Recompute.none).operator
    assert chunks * CHUNK * formula == SMALL.num_layers * of_states


def test_full_recompute_and_segments_repeat_operator_flops() -> None:
    forward = spec_of(SMALL).flops_per_token(TOKENS, backward=False).operator
    own = spec_of(SMALL).recomputed_flops_per_token(TOKENS, Recompute.none).operator
    for recompute, times in ((Recompute.none, 0), (Recompute.selective, 0), (Recompute.full, 1)):
        for segments in (1, 4):
            flops = spec_of(SMALL).recomputed_flops_per_token(TOKENS, recompute, segments)
            assert flops.operator == pytest.approx(own + (times + 1 - 1 / segments) * forward)
            assert flops.head == 0
