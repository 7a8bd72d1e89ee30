"""Steps as CUDA graphs: the bits of the step without them. The last results are in gpu_results.md."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from data.loader import Batch
from models.parameters import parameter_rules
from zeco_train.config.schema import load_config
from zeco_train.distributed.mesh import Launch, ProcessMesh, init_mesh
from zeco_train.sp.dp import LocalScan
from zeco_train.training.build import build_model
from zeco_train.training.graphs import WARM_UP, StepGraphs
from zeco_train.training.optim.registry import build_optimizer
from zeco_train.training.schedule import set_learning_rate
from zeco_train.training.step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS, STEPS = 512, WARM_UP + 5


def batch(number: int, documents: bool) -> Batch:
    """Every third one has fewer labels; with documents, borders differ from batch to batch."""
    tokens = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
    labels = tokens[:, 1:].clone()
    if number % 3 == 0:
        labels[:, : TOKENS // 4] = -100
    borders = torch.tensor([0, 64 + 7 * number, 100 + 13 * number, TOKENS]) if documents else None
    return Batch(tokens[:, :-1], labels, borders, 0, 0, [number], step_labels=int((labels >= 0).sum()), borders=borders)


@pytest.fixture(scope="module")
def mesh() -> ProcessMesh:
    return init_mesh(Launch.from_environment(), 1, torch.device("cuda", 0), timedelta(seconds=60))


def train(
    mesh: ProcessMesh, settings: list[str], micro_batches: int, with_graphs: bool
) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Losses and norms of all steps, and the weights after the last."""
    config = load_config(["model=gla_tiny", "train.dtype=bf16", "sp=dp", "name=graphs", *settings])
    model = build_model(config.model, config.train, config.parallel.strategy, mesh, seed=0)
    optimizer = build_optimizer(parameter_rules(model), config.optim, config.train.dtype.compute)
    step = TrainingStep(
        model,
        optimizer,
        LocalScan(),
        mesh,
        strategy=config.parallel.strategy,
        grad_clip=1.0,
        tokens_per_step=TOKENS,
        seq_len=TOKENS,
        graphs=StepGraphs(model, mesh.device) if with_graphs else None,
    )
    numbers = []
    for number in range(STEPS):
        set_learning_rate(optimizer, 1e-3 * (number + 1))
        step.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for index in range(micro_batches):
            one = batch(number * micro_batches + index, config.data.reset_state_at_document)
            share = step.backward([one], last=index == micro_batches - 1)
            assert share is not None
            loss += share
        numbers.append(step.update(loss).read())
    return numbers, [parameter.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.reset_state_at_document=true"],
        ["data.reset_state_at_document=true", "model.mixer=mamba2"],
        ["parallel=ddp"],
        ["parallel=zero3"],
        ["train.recompute=full"],
        ["optim=muon"],
        ["model.mixer=mamba2"],
        ["model.mixer=retnet", "model.attn.every=2"],
        ["model.mixer=retnet", "train.compile=never"],
    ],
    ids=" ".join,
)
def test_replayed_steps_equal_launched_ones(mesh: ProcessMesh, settings: list[str], micro_batches: int) -> None:
    numbers, weights = train(mesh, settings, micro_batches, with_graphs=True)
    expected, expected_weights = train(mesh, settings, micro_batches, with_graphs=False)
    assert numbers == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, expected_weights, strict=True))
    assert len({loss for loss, _ in numbers}) == STEPS
