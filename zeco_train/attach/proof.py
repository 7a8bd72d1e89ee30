"""Is an attached model exact? Its loss and every gradient against the same model on one device, in fp64 and as it is.

In fp64, where rounding is 1e-16, only a fault can move a gradient by more than `EXACT`. In the model's own dtype the
ranks may be off from the fp64 results by as much as one device is, which sums in another order, times `NOISE`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zeco_train.attach.attached import Attached, attach, random_settings
from zeco_train.attach.forward import AttachError
from zeco_train.attach.layers import has_kernel, spaces_of
from zeco_train.attach.linear import REPLACEMENTS
from zeco_train.attach.shard import POSITION
from zeco_train.errors import ZecoError
from zeco_train.ops.position import SequencePosition
from zeco_train.system.terminal import format_table
from zeco_train.verify.own_ranks import OwnRanksError, rows_of_own_ranks

# Largest error of a loss, output or gradient in fp64, relative to its norm.
EXACT = 1e-9
# In the model's dtype, times the error of one device: two orders of the same sums. Of a parameter with few elements
# one device may be right by chance, so an error as large as the median over all parameters is no fault either. Six
# classes of transformers in bf16 over 2 ranks had up to 2.4 times.
NOISE = 4.0
# A gradient of a smaller norm, relative to the largest, is measured by that: it is a difference of larger terms.
_SMALLEST = 1e-3


@dataclass(frozen=True)
class Deviation:
    """How far a tensor is from one device in fp64, by the norm of the difference; the largest over ranks.

    Attributes:
        name: of the module, or of the parameter.
        error: over ranks, relative.
        allowed: the largest error that is rounding.
        alone: of one device in the same dtype; 0 in fp64.
    """

    name: str
    error: float
    allowed: float
    alone: float = 0.0

    @property
    def is_wrong(self) -> bool:
        # NaN is.
        return not self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.1e}, limit {self.allowed:.1e}"


@dataclass(frozen=True)
class Comparison:
    """Ranks against one device in one dtype.

    Attributes:
        dtype: of the parameters, as "float64".
        loss: of all ranks.
        output: the first module, in order of the forward pass, whose output is wrong on some rank; a module inside a
            mixer is named with it.
        gradients: of every parameter that has one, in the model's order.
    """

    dtype: str
    loss: Deviation
    output: Deviation | None
    gradients: tuple[Deviation, ...]

    @property
    def problems(self) -> list[str]:
        """A line each: the first wrong module, the loss, then each wrong gradient."""
        found = [] if self.output is None else [f"first wrong output: {self.output}"]
        found += [f"wrong {self.loss}"] if self.loss.is_wrong else []
        found += [f"wrong gradient of {each}" for each in self.gradients if each.is_wrong]
        return [f"{self.dtype}: {line}" for line in found]


@dataclass(frozen=True)
class Proof:
    """The result of `verify`, equal on all ranks.

    Attributes:
        layers: names of the attached layers, with their classes.
        comparisons: in fp64, then in the model's own dtype.
    """

    layers: dict[str, str]
    comparisons: tuple[Comparison, ...]

    @property
    def is_exact(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        return [line for comparison in self.comparisons for line in comparison.problems]

    def table(self) -> str:
        """A row for each attached layer, and one for all else: the largest error of its gradients in each dtype."""
        widths = (max(8, *map(len, names)) for names in (self.layers, self.layers.values()))
        columns = {name: (name, f"<{width}") for name, width in zip(("layer", "class"), widths, strict=True)}
        worst: dict[str, dict[str, float]] = {}
        for comparison in self.comparisons:
            own, alone = comparison.dtype, f"one device in {comparison.dtype}"
            shown = {own: "error"} if own == "float64" else {own: "error", alone: "alone"}
            for name, kind in shown.items():
                columns[name] = (name, f">{len(name)}:.1e")
                for each in comparison.gradients:
                    row = worst.setdefault(_layer_of(each.name, self.layers), {})
                    row[name] = max(row.get(name, 0.0), getattr(each, kind))
        names = [*self.layers, ""]
        rows = ({"layer": n or "all else", "class": self.layers.get(n), **worst[n]} for n in names if n in worst)
        return format_table(rows, columns)


def verify(
    model: nn.Module | Attached,
    batch: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    documents: Any = None,
    lengths: Sequence[int] | None = None,
) -> Proof:
    """Compare an attached model with itself on one device: loss, outputs and every gradient. Collective.

    Each rank computes whole sequences, too, in the model's dtype and in fp64: take a short one, which needs the memory
    of a training step in fp64 on each device. Dropout is off meanwhile; parameters, gradients and buffers are left as
    they were. Packed documents are compared with one pass for each document, without the routers' loss. Gradient
    checkpointing takes part in the model's dtype only.

    Args:
        model: attached, or else attached for the time of the call. Not inside DDP or FSDP.
        batch: what `Attached.shard` takes, whole and equal on all ranks; without labels, the tokens are the labels.
        group: of the ranks, for a model that is not attached.
        documents, lengths: as of `Attached.shard`.

    Raises:
        AttachError: the model cannot be attached, or is sharded.
    """
    if not isinstance(model, Attached):
        if group is None:
            raise AttachError("verify: a model that is not attached needs the group of its ranks")
        attached = attach(model, group)
        try:
            return verify(attached, batch, documents=documents, lengths=lengths)
        finally:
            attached.detach()
    return _Verification(model, batch, documents, lengths).run()


def prove(
    make: Callable[[], nn.Module],
    *,
    ranks: int = 2,
    tokens: int = 200,
    batch: int = 2,
    documents: Sequence[bool] = (False, True),
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=10),
) -> Iterator[Proof]:
    """`verify` on ranks of its own, processes on this machine's CPU, with random tokens in slices of different lengths.

    Args:
        make: gives each rank the same model with a `loss`, as those of transformers have; of an importable module.
        ranks: processes that share each sequence.
        tokens: of a sequence, at least 2 for each rank.
        batch: sequences of a batch.
        documents: a case each: packed documents, or whole sequences.
        seed: of the tokens.
        timeout: longest wait of a rank for another.

    Raises:
        AttachError: the model cannot be attached, or a rank failed.
    """
    work = partial(_prove, make, tokens, batch, tuple(documents), seed)
    try:
        pickle.dumps(work)
    except Exception as error:  # of whatever it holds
        raise AttachError(f"make: must be a function of an importable module, for other processes: {error}") from error
    try:
        for found in rows_of_own_ranks(work, ranks, len(documents), timeout, (__name__, "transformers.modeling_utils")):
            if isinstance(found, ZecoError):
                raise found
            yield found
    except OwnRanksError as error:
        raise AttachError(str(error)) from error


def _prove(
    make: Callable[[], nn.Module],
    tokens: int,
    batch: int,
    documents: Sequence[bool],
    seed: int,
    rank: int,
    size: int,
    timeout: timedelta,
    hand_in: Callable[[Any], None],
) -> None:
    try:
        model: Any = make().train()
        attached = attach(model, dist.group.WORLD, timeout=timeout)
        vocabulary = model.get_input_embeddings().num_embeddings
        for has_documents in documents:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(vocabulary, (batch, tokens), generator=generator)
            proof = verify(
                attached,
                {"input_ids": ids},
                documents=[_borders(tokens, generator) for _ in range(batch)] if has_documents else None,
                lengths=_uneven(tokens, size),
            )
            if rank == 0:
                hand_in(proof)
    except ZecoError as error:
        hand_in(error)


# A document of one token, and three whose borders lie anywhere.
def _borders(tokens: int, generator: torch.Generator) -> list[int]:
    found = torch.randint(1, tokens, (3,), generator=generator)
    return sorted({0, *found.tolist(), min(int(found[0]) + 1, tokens), tokens})


def _uneven(tokens: int, size: int) -> list[int]:
    """Lengths of slices as 3 : 1 : 3 : …, at least 1."""
    parts = [1 if rank % 2 else 3 for rank in range(size)]
    lengths = [max(1, tokens * part // sum(parts)) for part in parts]
    lengths[0] += tokens - sum(lengths)
    return lengths


class _Wide(TorchFunctionMode):
    """Casts to fp32, which many models write out, stay in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


