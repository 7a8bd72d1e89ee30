"""The matrix products of a step, which benchmark case `model` times separately."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from models import language_model
from models.mixers import gla
from models.mixers.gla import GLAConfig
from models.spec import ModelSpec, spec_of
from tests.models.test_model import SCAN, SMALL
from tests.support.bench_settings import QUICK
from zeco_train.bench import products
from zeco_train.bench.config import ModelConfig, ModelSettings
from zeco_train.bench.model import _Measurement
from zeco_train.bench.products import Products
from zeco_train.bench.session import Session
from zeco_train.bench.timing import Contender
from zeco_train.bench.variants import Variant
from zeco_train.ops import loss as loss_module
from zeco_train.ops.operator import Target
from zeco_train.ops.position import SequencePosition


class _ProductShapes(TorchDispatchMode):
    """Counts plain matrix products by (k, m and n): a layer may be computed as its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            (m, k), (_, n) = (tensor.shape for tensor in args[-2:])
            self.counts[k, tuple(sorted((m, n)))] += 1
        return func(*args, **(kwargs or {}))


UNGATED = dataclasses.replace(SMALL, num_heads=6, num_kv_heads=3, use_output_gate=False)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "config"), [(7, SMALL), (40, UNGATED)])
def test_products_match_those_of_a_training_step(
    tokens: int, config: GLAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "CHUNK_TOKENS", 15)
    monkeypatch.setitem(loss_module._CHUNK_TOKENS, "cpu", 15)
    # A dispatch mode cannot see into custom ops; these plain products have the same shapes.
    for module in (gla, language_model):
        monkeypatch.setattr(module, "project", lambda x, *layers: [F.linear(x, layer.weight) for layer in layers])
    model = ModelSpec(config).build()
    model.init_weights(0)
    ids = torch.arange(tokens)[None] % config.vocab_size
    with _ProductShapes() as expected:
        model(ids, SequencePosition((0, tokens), exchange=SCAN), ids).backward()
    alone = Products(config, tokens, torch.float32, torch.device("cpu"), 0)
    with _ProductShapes() as found:
        last = alone.step()
    assert found.counts == expected.counts
    with _ProductShapes() as of_micro_batches:
        alone.contender(times=3).step(0)
    assert of_micro_batches.counts.total() == 3 * found.counts.total()
    assert found.counts.total() == 3 * ((10 if config.use_output_gate else 9) * config.num_layers + -(-tokens // 15))
    assert 0 < abs(last) < math.inf
    with FlopCounterMode(display=False) as counter:
        alone.step()
    flops = spec_of(config).flops_per_token(tokens)
    assert counter.get_total_flops() == tokens * (flops.linear + flops.head)
    assert products.product_flops(config).total == flops.linear + flops.head


@pytest.mark.slow
def test_products_use_random_operands_and_little_memory() -> None:
    assert loss_module._CHUNK_TOKENS["cuda"] == products.CHUNK_TOKENS
    alone = Products(SMALL, 64, torch.float64, torch.device("cpu"), 0)
    again = Products(SMALL, 64, torch.float64, torch.device("cpu"), 0)
    assert alone.step() == again.step()
    for a, b, result in [*alone._forward["gla"], *alone._head, *alone._backward["gla"]]:
        assert a.std() > 0.01
        assert b.std() > 0.01
        # No product overwrites its own operands.
        read = {tensor.untyped_storage().data_ptr() for tensor in (a, b)}
        assert result.untyped_storage().data_ptr() not in read
    large = ModelConfig().run_config(ModelSettings(heads=16)).model
    with FakeTensorMode():
        held = Products(large, 16_384, torch.bfloat16, torch.device("cpu"), 0).held_bytes
    assert 1e9 < held < 1.5e9


def test_products_row_has_the_memory_of_products() -> None:
    config = ModelConfig.load(QUICK)
    session = mock.Mock(spec=Session, on_cuda=False, rank=0, world_size=1, gather=lambda value: [value])
    session.device = torch.device("cpu")
    session.target = Target.of(session.device)
    measurement = _Measurement(config.run_config(ModelSettings(heads=2)), config, session, mock.Mock())
    ceiling = Products(SMALL, 30, torch.float32, torch.device("cpu"), 0).contender(times=1)
    ceiling.held_gb = 1.5
    both = [Contender(Variant("dp", "dp"), mock.Mock()), ceiling]
    for contender in both:
        contender.samples, contender.seconds, contender.loss, contender.peak_gb = [2.0], [0.002], 1.0, 20.0
    with mock.patch("zeco_train.bench.model.time_in_turns", return_value=5):
        rows = measurement._time(both, 30, 0, 0.0)
    assert [row["peak_gb"] for row in rows] == [20.0, 1.5]
