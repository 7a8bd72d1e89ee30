"""Where a loss or gradient norm that is NaN or infinite began: layer, tensor, rank and token.

Such a step never changes weights or optimizer state, so its passes can be run again on the same weights and batches,
with checks after each module, and around each operator and its scan. A loss that is not finite needs the forward
passes only. Ranks run the same code, so a check has the same number on all of them: the lowest number with a finding
is where it began, also if other ranks have since received it in a state.

The pass is launched kernel by kernel: compiled code and CUDA graphs hide what is inside of them. Blocks are recomputed
whatever the setting: the pass must fit beside the pool of the graphs, and eager code keeps more than compiled code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from data.loader.batches import Batch
from models.language_model import LanguageModel, LMHead
from zeco_train.distributed.owned_matrices import local
from zeco_train.distributed.parallelize import global_norm, reshard
from zeco_train.lifecycle.join import gather
from zeco_train.ops.loss import TokenScores
from zeco_train.ops.operator import arguments_of
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import ScanRequest, StateScan
from zeco_train.sp.backend import TappedScan
from zeco_train.training.step import TrainingStep

logger = logging.getLogger(__name__)


class Finding(NamedTuple):
    """A rank's first tensor that is not finite.

    `order` is the number of the check. Gradients go from later ranks to earlier ones. `where`: the place in the tensor.
    """

    order: int
    is_gradient: bool
    what: str
    where: str


def explain(
    step: TrainingStep,
    symptom: str,
    read: Callable[[int], Sequence[Batch]],
    micro_steps: int,
    *,
    with_backward: bool,
) -> str:
    """Run a step's passes once more, and find the first tensor that is not finite. Collective.

    Each rank logs its own finding. The gradients are undefined afterwards, as before a step.

    Args:
        step: after the passes of the step in question, with its gradients; weights are as they were in it.
        symptom: such as "the loss is nan".
        read: micro-batch → its segments, as `TrainingStep.backward` takes them.
        with_backward: also the backward passes; not needed if the loss is not finite.

    Returns:
        The symptom, the tensor with its layer, the rank, and the place in the tensor, as text; the same on every rank.
    """
    model, watch = step.model, _Watch(step.model)
    # Sharded weights, and the gradients that the step has left, before a forward pass gathers the parameters.
    weight, left = _first_parameter(model, "weight", 0), _first_parameter(model, "gradient", 0)
    with step.launched(), _recomputed(model):
        loss = _run(step, watch, read, micro_steps, with_backward)
        # A forward pass leaves weights gathered, and the gradients belong to their shards.
        reshard(model)
        value, repeated = global_norm(model) if with_backward else loss, watch.first
        if repeated is None and with_backward:
            # Spoilt after the pass had computed it: in the reduction over ranks.
            repeated = _first_parameter(model, "gradient", watch.checks)
    own = "every tensor is finite" if repeated is None else f"{repeated.what}{repeated.where}"
    logger.info("%s; first on this rank: %s", symptom, own)
    by_rank = gather((weight, repeated, left), step.mesh.world_size)
    firsts = [_earliest(of_kind) for of_kind in zip(*by_rank, strict=True)]
    return f"{symptom}{_describe(*firsts, is_finite=bool(value.isfinite()))}"


def _run(
    step: TrainingStep, watch: _Watch, read: Callable[[int], Sequence[Batch]], micro_steps: int, with_backward: bool
) -> Tensor:
    step.model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=step.mesh.device)
    with watch.watching(step):
        for micro_step in range(micro_steps):
            segments = read(micro_step)
            watch.begin(micro_step, segments[0])
            if with_backward:
                step.backward(segments, last=micro_step == micro_steps - 1)
            else:
                total += step.forward.total_loss(segments)
    dist.all_reduce(total)
    return total


def _earliest(by_rank: Sequence[Finding | None]) -> str | None:
    # Of equal findings, that of the rank from which the others got it.
    found = [(f.order, -rank if f.is_gradient else rank, rank, f) for rank, f in enumerate(by_rank) if f is not None]
    if not found:
        return None
    *_, rank, first = min(found)
    return f"{first.what}, on rank {rank}{first.where}"


def _describe(weight: str | None, repeated: str | None, left: str | None, *, is_finite: bool) -> str:
    if weight is not None:
        trace = "no tensor computed from it is" if repeated is None else f"of those computed, the {repeated}"
        return f"; the first non-finite tensor is the {weight}; {trace}"
    if repeated is not None:
        return f"; the first non-finite tensor is the {repeated}"
    if not is_finite:
        return ", though every tensor is finite: a sum over them overflowed"
    own = "" if left is None else f". The first non-finite gradient that the step had left is the {left}"
    cause = "suspect the hardware, a race, or compiled code or CUDA graphs if it ran these"
    return f", but its passes, repeated eagerly, were finite on all ranks: not reproducible; {cause}{own}"


def _first_parameter(model: nn.Module, kind: str, checks: int) -> Finding | None:
    # In order of use, of gradients in order of computation. Without communication: ranks stop their searches at
    # different tensors.
    parameters, is_gradient = list(model.named_parameters()), kind == "gradient"
    for position, (name, parameter) in enumerate(reversed(parameters) if is_gradient else parameters):
        tensor = parameter.grad if is_gradient else parameter
        if tensor is not None and not _is_finite(tensor):
            where = f": {_entry(tensor)}; {_count(tensor)}"
            return Finding(checks + 1 + position, is_gradient, f"{kind} of {name}", where)
    return None


@contextmanager
def _recomputed(model: LanguageModel) -> Iterator[None]:
    modes = [block.recompute for block in model.model.blocks()]
    model.set_recompute(Recompute.full)
    try:
        yield
    finally:
        for block, mode in zip(model.model.blocks(), modes, strict=True):
            block.recompute = mode


class _Watch:
    # Checks the tensors of passes through a model, in order of execution.
    def __init__(self, model: LanguageModel) -> None:
        self.first: Finding | None = None
        self.checks = 0
        self._model, self._names = model, {module: name for name, module in model.named_modules()}
        self._mixers = {
            self._names[block.attn]: model.config.mixer_of(layer) for layer, block in enumerate(model.model.blocks())
        }
        # Forward passes inside of a backward pass are replays, which leave out what is not read.
        self._in_backward = False
        # Modules that run, the innermost last; of a backward pass, the one whose output's gradient came last.
        self._running: list[str] = []
        self._last = ""
        self._hooks = ExitStack()
        self._hooked: set[int] = set()
        self._micro_step = 0
        self._batch: Batch | None = None
        self._input_ids = torch.empty(0, 0, dtype=torch.int64)
        self._offset = 0

    def begin(self, micro_step: int, batch: Batch) -> None:
        self._micro_step, self._batch = micro_step, batch

    @contextmanager
    def watching(self, step: TrainingStep) -> Iterator[None]:
        exchange = step.forward.exchange
        with self._hooks, _Operators(self), torch.compiler.set_stance("force_eager"):
            # Compiled code runs no hooks of inner modules.
            for module in self._names:
                before = module.register_forward_pre_hook(self._before)
                # First, while FSDP2's own hook has not freed the gathered weights yet.
                after = module.register_forward_hook(self._after, prepend=True)
                self._hooks.callback(before.remove)
                self._hooks.callback(after.remove)
            step.forward.exchange = exchange.wrapped(lambda scan: _WatchedScan(scan, self))
            try:
                yield
            finally:
                step.forward.exchange = exchange

    def check(self, what: str, place: str | None, tensor: Tensor, *, terms: Callable[[], Tensor] | None = None) -> None:
        # Args: the tensor's name, before that of `place`, the module or parameter that it belongs to (None: the running
        # module); the tensor, of which [B, T, ...] has tokens; the terms [B, T] that it is the sum of.
        self.checks += 1
        if self.first is None and not _is_finite(tensor):
            place, tensor = self._place() if place is None else place, tensor if terms is None else terms()
            where = f": {self._where(tensor)}; {_count(tensor)}"
            self.first = Finding(self.checks, self._in_backward, f"{what} {self._described(place)}", where)

    def check_forward(self, operator: str, operands: Mapping[str, Tensor], run: Callable[[], Any]) -> Any:
        if self._in_backward:
            return run()
        for name, tensor in operands.items():
            self.check(f"operand {name} of {operator} in", None, tensor)
        results = run()
        self.check(f"output of {operator} in", None, results[0])
        return results

    def check_backward(self, operator: str, names: Sequence[str], do: Tensor, run: Callable[[], Any]) -> Any:
        self.check(f"gradient of the output of {operator} in", None, do)
        results = run()
        grads = results[0] if isinstance(results[0], list) else results
        for name, grad in zip(names, grads, strict=True):
            self.check(f"gradient of operand {name} of {operator} in", None, grad)
        return results

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        name = self._names[module]
        self._running.append(name)
        if module is self._model:
            self._in_backward, self._input_ids, self._offset = False, inputs[0], inputs[1].start
        for x in inputs if not self._in_backward else ():
            if isinstance(x, Tensor) and x.is_floating_point():
                self.check("input of", name, x)
        # FSDP2 has gathered the weights of its unit, of which some are read without a call of their own module.
        for path, parameter in module.named_parameters(name):
            if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._hooks.callback(parameter.register_hook(partial(self.check, "gradient of", path)).remove)

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], results: Any) -> None:
        # Blocks and mixers return what they exchange with other ranks, too, of which a part is undefined in replays.
        output = results if isinstance(results, Tensor) else results[0]
        name = self._running.pop()
        if not self._in_backward:
            terms = partial(_token_losses, module, inputs) if isinstance(module, LMHead) else None
            self.check("output of", name, output, terms=terms)
        if output.requires_grad:
            output.register_hook(partial(self._check_output_gradient, name))
        if module is self._model:
            self._in_backward = True

    def _check_output_gradient(self, name: str, grad: Tensor) -> None:
        self._last = name
        self.check("gradient of the output of", name, grad)

    def _place(self) -> str:
        # In a backward pass the mixer, if it is in one, since operators do not name theirs.
        if self._running:
            return self._running[-1]
        return self._mixer(self._last) or self._last

    def _mixer(self, name: str) -> str | None:
        return next((mixer for mixer in self._mixers if f"{name}.".startswith(f"{mixer}.")), None)

    def _described(self, name: str) -> str:
        mixer = self._mixer(name)
        return (name or "the model") if mixer is None else f"{name} ({self._mixers[mixer]})"

    def _where(self, tensor: Tensor) -> str:
        bad, batch = ~tensor.isfinite(), self._batch
        if batch is None or tensor.ndim < 2 or tensor.shape[:2] != self._input_ids.shape:
            return f"{_entry(tensor)}, micro-batch {self._micro_step + 1}"
        # Gradients go from later tokens to earlier ones.
        token, index = bad.flatten(2).any(-1).T.nonzero()[-1 if self._in_backward else 0].tolist()
        position, document = self._offset + token, ""
        if batch.position.documents is not None:
            borders = batch.position.documents[index]
            number = int(torch.searchsorted(borders, position, right=True)) - 1
            document = f", token {position - int(borders[number])} of its document {number}"
        identity = int(self._input_ids[index, token])
        sequence = batch.sequence_ids[index]
        return f"token {position} of sequence {sequence}{document} (id {identity}), micro-batch {self._micro_step + 1}"


class _Operators(TorchDispatchMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        if func.name() in ("zeco::mix", "zeco::mix_backward"):
            given = arguments_of(func, args)
            operator, operands = given["operator"], given["operands"]
            names: Sequence[str] = OPERATORS[operator].operands
        elif func.name() in ("zeco::attend", "zeco::attend_backward"):
            given = arguments_of(func, args)
            operator, names = "attention", "qkv"
            operands = [given[name] for name in names]
        else:
            return run()
        if "do" in given:
            return self._watch.check_backward(operator, names, given["do"], run)
        return self._watch.check_forward(operator, dict(zip(names, operands, strict=True)), run)


class _WatchedScan(TappedScan):
    def __init__(self, scan: StateScan, watch: _Watch) -> None:
        super().__init__(scan)
        self._watch = watch

    def launched(self, request: ScanRequest) -> None:
        self._watch.check("gradient of the state of" if request.reverse else "state of", None, request.state)

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        what = "gradient of the state from later ranks in" if request.reverse else "state from earlier ranks in"
        self._watch.check(what, None, state)
        return state


@torch.no_grad()
def _token_losses(head: LMHead, inputs: tuple[Any, ...]) -> Tensor:
    hidden, labels, _ = inputs
    # Not by a call, which would run the hooks.
    scores = head.forward(hidden, labels, scores=True)
    assert isinstance(scores, TokenScores)
    return scores.losses


def _is_finite(tensor: Tensor) -> bool:
    return bool(local(tensor).isfinite().all())


def _entry(tensor: Tensor) -> str:
    # The index of the first value that is not finite; of a sharded parameter, in the whole of it.
    index = (~local(tensor).isfinite()).nonzero()[0].tolist()
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard(0):
                # FSDP2 cuts rows into equal shards, of which the last ones may be shorter.
                rows = -(-tensor.shape[0] // tensor.device_mesh.size(axis))
                index[0] += rows * tensor.device_mesh.get_local_rank(axis)
    return f"at {index}"


def _count(tensor: Tensor) -> str:
    values = local(tensor)
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    return f"{nan} NaN and {infinite} infinite of {values.numel()} values"
