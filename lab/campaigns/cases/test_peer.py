"""fla's model as the peer of benchmark case `model`: same logits, loss and update as ours."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.language_model import LanguageModel
from models.parameters import parameter_rules
from models.spec import ModelSpec
from tests.support.bench_settings import QUICK
from tests.support.distributed import run_distributed
from zeco_train.bench.backends import Backends, RandomTokens
from zeco_train.bench.config import ModelConfig, ModelSettings
from zeco_train.bench.peer import Peer, Weights
from zeco_train.bench.session import Session
from zeco_train.bench.variants import Variant
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.numbers import relative_error
from zeco_train.training.optim.optimizer_registry import build_optimizer

pytestmark = pytest.mark.campaign


def _plain_kernels() -> Any:
    """fla's model on a CPU: its kernels replaced by plain ones."""
    import fla.layers.gla as layer
    import fla.models.modeling_utils as utils
    import fla.modules.mlp as mlp
    import fla.modules.norm.fused_norm_gate as gate
    import fla.modules.norm.layernorm as norm
    from fla.ops.gla.naive import naive_recurrent_gla

    def rms_norm(x: Tensor, residual: Tensor | None = None, prenorm: bool = False, **kwargs: Any) -> Any:
        kwargs = {key: kwargs[key] for key in ("weight", "bias", "eps")}
        return norm.rms_norm_ref(x=x, residual=residual, prenorm=prenorm, **kwargs)

    def gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, eps: float, **_: Any) -> Tensor:
        return norm.rms_norm_ref(x, weight, bias, eps=eps) * F.silu(g)

    class Loss:
        ignore_index = -100

        def __init__(self, use_l2warp: bool, reduction: str) -> None:
            assert (use_l2warp, reduction) == (False, "mean")

        def __call__(self, hidden: Tensor, labels: Tensor, weight: Tensor, bias: None) -> Tensor:
            return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())

    return [
        mock.patch.object(layer, "fused_recurrent_gla", lambda q, k, v, gk, **_: naive_recurrent_gla(q, k, v, gk)),
        mock.patch.object(norm, "rms_norm", rms_norm),
        mock.patch.object(gate, "rms_norm_gated", gated),
        mock.patch.object(mlp, "swiglu_linear", lambda x, y, w, b: F.linear(F.silu(x) * y, w, b)),
        mock.patch.object(utils, "FusedLinearCrossEntropyLoss", Loss),
    ]


def _peer_trains_as_we_do(rank: int, world_size: int) -> None:
    """One step of the peer and of our model: same logits, loss and update, with no contribution of other ranks."""
    for kernel in _plain_kernels():
        kernel.start()
    for tied in (False, True):
        overrides = [*QUICK, f"model.tie_word_embeddings={tied}".lower(), "dtype=fp32"]
        config = ModelConfig.load(overrides)
        run = config.run_config(ModelSettings(heads=2))
        session = Session.open(config, Launch(rank, world_size, rank, world_size))
        ours = Backends(run, session, 32)
        tokens = RandomTokens(run.model.vocab_size, 32, 0, session)
        ids = tokens.own(0)
        weights = Weights(ours.weights(), ids, ours.logits(ids))
        theirs = Peer(Variant("fla", "fla"), weights, run, session.mesh)
        assert relative_error(theirs.logits(ids), weights.logits) < 1e-5
        before = {name: parameter.full_tensor().clone() for name, parameter in theirs.model.named_parameters()}
        loss = theirs.step(tokens, 0)

        alone = ModelSpec(run.model).build()
        alone.load_state_dict(before, strict=not tied)
        expected_loss, expected = _step_alone(alone, ids, run)
        assert abs(loss.item() - expected_loss) < 1e-5 * expected_loss
        for name, parameter in theirs.model.named_parameters():
            update = parameter.full_tensor() - before[name]
            assert relative_error(update, expected[name]) < 1e-2, name
        bare = Peer(Variant("fla:no_optimizer", "fla", updates=False), weights, run, session.mesh)
        twice = mock.Mock(session=session, micro_batches=2, numbers=lambda number: (0, 0), own=tokens.own)
        assert abs(bare.step(twice, 0).item() - expected_loss) < 1e-5 * expected_loss
        assert all(torch.equal(p, before[name]) for name, p in bare.model.named_parameters())


def _step_alone(model: LanguageModel, ids: Tensor, run: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and update of one step in plain PyTorch, without other ranks."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(parameter_rules(model), run.optim, run.train.dtype.compute)
    shard = SequencePosition((0, ids.shape[1] - 1), exchange=local_exchange())
    logits = model(ids[:, :-1], shard)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), run.optim.grad_clip)
    optimizer.step()
    return loss.item(), {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_fla_peer_matches_our_logits_loss_and_update() -> None:
    run_distributed(_peer_trains_as_we_do, 2)
