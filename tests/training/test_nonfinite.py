"""Non-finite steps: reported, and under `train.nonfinite=skip:N` skipped without any update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader.batches import Batch
from models.language_model import LanguageModel
from tests.support.distributed import run_distributed
from tests.support.training import SMALL, train
from tests.training.test_graphs import RunAgain
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.training import build
from zeco_train.training.build import build_model
from zeco_train.training.config import skip_limit
from zeco_train.training.forward import SequenceForward
from zeco_train.training.step import PendingNumbers, TrainingStep

pytestmark = pytest.mark.numeric

SETTINGS = ["sp=zeco", "sched=constant", "data.seq_len=96", "train.eval_sequences=0"]
GRADIENT, ACTIVATION = "model.layers.0.attn.o_proj.weight", "model.layers.1.attn.o_proj"


@contextlib.contextmanager
def _poison(gradient_ids: list[int], activation_ids: list[int], rank: int) -> Iterator[None]:
    """Set a gradient of rank 1 and a layer's input on rank 0 to NaN whenever certain sequences are trained on."""
    backward, forward = TrainingStep.backward, SequenceForward.loss

    def bad_backward(self: TrainingStep, segments: list[Batch], **options: Any) -> bool:
        done = backward(self, segments, **options)
        if rank == 1 and segments[0].sequence_ids == gradient_ids:
            grad: Any = self.model.get_parameter(GRADIENT).grad
            grad.to_local().fill_(torch.nan)
        return done

    def bad_forward(self: SequenceForward, batch: Batch, *arguments: Any) -> torch.Tensor:
        if rank != 0 or batch.sequence_ids != activation_ids:
            return forward(self, batch, *arguments)
        module = self.model.get_submodule(ACTIVATION)
        handle = module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * torch.nan, *inputs[1:]))
        try:
            return forward(self, batch, *arguments)
        finally:
            handle.remove()

    with (
        mock.patch.object(TrainingStep, "backward", bad_backward),
        mock.patch.object(SequenceForward, "loss", bad_forward),
    ):
        yield


@contextlib.contextmanager
def _without_updates(steps: set[int]) -> Iterator[None]:
    update, count = TrainingStep.update, 0

    def maybe(self: TrainingStep) -> PendingNumbers:
        nonlocal count
        count += 1
        if count not in steps:
            return update(self)
        with mock.patch.object(self.optimizer, "step"):
            return update(self)

    with mock.patch.object(TrainingStep, "update", maybe):
        yield


def skipping(rank: int, world_size: int, folder: str, *settings: str) -> dict[str, Any]:
    """A run without the updates of steps 3 and 4, and one that skips them."""

    def run(name: str, policy: str) -> dict[str, Any]:
        return train(rank, world_size, f"{folder}/{name}", "train.steps=5", f"train.nonfinite={policy}", *settings)

    with _without_updates({3, 4}):
        reference = run("reference", "stop")
    with poisoned(reference, rank):
        return {"reference": reference, "skipped": run("skipped", "skip:2")}


def poisoned(reference: dict[str, Any], rank: int) -> contextlib.AbstractContextManager[None]:
    """The last micro-batch of step 3, when gradients are complete, and the first of step 4."""
    _, _, third, fourth, _ = reference["sequence_ids"]
    return _poison(third[-1:], fourth[:1], rank)


@pytest.mark.slow
def test_skipped_steps_equal_run_without_their_updates(tmp_path: Path) -> None:
    check_skipped(
        run_distributed(skipping, 2, str(tmp_path), *SETTINGS, "checkpoint.every=0", "data.global_batch=2"),
        ["skipped"],
        tmp_path,
    )


def check_skipped(by_rank: list[dict[str, Any]], names: list[str], folder: Path) -> str:
    """These runs have the bits of the reference; returns what is said of the activation."""
    expected = by_rank[0]["reference"]
    rows = by_rank[0]["skipped"]["rows"]
    for name in names:
        for rank in range(2):
            mine, theirs = by_rank[rank][name]["parameters"], expected["parameters"]
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs), (name, rank)
        found = by_rank[0][name]["rows"]
        assert [row["step"] for row in found] == list(range(1, 6))
        for key in ("loss", "grad_norm", "lr", "tokens"):
            same = [row[key] for row in found if row["step"] not in (3, 4)]
            assert same == [row[key] for row in expected["rows"] if row["step"] not in (3, 4)], (name, key)
        assert [row.get("skipped_steps") for row in found] == [None, None, 1, 2, 2]
    assert by_rank[0]["skipped"]["sequence_ids"] == expected["sequence_ids"]

    gradient, activation = rows[2]["nonfinite"], rows[3]["nonfinite"]
    assert [row.get("nonfinite") for row in rows] == [None, None, gradient, activation, None]
    # FSDP2 gives the second of two ranks the second half of the rows.
    where = f"the gradient of {GRADIENT}, on rank 1: at [24, 0]; 1152 NaN and 0 infinite of 1152 values"
    assert gradient == f"the gradient norm is nan; the first non-finite tensor is {where}"
    where = f"the output of {ACTIVATION} (gla), on rank 0: token 0 of sequence {expected['sequence_ids'][3][0]} "
    assert activation.startswith(f"the loss is nan; the first non-finite tensor is {where}")
    assert rows[2]["loss"] == expected["rows"][2]["loss"]
    assert (rows[2]["grad_norm"], rows[3]["loss"]) == (None, None)
    log = (folder / "skipped" / "logs" / "rank_0.log").read_text()
    assert f"step 3 is skipped (1 in a row, at most 2): {gradient}" in log
    assert f"step 4 is skipped (2 in a row, at most 2): {activation}" in log
    return activation


