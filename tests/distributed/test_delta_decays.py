"""A_log and dt_bias of the delta mixers stay in fp32 under every strategy: log-decays equal an unsharded model's."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from lab.exactness_matrix import tiny
from models import decays
from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.mixers import delta_net
from models.parameters import cast
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.steps import make_mesh
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.parallelize import begin_micro_batch, num_shards
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig

pytestmark = pytest.mark.numeric

TOKENS = 65


def _log_decays(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Of each layer in a forward and backward pass; with recomputation of each layer twice."""
    found, scan = [], local_exchange()

    def noted(logits: Tensor, parameters: Tensor, heads: int) -> Tensor:
        assert logits.dtype is torch.bfloat16
        assert parameters.dtype is torch.float32
        found.append(decays.step_log_decays(logits, parameters, heads))
        return found[-1]

    with mock.patch.object(delta_net, "step_log_decays", noted):
        model(ids[:, :-1], SequencePosition((0, TOKENS - 1), exchange=scan), ids[:, 1:]).backward()
    return [g.detach() for g in found]


def _in_bf16(rank: int, world_size: int, name: str) -> int:
    config: LanguageModelConfig = tiny(name)
    mesh = make_mesh(rank, world_size, 1)
    ids = torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    plain = ModelSpec(config).build()
    plain.init_weights(0)
    cast(plain, torch.bfloat16)
    expected = _log_decays(plain, ids)
    assert len(expected) == config.num_layers
    cases = [*zip(Strategy, itertools.cycle((Recompute.none, Recompute.full)), strict=False)]
    for strategy, recompute in cases:
        train = TrainConfig(dtype=Dtype.bf16, recompute=recompute)
        model = build_model(config, train, strategy, mesh, seed=0)
        begin_micro_batch(model, strategy, num_shards(model), last=True)
        found = _log_decays(model, ids)
        # Recomputation goes from the last layer to the first.
        wanted = expected if recompute is Recompute.none else [*expected, *reversed(expected)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs), f"{strategy}, {recompute}"
    return len(cases)


@pytest.mark.few(1)
@pytest.mark.slow  # tests/distributed/test_wide_parameters.py has those of Mamba-2
@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_log_decays_are_bit_equal_to_those_of_an_unsharded_model(name: str) -> None:
    assert run_distributed(_in_bf16, 2, name) == [len(Strategy)] * 2
