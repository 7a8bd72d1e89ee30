"""Optimizer steps of a tiny model inside the ranks of `run_distributed`, without a run folder, so that many fit into
one spawn."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader.batches import DataSplit
from data.loader.loader import SequenceLoader
from data.loader.sequences import Source
from data.store import TokenStore
from data.store.documents import Documents
from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.mixers.gla import GLAConfig
from models.parameters import parameter_rules
from tests.support.comparison import largest, relative
from tests.support.sp_reference import RecordedExchange
from tests.support.stores import write_tokens
from tests.support.training import full
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.distributed.owned_matrices import local
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig
from zeco_train.training.optim.optimizer_registry import OptimConfig, build_optimizer
from zeco_train.training.step import TrainingStep

# All dimensions differ. Weights are ten times larger than usual, so that every path matters; states live long enough to
# cross several segments.
TINY = GLAConfig(
    vocab_size=29,
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    intermediate_size=20,
    expand_k=0.5,
    expand_v=1.25,
    gate_low_rank_dim=5,
    gate_logit_normalizer=16,
    initializer_range=0.2,
)
# Divisible by ranks × segments for 1, 2, 3 ranks and 1, 2, 4, 8 segments; no shard is a multiple of a chunk of 64.
SEQ_LEN = 240
GLOBAL_BATCH = 2
# The strategies by FSDP2.
BY_FSDP = [strategy for strategy in Strategy if strategy is not Strategy.torch_ddp]
# Document starts in sequences of that length: at the edge between two segments of four and inside them, then from
# inside a segment over two whole ones of eight; at the middle, which is an edge of every cut; many tiny ones; and none
# but one that began in an earlier sequence.
STARTS = ((0, 60, 75, 180, 181), (0, 7, 120), (0, 1, 2, 3, 29, 30, 31, 119, 121, 239), (), (5, 210))


@dataclass(frozen=True)
class Case:
    """Configuration of the steps.

    Attributes:
        micro_batch: sequences per pass; 1 with `documents`.
        compiler: `torch.compile`'s backend; None means eager.
        model: its shape.
        num_layers: of the model, instead of the shape's.
    """

    strategy: Strategy = Strategy.zero2
    _: KW_ONLY
    shard_size: int = -1
    global_batch: int = GLOBAL_BATCH
    matmul: Matmul = Matmul.bf16
    recompute: Recompute = Recompute.none
    segments: int = 1
    documents: bool = False
    micro_batch: int = 1
    steps: int = 3
    compiler: Any = None
    model: LanguageModelConfig = field(default_factory=lambda: TINY)
    num_layers: int = TINY.num_layers
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2))


@dataclass
class Result:
    """Results of the steps, unsharded and the same on every rank.

    Attributes:
        losses, norms: of each step.
        gradients: of the first step.
        parameters: after the last step.
        val_loss: of the first sequence, with the last parameters, summed over its tokens.
        launches: scans per step, forward and reverse.
        held: elements of the parameters on this rank.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    val_loss: float = 0.0
    launches: tuple[int, int] = (0, 0)
    held: int = 0


def write_documents(folder: Path) -> Path:
    """A store of two rounds of `STARTS`: ten sequences, and one more token."""
    starts = [round_ * SEQ_LEN + start for round_, of_one in enumerate(STARTS * 2) for start in of_one]
    num_tokens = 2 * len(STARTS) * SEQ_LEN + 1
    lengths = np.diff([*starts, num_tokens]).tolist()
    tokens = np.random.default_rng(0).integers(2, TINY.vocab_size, num_tokens)
    return write_tokens(folder, tokens, lengths, TINY.vocab_size)


def make_mesh(rank: int, world_size: int, sp_size: int) -> ProcessMesh:
    return init_mesh(Launch(rank, world_size, rank), sp_size, torch.device("cpu"), timedelta(seconds=60))


def make_step(case: Case, scan: Any, mesh: ProcessMesh, grad_clip: float = 1.0) -> tuple[LanguageModel, TrainingStep]:
    """A model in fp64, and its step."""
    train = TrainConfig(dtype=Dtype.fp64, segments=case.segments, recompute=case.recompute, matmul=case.matmul)
    config = dataclasses.replace(case.model, num_layers=case.num_layers)
    model = build_model(config, train, case.strategy, mesh, 0, case.shard_size)
    if case.compiler is not None:
        model.compile_parts(backend=case.compiler)
    step = TrainingStep(
        model,
        build_optimizer(parameter_rules(model), case.optim, torch.float64),
        scan,
        mesh,
        strategy=case.strategy,
        grad_clip=grad_clip,
        tokens_per_step=case.global_batch * SEQ_LEN,
    )
    return model, step


def make_loader(case: Case, mesh: ProcessMesh, store: str | Path) -> SequenceLoader:
    split = DataSplit(
        SEQ_LEN, case.micro_batch, mesh.dp_rank, mesh.dp_size, mesh.sp_rank, mesh.sp_size, case.documents, case.segments
    )
    sources = [Source(Documents(TokenStore.open(Path(store))))]
    return SequenceLoader(sources, split, seed=3, global_batch=case.global_batch)


def run_steps(case: Case, scan: RecordedExchange, mesh: ProcessMesh, store: str | Path) -> Result:
    """Train for the configured number of steps. Collective."""
    loader = make_loader(case, mesh, store)
    model, step = make_step(case, scan, mesh)
    result = Result()
    for number in range(case.steps):
        scan.events.clear()
        step.zero_grad()
        for micro_step in range(loader.micro_steps):
            first = number * case.global_batch
            segments = [loader.batch(first, micro_step, segment) for segment in range(case.segments)]
            step.backward(segments, last=micro_step == loader.micro_steps - 1)
        launches = tuple(scan.events.count(f"launch {direction}") for direction in ("forward", "reverse"))
        assert number == 0 or launches == result.launches, (launches, result.launches)
        result.launches = launches
        if number == 0:
            result.gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        numbers = step.update().read()
        result.losses.append(numbers.loss)
        result.norms.append(numbers.grad_norm)
    # Before the validation, after which zero2 keeps whole parameters.
    result.held = sum(local(parameter).numel() for parameter in model.parameters())
    val_loss = step.forward.total_loss([loader.readers[0].read([0], segment) for segment in range(case.segments)])
    dist.all_reduce(val_loss)
    result.val_loss = val_loss.item() / mesh.dp_size
    result.parameters = {name: full(p).clone() for name, p in model.named_parameters()}
    return result


def worst(result: Result, expected: Result) -> dict[str, float]:
    """Maximum relative deviation of each quantity, NaN if one is; a tensor's is the norm of the difference."""
    errors = {"val_loss": relative(result.val_loss, expected.val_loss)}
    for name in ("losses", "norms"):
        pairs = zip(getattr(result, name), getattr(expected, name), strict=True)
        errors[name] = largest(relative(ours, theirs) for ours, theirs in pairs)
    for name in ("gradients", "parameters"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        errors[name] = largest(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in theirs)
    return errors


def check(result: Result, expected: Result, tolerance: float, where: str) -> None:
    for name, error in worst(result, expected).items():
        assert error <= tolerance, f"{name} off by {error:.1e}: {where}"  # a NaN fails too