class Fault(NamedTuple):
    """A NaN in what one rank computes in a step.

    Attributes:
        module: whose output it is in, for the module after it; or with `backward` in that output's gradient.
        token: of the rank's tokens of a segment.
        lasts: also when the step is repeated.
    """

    step: int
    module: str
    rank: int
    token: int
    backward: bool = False
    lasts: bool = True


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, grad_factors: Tensor) -> Tensor:
        ctx.save_for_backward(grad_factors)
        return x * factors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (grad_factors,) = ctx.saved_tensors
        return grad * grad_factors, None, None


class _Planted:
    """Scales outputs of modules by tensors that compiled and captured steps read."""

    def __init__(self, model: LanguageModel, faults: Sequence[Fault], rank: int, tokens: int) -> None:
        self.model, self.rank, self.step = model, rank, 0
        device, dtype = next(model.parameters()).device, torch.float32
        self.factors = {fault: torch.ones(2, tokens, 1, device=device, dtype=dtype) for fault in faults}
        for fault in faults:
            model.get_submodule(fault.module).register_forward_hook(partial(self._scale, fault))

    def _scale(self, fault: Fault, module: nn.Module, inputs: Any, output: Any) -> Any:
        y, *rest = output if isinstance(output, tuple) else (output,)
        y = _Scale.apply(y, *self.factors[fault].to(y.dtype))
        return (y, *rest) if isinstance(output, tuple) else y

    def begin_step(self) -> None:
        self.step += 1
        for fault, factors in self.factors.items():
            factors.fill_(1)
            if (fault.step, fault.rank) == (self.step, self.rank):
                factors[int(fault.backward), fault.token] = torch.nan

    def repeat(self) -> None:
        for fault, factors in self.factors.items():
            if not fault.lasts:
                factors.fill_(1)


def _addresses(
    rank: int, world_size: int, folder: str, settings: list[str], faults: list[Fault], graphs: bool
) -> dict[str, Any]:
    """Train with faults, and in the last step with a NaN in the embedding of the id of its first token."""
    config = load_config([*SMALL, *SETTINGS, *settings, "name=nan"])
    split = config.data.seq_len // config.train.segments
    tokens, steps = split // (1 if config.sp.backend.value == "dp" else world_size), config.train.steps
    planted: list[_Planted] = []
    spoilt: list[int] = []
    zero_grad, launched, backward = TrainingStep.zero_grad, TrainingStep.launched, TrainingStep.backward

    def build_and_plant(*arguments: Any) -> LanguageModel:
        model = build_model(*arguments)
        planted.append(_Planted(model, faults, rank, tokens))
        return model

    def begin_step(self: TrainingStep) -> None:
        planted[0].begin_step()
        zero_grad(self)

    def repeat(self: TrainingStep) -> contextlib.AbstractContextManager[None]:
        planted[0].repeat()
        return launched(self)

    def spoil(self: TrainingStep, segments: list[Batch], **options: Any) -> bool:
        # Before its first forward pass, which gathers the weights.
        if planted[0].step == steps and not spoilt:
            spoilt.append(steps)
            weight: Any = self.model.model.embeddings.weight
            own, row = weight.to_local().detach(), int(segments[0].input_ids[0, 0])
            if dist.get_world_size() > 1:
                found = [row]
                dist.broadcast_object_list(found)
                row = found[0] - (0 if len(own) == len(weight) else rank * len(own))
            if 0 <= row < len(own):
                own[row] = torch.inf
        return backward(self, segments, **options)

    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (build, "build_model", build_and_plant),
            (TrainingStep, "zero_grad", begin_step),
            (TrainingStep, "launched", repeat),
            (TrainingStep, "backward", spoil),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        # Inductor takes minutes, and what surrounds the compiled parts is the same.
        compiled = partialmethod(LanguageModel.compile_parts, backend="aot_eager")
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(LanguageModel, "compile_parts", compiled))
        if graphs:
            stack.enter_context(mock.patch.object(build, "build_graphs", lambda _, model, __: RunAgain(model)))
        result = train(rank, world_size, f"{folder}/run", *SETTINGS, *settings)
    log = Path(folder, "run", "logs", f"rank_{rank}.log").read_text()
    return {"rows": result["rows"], "sequence_ids": result["sequence_ids"], "log": log, "tokens": tokens}


