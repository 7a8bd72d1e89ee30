"""Steps as CUDA graphs: the bits of the step without them. On CPUs a part is run again in place of its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from data.loader.batches import Batch
from models.parameters import parameter_rules
from tests.support.distributed import run_distributed
from tests.support.replays import REPLAYS_BEGIN
from zeco_train.config.schema import load_config
from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.sp.exchange import connect_model
from zeco_train.tracking.metrics import StepNumbers
from zeco_train.training.build import build_model
from zeco_train.training.graphs import WARM_UP, StepGraphs, _Captured, capture_problem
from zeco_train.training.optim.optimizer_registry import build_optimizer
from zeco_train.training.schedule import set_learning_rate
from zeco_train.training.step import TrainingStep

TOKENS, STEPS = (512, WARM_UP + 4) if torch.cuda.is_available() else (64, WARM_UP + 2)


def batches(number: int, documents: bool, segments: int, mesh: ProcessMesh) -> list[Batch]:
    """The segments of a sequence. Some sequences have fewer labels; borders of documents differ."""
    tokens = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
    labels = tokens[:, 1:].clone()
    if number % 5 < 2:
        labels[:, : TOKENS // 4] = -100
    inner = [(64 + 7 * number) * TOKENS // 512, (300 + 13 * number % 100) * TOKENS // 512]
    borders = torch.tensor([0, *inner, TOKENS]) if documents else None
    split, step_labels = mesh.split(TOKENS, 1, segments=segments), int((labels >= 0).sum())
    found = []
    for segment in range(segments):
        position = split.position(segment, None if borders is None else [borders])
        own = slice(position.start, position.stop)
        ids, targets = tokens[:, :-1][:, own], labels[:, own]
        found.append(Batch(ids, targets, position, [number], step_labels=step_labels))
    return found


class RunAgain(StepGraphs):
    """In place of a replay a part runs again as it was captured: what it has not read from its tensors is as then."""

    def __init__(self, model: nn.Module, *, released: bool = False) -> None:
        with mock.patch.object(torch.cuda, "Stream"), mock.patch.object(torch.cuda, "graph_pool_handle"):
            super().__init__(model, torch.device("cpu"))
        self.runs, self.released = 0, released

    def begin_step(self) -> bool:
        if self.released and self._step == WARM_UP + 1:
            with mock.patch.object(torch.cuda, "graph_pool_handle"):
                self.release()
        super().begin_step()
        # A graph overwrites the gradients. Here the pass runs again, and would add to them: the step has to clear them.
        return False

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        yield

    def _capture(self, work: Callable[[], tuple[Tensor, ...]]) -> _Captured:
        outputs: list[Tensor] = []
        kinds = set(self._passes)

        def replay() -> None:
            # On GPUs it would overwrite what other kinds of parts have left since.
            assert self._passes == kinds
            found, self.runs = work(), self.runs + 1
            if not outputs:
                outputs.extend(found)
            for kept, again in zip(outputs, found, strict=True):
                kept.copy_(again)

        graph: Any = SimpleNamespace(replay=replay)
        return _Captured(graph, outputs, [])  # type: ignore[arg-type]


def train(
    mesh: ProcessMesh,
    settings: list[str],
    micro_batches: int,
    graphs: Callable[[nn.Module], StepGraphs] | None,
    dtype: str,
) -> tuple[list[StepNumbers[float]], list[Tensor]]:
    """The numbers of all steps, and the weights after the last."""
    # What was compiled for other models decides which sizes of the next one are dynamic, and kernels with dynamic sizes
    # may round otherwise.
    torch.compiler.reset()
    backend = "sp=dp" if mesh.sp_size == 1 else "sp=zeco"
    # Compiled twice, a model may get kernels that round differently: noise decides between equally fast ones.
    fixed = ["name=graphs", "train.deterministic=true"]
    config = load_config(["model=gla_tiny", f"train.dtype={dtype}", backend, *fixed, *settings])
    compute = config.train.dtype.compute
    scan = connect_model(config.sp, config.model, mesh, TOKENS, compute, deterministic=config.train.deterministic)
    model = build_model(config.model, config.train, config.parallel.strategy, mesh, seed=0)
    optimizer = build_optimizer(parameter_rules(model), config.optim, compute)
    step = TrainingStep(
        model,
        optimizer,
        scan,
        mesh,
        strategy=config.parallel.strategy,
        grad_clip=1.0,
        tokens_per_step=TOKENS,
        graphs=None if graphs is None else graphs(model),
    )
    numbers = []
    for number in range(STEPS):
        set_learning_rate(optimizer, 1e-3 * (number + 1))
        step.zero_grad()
        for index in range(micro_batches):
            sequence = number * micro_batches + index
            segments = batches(sequence, config.data.reset_state_at_document, config.train.segments, mesh)
            step.backward(segments, last=index == micro_batches - 1)
        numbers.append(step.update().read())
    scan.drain()
    return numbers, [parameter.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def check_same_bits(mesh: ProcessMesh, settings: list[str], micro_batches: int, graphs: Any, dtype: str) -> None:
    numbers, weights = train(mesh, settings, micro_batches, graphs, dtype)
    expected, expected_weights = train(mesh, settings, micro_batches, None, dtype)
    assert numbers == expected, (settings, micro_batches)
    assert all(torch.equal(*pair) for pair in zip(weights, expected_weights, strict=True)), (settings, micro_batches)
    assert len({each.loss for each in numbers}) == STEPS


def run_again(rank: int, world_size: int, cases: list[list[str]], released: int | None = None) -> None:
    """A case has three micro-batches or one, in turns; that `released` loses its graphs after a replayed step."""
    mesh = init_mesh(Launch(rank, world_size, rank), world_size, torch.device("cpu"), timedelta(seconds=60))
    for index, settings in enumerate(cases):
        made: list[RunAgain] = []
        segments = next((int(s.partition("=")[2]) for s in settings if s.startswith("train.segments=")), 1)

        def graphs(model: nn.Module, made: list[RunAgain] = made, index: int = index) -> RunAgain:
            made.append(RunAgain(model, released=index == released))
            return made[0]

        micro_batches = (3, 1)[(index + segments // 4) % 2]
        check_same_bits(mesh, ["model.num_layers=2", *settings], micro_batches, graphs, "fp32")
        # A first and a second pass of each segment but the last, which has one; and the norm.
        steps = 1 if index == released else STEPS - WARM_UP
        assert made[0].runs == steps * (micro_batches * (2 * segments - 1) + 1), settings


def test_steps_read_all_that_changes_from_tensors() -> None:
    """Of one rank, which sums its gradients in one buffer; lab/campaigns/cases/test_graphs.py has the others."""
    run_distributed(run_again, 1, [[], []], 1)


def test_what_cannot_be_captured_is_said() -> None:
    plain = ["model=gla_tiny", "name=graphs"]
    assert capture_problem(load_config(plain)) is None
    assert capture_problem(load_config([*plain, "train.segments=2"])) is None
    documents = [*plain, "data.reset_state_at_document=true"]
    assert capture_problem(load_config(documents)) is None
    assert capture_problem(load_config([*documents, "model.attn.every=2"])) is not None


def test_replays_are_said_once_after_first_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "zeco_train.training.graphs")
    graphs, lines = RunAgain(nn.Linear(2, 2)), []
    for _ in range(STEPS):
        graphs.begin_step()
        graphs.run("reduce", lambda: (torch.ones(1),))
        lines.append(len(caplog.messages))
    assert lines == [0] * (WARM_UP + 1) + [1] * (STEPS - WARM_UP - 1)
    assert caplog.messages == [f"{REPLAYS_BEGIN}; CUDA graphs so far: 1"]
    assert graphs.runs == STEPS - WARM_UP


def test_failed_capture_ends_with_advice() -> None:
    model = nn.Linear(2, 2)
    with mock.patch.object(torch.cuda, "Stream"), mock.patch.object(torch.cuda, "graph_pool_handle"):
        graphs = StepGraphs(model, torch.device("cpu"))

    def capture(*arguments: Any, **settings: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def work() -> tuple[Tensor, ...]:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    for _ in range(WARM_UP + 1):
        graphs.begin_step()
    with (
        mock.patch.object(graphs, "_forget_events"),
        mock.patch.object(graphs, "_on_stream", nullcontext),
        mock.patch.object(torch.cuda, "CUDAGraph"),
        mock.patch.object(torch.cuda, "graph", capture),
        pytest.raises(ConfigError, match=r"^train.cuda_graphs=auto: .*\(operation not permitted\)"),
    ):
        graphs.run("passes", work)