@dataclass
class _Run:
    # Of one kind of pass. By module and call, of this rank's tokens, in the order in which the modules end.
    outputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    # [] fp64, of the whole batch, as the gradients are.
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    gradients: dict[str, Tensor] = field(default_factory=dict)


class _Verification:
    def __init__(self, attached: Attached, batch: Mapping[str, Any], documents: Any, lengths: Any) -> None:
        self.attached, self.model = attached, attached.model
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise AttachError("verify: parameters are sharded; verify the model before FSDP")
        if batch.get("input_ids") is None:
            raise AttachError("input_ids: missing; verify takes no inputs_embeds")
        self.batch = {"labels": batch["input_ids"], **{name: x for name, x in batch.items() if x is not None}}
        self.part = attached.shard(self.batch, documents=documents, lengths=lengths)
        if not self.part["num_items_in_batch"]:
            raise AttachError("labels: a batch without any compares nothing")
        self.position: SequencePosition = self.part[POSITION]
        self.classes = {name: type(module).__name__ for name, module in self.model.named_modules()}
        handled = {name for names in attached.layers.values() for name in names}
        self.layers = {name: kind for name, kind in self.classes.items() if name in handled}

    def run(self) -> Proof:
        own = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        with _prepared(self.model, has_documents=self.position.documents is not None):
            with _in_double(self.model):
                exact, ranks = self._alone(), self._over_ranks()
            comparisons = [self._compare(torch.float64, ranks, exact, exact)]
            if own != torch.float64:
                alone, ranks = self._alone(), self._over_ranks()
                comparisons.append(self._compare(own, ranks, exact, alone))
        return Proof(self.layers, tuple(comparisons))

    def _over_ranks(self) -> _Run:
        run = _Run()
        with self._recorded(run) as begin:
            begin(None, self.position.start, self.position.stop)
            loss = self.model(**self.part).loss
        loss.backward()
        self.attached.reduce_gradients()
        run.loss = loss.detach().double()
        dist.all_reduce(run.loss, group=self.attached.group)
        return self._finish(run)

    # One pass for the batch, or for each document of each of its sequences: nothing can pass between them.
    def _alone(self) -> _Run:
        run, documents = _Run(), self.position.documents
        passes: list[tuple[int | None, int, int]] = [(None, 0, self.position.seq_len)]
        given = {"num_items_in_batch": self.part.get("num_items_in_batch"), "use_cache": False}
        if documents is not None:
            borders = [(row, itertools.pairwise(each.tolist())) for row, each in enumerate(documents)]
            passes = [(row, start, stop) for row, pairs in borders for start, stop in pairs if start < stop]
        names = ["input_ids", "labels"] if documents is not None else self.batch
        with self.attached.off(), _in_pytorch(self.model), self._recorded(run) as begin:
            for row, start, stop in passes:
                begin(row, start, stop)
                for name in names:
                    whole = self.batch[name]
                    given[name] = whole[_rows(row), start:stop] if isinstance(whole, Tensor) else whole
                loss = self.model(**given).loss
                loss.backward()
                run.loss = run.loss + loss.detach().double()
        return self._finish(run)

    @contextlib.contextmanager
    def _recorded(self, run: _Run) -> Iterator[Callable[[int | None, int, int], None]]:
        batch = self.batch["input_ids"].shape[0]
        first, last = self.position.start, self.position.stop
        calls: Counter[str] = Counter()
        row: int | None = None
        start = stop = 0

        def begin(of_row: int | None, of_start: int, of_stop: int) -> None:
            nonlocal row, start, stop
            row, start, stop = of_row, of_start, of_stop
            calls.clear()

        def record(name: str, _: nn.Module, __: Any, output: Any) -> None:
            x = _first_tensor(output)
            rows = batch if row is None else 1
            if x is None or x.dim() < 3 or x.shape[0] not in (1, rows) or x.shape[1] != stop - start:
                return
            # Positions may be those of all sequences.
            x = x.detach().expand(rows, *x.shape[1:])
            kept = run.outputs.setdefault((name, calls[name]), x.new_zeros(batch, last - first, *x.shape[2:]))
            calls[name] += 1
            a, b = max(start, first), min(stop, last)
            if a < b:
                kept[_rows(row), a - first : b - first] = x[:, a - start : b - start]

        named = [(name, module) for name, module in self.model.named_modules() if name]
        hooks = [module.register_forward_hook(partial(record, name)) for name, module in named]
        try:
            yield begin
        finally:
            for hook in hooks:
                hook.remove()

    def _finish(self, run: _Run) -> _Run:
        # What a module makes of padding reaches no token.
        if (is_token := self.part.get("attention_mask")) is not None:
            for x in run.outputs.values():
                x[~is_token.bool()] = 0.0
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                run.gradients[name] = torch.zeros_like(parameter) if grad is None else grad.detach().clone()
            parameter.grad = None
        return run

    def _compare(self, dtype: torch.dtype, ranks: _Run, exact: _Run, alone: _Run) -> Comparison:
        is_fp64 = dtype == torch.float64

        def deviations(of: str, floor: float) -> list[Deviation]:
            mine = {}
            for key, x in getattr(ranks, of).items():
                wanted, one = getattr(exact, of).get(key), getattr(alone, of).get(key)
                if wanted is not None and one is not None and wanted.shape == x.shape:
                    pairs = (x.double() - wanted, wanted, one.double() - wanted)
                    mine[key] = [each.norm().item() ** 2 for each in pairs]
            squares = self._summed(mine)
            largest = max((math.sqrt(wanted) for _, wanted, _ in squares.values()), default=0.0)
            scales = {key: max(math.sqrt(s[1]), floor * largest) or 1e-300 for key, s in squares.items()}
            found = {key: (math.sqrt(s[0]) / scales[key], math.sqrt(s[2]) / scales[key]) for key, s in squares.items()}
            typical = statistics.median(one for _, one in found.values()) if found else 0.0
            # Of a gradient near 0 there is rounding of terms that are as large as others' gradients.
            left = {
                key: 0.25 / floor if floor and math.sqrt(squares[key][1]) < scale else 0.0
                for key, scale in scales.items()
            }
            return [
                Deviation(key if isinstance(key, str) else key[0], error, allowed(max(one, typical), left[key]), one)
                for key, (error, one) in found.items()
            ]

        def allowed(one: float, left: float = 0.0) -> float:
            return EXACT if is_fp64 else max(NOISE * one, 4 * torch.finfo(dtype).eps * max(1.0, left))

        off, one = ((run.loss - exact.loss).abs().item() / abs(exact.loss.item()) for run in (ranks, alone))
        output = next((each for each in deviations("outputs", 0.0) if each.is_wrong), None)
        return Comparison(
            dtype=str(dtype).removeprefix("torch."),
            loss=Deviation("loss", off, allowed(one), one),
            output=output and replace(output, name=self._describe(output.name)),
            gradients=tuple(deviations("gradients", _SMALLEST)),
        )

    # Every rank has the whole gradients after their reduction: summing them over ranks changes no ratio.
    def _summed(self, mine: dict[Any, list[float]]) -> dict[Any, list[float]]:
        everyone: list[dict[Any, list[float]]] = [{}] * self.attached.size
        dist.all_gather_object(everyone, mine, group=self.attached.group)
        found: dict[Any, list[float]] = {}
        for theirs in everyone:
            for key, squares in theirs.items():
                found[key] = [a + b for a, b in zip(found.get(key, [0.0] * 3), squares, strict=True)]
        return found

    def _describe(self, name: str) -> str:
        layer = _layer_of(name, self.layers)
        if layer and layer != name:
            inner = name.removeprefix(f"{layer}.")
            return f"{layer} ({self.layers[layer]}), at its {inner} ({self.classes[name]})"
        return f"{name} ({self.classes[name]})"


