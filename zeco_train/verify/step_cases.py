"""Training steps of tiny models on ranks of `verify`'s own, in fp64, against one rank.

The trainer's own step, loader and parallel strategies run on 4 ranks; the other side is the whole model on one rank:
whole sequences, autograd, no segments, no recomputation, no FSDP2, and clipping as written below.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.loader.batches import DataSplit, SequenceSource
from data.loader.loader import SequenceLoader
from data.loader.masking import TaskConfig, TaskName
from data.loader.sequences import Source, for_task
from data.store import TokenStore
from data.store.documents import Documents
from data.store.writer import StoreWriter
from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.mixer_registry import MIXERS, unmasked_mixers
from models.mixers.gla import GLAConfig
from models.parameters import parameter_rules
from models.spec import spec_of
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import Exchange
from zeco_train.sp.attention.method_registry import METHODS, AttentionChoice
from zeco_train.sp.backend_registry import SHARING
from zeco_train.sp.exchange import connect_model, local_exchange
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.training.build import build_model
from zeco_train.training.config import Dtype, TrainConfig
from zeco_train.training.optim.optimizer_registry import OPTIMIZERS, OptimConfig, OptimizerName, build_optimizer
from zeco_train.training.step import TrainingStep
from zeco_train.verify.own_ranks import HandIn, Team
from zeco_train.verify.report import Deviation, VerifyRow
from zeco_train.verify.team_cases import SCANS, Cell, cover_pairs

SIZE = 4
STEPS = 2
# Divisible by ranks × segments; no shard is a multiple of a chunk.
SEQ_LEN = 96
_SEED, _VOCAB = 3, 29
_GRAD_CLIP = 1.0
# Each step's Adam divides by roots of sums of squares, which enlarges rounding; 1e-12 at most was seen.
LIMIT = 1e-10
# Document starts, by sequence in turn: at an edge of two shards and inside of them, over whole shards, many, none.
_STARTS = ((0, 24, 30, 72, 73), (0, 7, 48), (0, 1, 2, 11, 12, 13, 47, 95), (), (5, 85))
# Weights are ten times larger than usual, so that every path matters; states live long.
_WIDTHS = GLAConfig(
    vocab_size=_VOCAB,
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
# What a mixer needs besides: two heads of Mamba-2 share keys and queries.
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 6, "head_dim": 8, "n_groups": 3, "state_size": 5, "intermediate_size": 0},
    "gsa": {"expand_v": 1.0, "num_slots": 7},
}
_ATTN = AttnConfig(every=2, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True, gate=True)


@dataclass(frozen=True)
class StepCase:
    """Training of one model.

    Attributes:
        mixer: its name; with `attention` every second layer is softmax attention.
        scan: a key of `verify.team_cases.SCANS`.
        sp_size: ranks that share a sequence.
        window: of softmax attention.
        masked: the model reads in both directions, and learns masked tokens.
        micro_batches: of a step, on each rank.
        shard_size, strategy, recompute, segments, documents, optim: settings of the trainer.
    """

    mixer: str
    scan: str
    _: dataclasses.KW_ONLY
    sp_size: int = SIZE
    strategy: Strategy = Strategy.zero2
    shard_size: int = -1
    recompute: Recompute = Recompute.none
    segments: int = 1
    documents: bool = False
    micro_batches: int = 2
    optim: str = "adamw"
    attention: str | None = None
    window: int | None = None
    masked: bool = False

    @property
    def model(self) -> LanguageModelConfig:
        known = MIXERS[self.mixer].config_class
        widths = {each.name for each in dataclasses.fields(LanguageModelConfig)} | {"expand_k", "expand_v"}
        shared = {
            each.name: getattr(_WIDTHS, each.name)
            for each in dataclasses.fields(known)
            if each.name in widths - {"mixer", "name"} or each.name in ("gate_low_rank_dim", "gate_logit_normalizer")
        }
        attn = AttnConfig() if self.attention is None else replace(_ATTN, window=self.window)
        return known(**{**shared, "attn": attn, "causal": not self.masked, **_OWN.get(self.mixer, {})})

    @property
    def global_batch(self) -> int:
        """Two sequences on each rank."""
        return 2 * SIZE // self.sp_size

    @property
    def optimizer(self) -> OptimConfig:
        return OptimConfig(lr=1e-2, name=OptimizerName[self.optim])


AXES: dict[str, Sequence[Any]] = {
    "sp_size": [4, 2],
    "recompute": [*Recompute],
    "segments": [1, 2, 4],
    "documents": [False, True],
    "micro_batches": [1, 2],
    "is_hybrid": [False, True],
}
# In turn: they meet in cases of their own, or hardly touch each other. Strategies with their shard sizes: -1 is the
# strategy's default.
_SHARDINGS = [*((each, -1) for each in Strategy), (Strategy.zero3, 2)]
_SCANS = [*(name for name in SHARING if name != "zeco"), "zeco", "chain/2", "two_shot", "doubling", "lane, 2 a node"]
_WINDOWS = (None, 7, 60, 7)


def _mixers_in_segments() -> list[str]:
    # Each with states of its own between segments: the first of those with equal operators and inputs of layers.
    found: dict[tuple[object, ...], str] = {}
    for name, mixer in MIXERS.items():
        config = StepCase(name, "dp").model
        (block,) = spec_of(config).blocks.values()
        with torch.device("meta"):
            reads_positions = mixer(config, 0).reads_positions
        found.setdefault((*block.operators, reads_positions, mixer.shared is not None), name)
    return [*found.values()]


def step_cases() -> list[StepCase]:
    """All cases: mixers in segments, then pairs with the other mixers; and one with masked tokens."""
    turns = {axis: itertools.cycle(values) for axis, values in AXES.items()}
    given: list[Cell] = []
    in_segments = _mixers_in_segments()
    for number, _ in enumerate(in_segments):
        cell = {axis: next(turn) for axis, turn in turns.items()}
        cell |= {"segments": 2 + 2 * (number % 3 == 2), "is_hybrid": False, "documents": number // 2 % 2 == 0}
        cell |= {"micro_batches": 2} if cell["documents"] else {}
        given.append(cell if number % 2 else cell | {"recompute": Recompute.full})
    # Softmax layers replayed within documents.
    replayed = {"is_hybrid": True, "documents": True, "micro_batches": 2, "segments": 1}
    given.append({"sp_size": SIZE, "recompute": Recompute.full, **replayed})
    mixers = itertools.chain(in_segments, itertools.cycle([name for name in MIXERS if name not in in_segments]))
    scans, methods = itertools.cycle(_SCANS), itertools.cycle(METHODS)
    windows, shardings = itertools.cycle(_WINDOWS), itertools.cycle(_SHARDINGS)
    optimizers = itertools.cycle((*OPTIMIZERS, *OPTIMIZERS, "adamw"))
    cases = []
    for cell in (*given, *cover_pairs(AXES, lambda cell: not (cell["is_hybrid"] and cell["segments"] > 1), given)):
        strategy, shard_size = next(shardings)
        if cell.pop("is_hybrid"):
            cell |= {"attention": next(methods), "window": next(windows)}
        scan, optim = next(scans), next(optimizers)
        cases.append(StepCase(next(mixers), scan, strategy=strategy, shard_size=shard_size, optim=optim, **cell))
    return [*cases, StepCase(unmasked_mixers()[0], next(scans), masked=True, recompute=Recompute.full)]


# By the number of ranks. Gradients of one rank are summed by code of their own; two are the fewest that exchange them.
FEWER_RANKS = {1: StepCase("gla", "zeco", sp_size=1, segments=2), 2: StepCase("gla", "zeco", sp_size=2)}


@dataclass
class CaseResult:
    """Losses and norms by name, gradients of the first step, weights after the last; the same on every rank."""

    numbers: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    weights: dict[str, NDArray[np.float64]] = field(default_factory=dict)


def run_step_cases(cases: Sequence[StepCase], rank: int, size: int, timeout: timedelta, hand_in: HandIn) -> None:
    """The cases on ranks of `rows_of_own_ranks`: `SIZE` of them, or as many as of `FEWER_RANKS`."""
    team = Team.make(range(size), rank, timeout)
    launch, device = Launch(rank, size, rank), torch.device("cpu")
    meshes = {sp_size: init_mesh(launch, sp_size, device, timeout) for sp_size in {case.sp_size for case in cases}}
    with tempfile.TemporaryDirectory(prefix="zeco-verify-") as folder:
        store = write_store(Path(folder) / "store")
        wanted = [*dict.fromkeys(map(_alone, cases))]
        expected = dict(zip(wanted, team.share([partial(train_alone, case, store) for case in wanted]), strict=True))
        for case in cases:
            result = train(case, meshes[case.sp_size], store)
            row = _compare(case, result, expected[_alone(case)], team)
            if rank == 0:
                hand_in(row)


def _alone(case: StepCase) -> StepCase:
    # The case without all that may not change its results.
    return StepCase(
        case.mixer,
        "dp",
        sp_size=case.sp_size,
        documents=case.documents,
        optim=case.optim,
        attention=None if case.attention is None else "one rank",
        window=case.window,
        masked=case.masked,
    )


def _compare(case: StepCase, result: CaseResult, expected: CaseResult, team: Team) -> VerifyRow:
    deviations = {
        name: Deviation(abs(number - expected.numbers[name]) / abs(expected.numbers[name]))
        for name, number in result.numbers.items()
    }
    for name in ("gradients", "weights"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        errors = {of: _relative(ours.get(of, np.full(1, np.nan)), x) for of, x in theirs.items()}
        worst = max(errors, key=lambda of: math.inf if math.isnan(errors[of]) else errors[of])
        deviations[name] = Deviation(errors[worst], where=worst)
    words = [f"{case.mixer} model" + f" and softmax by {case.attention}" * (case.attention is not None)]
    words += [f"window {case.window}"] if case.window else []
    words += [case.strategy.value + (f" of {case.shard_size}" if case.shard_size > 0 else "")]
    words += [f"recompute {case.recompute.value}"] * (case.recompute is not Recompute.none)
    words += [f"{case.segments} segments"] * (case.segments > 1)
    words += ["documents"] * case.documents + ["masked tokens"] * case.masked
    words += [f"{case.micro_batches} micro-batches"] * (case.micro_batches > 1) + [case.optim]
    return VerifyRow(
        "fp64",
        SEQ_LEN // case.sp_size,
        case.sp_size,
        ", ".join(words),
        case.scan,
        tuple(team.gather(deviations)),
        LIMIT,
        on_own_ranks=True,
        uses=(
            f"mixer {case.mixer}",
            f"scan {case.scan.split('/')[0].split(',')[0]}",
            f"strategy {case.strategy.value}",
            f"optimizer {case.optim}",
            f"recompute {case.recompute.value}",
        ),
    )


def _relative(x: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    # A lower bound of one layer has no gradient.
    off, norm = float(np.linalg.norm(x - expected)), float(np.linalg.norm(expected))
    return 0.0 if off == 0 else off / norm if norm else math.inf


def write_store(folder: Path) -> Path:
    """A store of ten sequences with documents, and one more token."""
    starts = [turn * SEQ_LEN + start for turn, of_one in enumerate(_STARTS * 2) for start in of_one]
    num_tokens = 2 * len(_STARTS) * SEQ_LEN + 1
    tokens = np.random.default_rng(0).integers(3, _VOCAB, num_tokens)
    with StoreWriter(folder, vocab_size=_VOCAB, eos_id=1, tokenizer={"kind": "bytes"}) as writer:
        writer.append(tokens, np.diff([*starts, num_tokens]).tolist())
        writer.finish("sources")
    return folder


def _loader(case: StepCase, split: DataSplit, store: Path) -> SequenceLoader:
    task = TaskConfig(TaskName.mlm if case.masked else TaskName.lm, mask_fraction=0.3)
    sources: Sequence[SequenceSource] = [Source(Documents(TokenStore.open(store)))]
    return SequenceLoader(for_task(sources, task, _VOCAB), split, seed=_SEED, global_batch=case.global_batch)


def train(case: StepCase, mesh: ProcessMesh, store: Path) -> CaseResult:
    """Train by the trainer's step. Collective over the mesh."""
    settings = TrainConfig(dtype=Dtype.fp64, segments=case.segments, recompute=case.recompute)
    model = build_model(case.model, settings, case.strategy, mesh, _SEED, case.shard_size)
    config = SCANS[case.scan]
    if case.attention is not None:
        config = replace(config, attention=AttentionChoice[case.attention])
    exchange, meter = connect_model(config, case.model, mesh, SEQ_LEN, torch.float64), ExposedMeter()
    step = TrainingStep(
        model,
        build_optimizer(parameter_rules(model), case.optimizer, torch.float64),
        exchange,
        mesh,
        strategy=case.strategy,
        grad_clip=_GRAD_CLIP,
        tokens_per_step=case.global_batch * SEQ_LEN,
    )
    micro_batch = 2 // case.micro_batches
    loader = _loader(case, mesh.split(SEQ_LEN, micro_batch, documents=case.documents, segments=case.segments), store)
    result = CaseResult()
    for number in range(STEPS):
        step.zero_grad()
        with meter.measuring():
            for micro_step in range(loader.micro_steps):
                last = micro_step == loader.micro_steps - 1
                batches = [loader.batch(number * case.global_batch, micro_step, part) for part in range(case.segments)]
                step.backward(batches, last=last)
        if number == 0:
            result.gradients = {name: _full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        numbers = step.update().read()
        result.numbers |= {f"loss of step {number}": numbers.loss, f"norm of step {number}": numbers.grad_norm}
    held_out = torch.zeros((), dtype=torch.float64)
    for micro_step in range(loader.micro_steps):
        held_out += step.forward.total_loss([loader.batch(0, micro_step, part) for part in range(case.segments)])
    dist.all_reduce(held_out)
    result.numbers["loss of validation"] = held_out.item()
    result.weights = {name: _full(p) for name, p in model.named_parameters()}
    exchange.drain()
    return result


def train_alone(case: StepCase, store: Path) -> CaseResult:
    """Train on this rank alone, whole sequences at once."""
    model = spec_of(case.model).allocate(torch.float64, torch.device("cpu"))
    model.init_weights(_SEED)
    optimizer = build_optimizer(parameter_rules(model), case.optimizer, torch.float64)
    exchange, batch = local_exchange(), 1 if case.documents else case.global_batch
    loader = _loader(case, DataSplit(SEQ_LEN, batch, reset_state_at_document=case.documents), store)
    result = CaseResult()
    for number in range(STEPS):
        optimizer.zero_grad()
        loss: Any = sum(_losses(model, exchange, loader, number * case.global_batch))
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if number == 0:
            result.gradients = {name: grad.numpy().copy() for name, grad in grads.items()}
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        # In fp32, as the trainer hands it to the optimizer.
        divisor = max(1.0, float(((norm + 1e-6) / _GRAD_CLIP).float()))
        for grad in grads.values():
            grad /= divisor
        optimizer.step()
        result.numbers |= {f"loss of step {number}": loss.item(), f"norm of step {number}": norm.item()}
    with torch.no_grad():
        tokens = float(loader.batch(0, 0).step_labels or case.global_batch * SEQ_LEN)
        result.numbers["loss of validation"] = tokens * float(sum(_losses(model, exchange, loader, 0)))
    result.weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return result


def _losses(model: LanguageModel, exchange: Exchange, loader: SequenceLoader, consumed: int) -> Iterator[Tensor]:
    # Each batch's part of the mean loss of a step.
    for micro_step in range(loader.micro_steps):
        batch = loader.batch(consumed, micro_step)
        labels = batch.step_labels or loader.global_batch * SEQ_LEN
        loss: Any = model(batch.input_ids, batch.position.over(exchange), batch.labels)
        yield loss / labels


def _full(tensor: Tensor) -> NDArray[np.float64]:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()