SKIPPED = ["train.nonfinite=skip:9", "checkpoint.every=0", "data.global_batch=2"]
FAULTS = [
    Fault(1, "model.layers.0", 0, 5),
    Fault(2, "model.layers.1", 1, 7, backward=True),
    Fault(3, "model.layers.0", 1, 9, backward=True, lasts=False),
]
# With graphs, steps are replayed from the third on.
LATER = [fault._replace(step=fault.step + 3) for fault in FAULTS]


def check_addresses(
    folder: Path, settings: list[str], faults: list[Fault], ranks: int = 2, graphs: bool = False, **options: Any
) -> None:
    """Each fault is found, with the rest of the run as it would be without it."""
    first = faults[0].step
    settings = [f"train.steps={first + 3}", *SKIPPED, *settings]
    by_rank = run_distributed(_addresses, ranks, str(folder), settings, faults, graphs, **options)
    rows = by_rank[0]["rows"]
    assert [row["step"] for row in rows if "nonfinite" in row] == list(range(first, first + 4))
    forward, gradient, gone, weight = (row["nonfinite"] for row in rows[first - 1 :])
    segments = next((int(s.partition("=")[2]) for s in settings if s.startswith("train.segments=")), 1)

    def place(fault: Fault, segment: int, index: int) -> str:
        of_rank, is_whole = by_rank[fault.rank], "sp=dp" in settings
        shard = 0 if is_whole else fault.rank
        position = (segment * (1 if is_whole else ranks) + shard) * of_rank["tokens"] + fault.token
        return f"on rank {fault.rank}: token {position} of sequence {of_rank['sequence_ids'][fault.step - 1][index]}"

    begin = "the loss is nan; the first non-finite tensor is the input of model.layers.1, "
    assert forward.startswith(begin + place(faults[0], 0, 0)), forward
    begin = "the gradient norm is nan; the first non-finite tensor is the gradient of the output of model.layers.1, "
    # The last segment and the last of the micro-batch's sequences: gradients are looked at from the end.
    assert gradient.startswith(begin + place(faults[1], segments - 1, int("data.micro_batch=2" in settings))), gradient
    assert gone.startswith("the gradient norm is nan, but its passes, repeated eagerly, were finite on all ranks"), gone
    assert "The first non-finite gradient that the step had left is the gradient of model." in gone
    begin = "the loss is nan; the first non-finite tensor is the weight of model.embeddings.weight, on rank "
    assert weight.startswith(begin), weight
    assert "of those computed, the output of model.embeddings, on rank 0: token 0 of sequence " in weight
    if "data.reset_state_at_document=true" in settings:
        assert "of its document 0 (id " in weight
    if ranks == 1:
        return
    logs = [result["log"] for result in by_rank]
    assert "the loss is nan; first on this rank: input of model.layers.1: token " in logs[0]
    assert "norm is nan; first on this rank: gradient of the output of model.layers.1: token " in logs[1]
    # What the other rank got of it.
    nothing = "every tensor is finite"
    received = "state from earlier ranks in", "gradient of the state from later ranks in"
    if "model.attn.every=2" in settings:
        received = "output of attention in", "gradient of operand k of attention in"
    for what, symptom, log in zip(received, ("loss", "gradient norm"), reversed(logs), strict=True):
        own = nothing if "sp=dp" in settings else f"{what} model.layers.1.attn"
        assert f"the {symptom} is nan; first on this rank: {own}" in log


@pytest.mark.slow
def test_first_non_finite_tensor_has_an_address(tmp_path: Path) -> None:
    check_addresses(tmp_path, [], FAULTS)


@pytest.mark.parametrize(("policy", "limit"), [("stop", 0), ("skip:1", 1), ("skip:20", 20)])
def test_skip_limit_of_policies(policy: str, limit: int) -> None:
    assert skip_limit(policy) == limit


@pytest.mark.parametrize("policy", ["", "skip", "skip:", "skip:0", "skip:-1", "skip:1.5", "skip:x", "go on", "STOP"])
def test_invalid_policies_are_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="must be stop, or skip:N to leave out up to N ≥ 1 steps in a row"):
        skip_limit(policy)