def _rows(row: int | None) -> slice:
    return slice(None) if row is None else slice(row, row + 1)


def _layer_of(name: str, layers: Iterable[str]) -> str:
    return max((each for each in layers if name == each or name.startswith(f"{each}.")), key=len, default="")


def _first_tensor(output: Any) -> Tensor | None:
    found = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    return next((x for x in found if isinstance(x, Tensor) and x.is_floating_point()), None)


@contextlib.contextmanager
def _prepared(model: nn.Module, *, has_documents: bool) -> Iterator[None]:
    """Without dropout and gradients; afterwards all of the model is as it was."""
    with contextlib.ExitStack() as stack:
        for parameter in model.parameters():
            _put(stack, parameter, "grad", None)
        for module in model.modules():
            for name in random_settings(module):
                _put(stack, module, name, 0.0)
            for name, value in list(module._buffers.items()):
                stack.callback(module._buffers.__setitem__, name, value)
                module._buffers[name] = None if value is None else value.clone()
        config = getattr(model, "config", None)
        # A balancing loss of each document is not the loss of all of them.
        if has_documents and getattr(config, "output_router_logits", False):
            _put(stack, config, "output_router_logits", False)
        yield


@contextlib.contextmanager
def _in_pytorch(model: nn.Module) -> Iterator[None]:
    """With transformers' own functions, in PyTorch, where packages with kernels would answer in their stead.

    Such kernels run on no CPU and know no fp64; in the model's dtype, too, they would round differently.
    """
    with contextlib.ExitStack() as stack:
        for space in (space for module in model.modules() for space in spaces_of(module)):
            for name in REPLACEMENTS.keys() & space.keys():
                found = before = space[name]
                while hasattr(found, "__wrapped__") and not has_kernel(found):
                    found = found.__wrapped__
                if has_kernel(found):
                    stack.callback(space.__setitem__, name, before)
                    space[name] = found.__wrapped__
        yield


@contextlib.contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """In fp64, with all that the model casts to fp32."""
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            # Grouped products of experts take no fp64.
            if hasattr(config := getattr(module, "config", None), "_experts_implementation"):
                _put(stack, config, "_experts_implementation", "eager")
            # What a checkpoint computes again, it computes without the mode.
            if getattr(module, "gradient_checkpointing", False):
                _put(stack, module, "gradient_checkpointing", False)
        try:
            model.double()
            with _Wide():
                yield
        finally:
            for parameter, data in kept:
                parameter.data = data
            for module, before in buffers:
                module._buffers.update(before)


def _put(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
