"""One optimizer step: forward and backward passes of its micro-batches, then the update.

The host only launches work here. It synchronises only to read a step's numbers (`PendingNumbers.read`), which are ready
before the optimizer has run, so the next step is launched meanwhile. Skipping a non-finite step is therefore decided on
the device: the weights are not changed if loss or norm is not finite.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader.batches import Batch
from models.language_model import LanguageModel
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.distributed.parallelize import begin_micro_batch, connected, global_norm, num_shards
from zeco_train.errors import CommunicationError
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.seam import Exchange
from zeco_train.tracking.metrics import PassNumbers, StepNumbers
from zeco_train.training.forward import SequenceForward
from zeco_train.training.graphs import StepGraphs, StepLauncher
from zeco_train.training.schedule import DeviceRates, reads_device_rates


class _Borders(NamedTuple):
    # Of a segment: what a rank received from the one before it in a first pass, and the states before the segment.
    received: Sequence[Tensor]
    carries: Sequence[Tensor]


class TrainingStep:
    """The work of one optimizer step. All methods are collective.

    Args:
        model: parallelised (`zeco_train.distributed.parallelize`).
        optimizer: reads `found_inf` and `grad_scale`, see docs/extending.md.
        grad_clip: largest global gradient norm; 0 clips nothing.
        tokens_per_step: of the global batch; a batch's own count of labels takes precedence.
        graphs: replay the step; None: launch its kernels one by one.

    Attributes:
        totals: this rank's part of the step's numbers, from all its passes so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        mesh: ProcessMesh,
        *,
        strategy: Strategy,
        grad_clip: float,
        tokens_per_step: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.forward = SequenceForward(model, exchange, mesh, connected(model, strategy, mesh))
        self._strategy, self._shards, self._grad_clip = strategy, num_shards(model), grad_clip
        self._tokens_per_step = tokens_per_step
        self._launcher = graphs or StepLauncher()
        # On the device, where replayed kernels read them; with or without graphs, for the same bits.
        self._num_labels = torch.ones((), dtype=torch.float64, device=mesh.device)
        self.totals = new_totals(PassNumbers, mesh.device)
        self._rates = DeviceRates(optimizer, mesh.device) if reads_device_rates(optimizer, mesh.device) else None

    def backward(self, segments: Sequence[Batch], *, last: bool, proceed: Callable[[], bool] = lambda: True) -> bool:
        """Accumulate the gradient of one micro-batch, and its numbers in `totals`.

        A first pass computes the states of all segments but the last; then each segment, last to first, is run forward
        and backward. The loss is the sum over this rank's tokens, divided by the labels of the *global* batch, so that
        the sum of gradients over all ranks and micro-batches is the gradient of the mean, however the batch is split.

        Args:
            segments: this rank's shards of the micro-batch's segments, in order; one if the sequence is not segmented.
            last: the optimizer step's last micro-batch.
            proceed: called before each pass over a segment; must return the same on all ranks. Where it returns False,
                so does this, and gradients and totals are incomplete.
        """
        self._num_labels.fill_(segments[0].step_labels or self._tokens_per_step)
        borders = self._first_pass(segments, proceed)
        if borders is None:
            return False
        totals = new_totals(PassNumbers, self.mesh.device)
        carry_grads: Sequence[Tensor] = ()
        for index in reversed(range(len(segments))):
            if not proceed():
                return False
            # Segments run last to first, so the first one completes the gradient.
            completes = last and index == 0
            work = partial(self._run_backward, last=completes)
            # `pop` frees this segment's states, which earlier segments do not need.
            states = *borders.pop(), carry_grads
            results = self._launcher.passes(("backward", completes), work, segments[index], *states)
            numbers, carry_grads = taken_from(results)
            add(totals, numbers)
        add(self.totals, totals)
        return True

    def update(self) -> PendingNumbers:
        """Clip the gradient by its global norm and run the optimizer step, if loss and norm are finite.

        Returns the step's numbers, the same on every rank.
        """
        if self._rates is not None:
            self._rates.update()
        self._launcher.keep_gradients()
        # NCCL does not time out what is in a graph.
        timeout = self.mesh.timeout if self._launcher.are_replays else None
        # Before the optimizer's kernels are queued, so that reading does not wait for them.
        numbers = PendingNumbers(self._launcher.run("numbers", self._numbers_and_clipping), timeout=timeout)
        if self._rates is None:
            self._optimize()
        else:
            self._launcher.run("optimizer", self._optimize)
        return numbers

    @contextlib.contextmanager
    def launched(self) -> Iterator[None]:
        """Between two steps: passes inside are launched kernel by kernel, and their gradients may be lost."""
        launcher = self._launcher
        with launcher.between_steps() as self._launcher:
            try:
                yield
            finally:
                self._launcher = launcher

    def skip_update(self) -> None:
        self._launcher.keep_gradients()

    def zero_grad(self) -> None:
        """Begin a step without gradients and numbers."""
        clear(self.totals)
        if not self._launcher.begin_step():
            self.optimizer.zero_grad(set_to_none=True)

    def _numbers_and_clipping(self) -> tuple[Tensor, ...]:
        totals, norm = over_ranks(self.totals), global_norm(self.model)
        numbers = StepNumbers(**vars(totals), grad_norm=norm)
        # Fused optimizers divide gradients by `grad_scale`, and skip the step if `found_inf` is 1: torch's mechanism
        # for loss scaling. Separate clipping would be another pass over all gradients.
        self.optimizer.found_inf = (~(numbers.loss.isfinite() & norm.isfinite())).float()  # type: ignore[attr-defined]
        if self._grad_clip > 0:
            # 1e-6 as in `torch.nn.utils.clip_grad_norm_`.
            self.optimizer.grad_scale = ((norm + 1e-6) / self._grad_clip).clamp(min=1.0).float()  # type: ignore[attr-defined]
        return tuple(vars(numbers).values())

    def _optimize(self) -> tuple[Tensor, ...]:
        with self._rates.given() if self._rates is not None else contextlib.nullcontext():
            self.optimizer.step()
        return ()

    def _run_backward(
        self,
        batch: Batch,
        received: Sequence[Tensor],
        carries: Sequence[Tensor],
        carry_grads: Sequence[Tensor],
        *,
        last: bool,
    ) -> tuple[Tensor, ...]:
        begin_micro_batch(self.forward.called, self._strategy, self._shards, last=last)
        # Cuts the autograd graph between segments.
        leaves = [carry.detach().requires_grad_() for carry in carries]
        states = LayerStates(received or None, leaves or None, want_carry=bool(carry_grads))
        loss_sum = self.forward.loss(batch, states)
        share = loss_sum / self._num_labels.to(loss_sum.dtype)
        outputs = states.carry_out if states.want_carry else []
        # torch's DDP takes the mean of the ranks' gradients.
        seed = share.new_full((), self.mesh.world_size) if self._strategy is Strategy.torch_ddp else None
        torch.autograd.backward([share, *outputs], [seed, *carry_grads])
        numbers = PassNumbers(loss=share.detach())
        return *vars(numbers).values(), *(_grad(leaf) for leaf in leaves)

    def _first_pass(self, segments: Sequence[Batch], proceed: Callable[[], bool]) -> list[_Borders] | None:
        # The incoming states of each segment, for its second pass; None if `proceed` returned False.
        carries: Sequence[Tensor] = self.forward.zero_carries(segments) or ()
        borders = []
        for batch in segments[:-1]:
            if not proceed():
                return None
            states = self._launcher.passes("states", self._run_forward, batch, carries)
            received = states[: len(carries)]
            borders.append(_Borders(received, carries))
            carries = states[len(carries) :]
        return [*borders, _Borders((), carries)]

    @torch.no_grad()
    def _run_forward(self, batch: Batch, carries: Sequence[Tensor]) -> tuple[Tensor, ...]:
        states = LayerStates(carry_in=carries, want_carry=True)
        self.forward.fill_states(batch, states)
        return *states.received, *states.carry_out


def _grad(carry: Tensor) -> Tensor:
    assert carry.grad is not None, "every state before a segment takes part in it"
    return carry.grad


# --- how the numbers of a step are added up ---

# Which there are is declared in `zeco_train.tracking.metrics`, and nowhere else. Totals stay at their addresses, where
# replayed kernels read them. What a replay overwrites, a pass's results and the reduced numbers, is added or copied
# before the next replay.

# Between two looks at a step's end. The device still runs the optimizer then, so a late look delays nothing.
_POLL_SECONDS = 2e-4
# By `Column.across`: the value of no parts, and how parts are joined on a rank, and over ranks.
_START: dict[str, float] = {"sum": 0.0, "max": -math.inf}
_JOIN: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

N = TypeVar("N", bound=PassNumbers[Any])


def named(kind: type[N], values: Iterable[Any]) -> N:
    """The record of values in the order of its fields, which is that of `vars(record).values()`."""
    return kind(**{number.name: value for number, value in zip(fields(kind), values, strict=True)})


def taken_from(results: Sequence[Tensor]) -> tuple[PassNumbers[Tensor], Sequence[Tensor]]:
    """Split the results of a pass into the numbers with which they begin, and the rest."""
    count = len(fields(PassNumbers))
    return named(PassNumbers, results[:count]), results[count:]


def new_totals(kind: type[N], device: torch.device) -> N:
    """Totals of no passes, fp64."""
    totals = named(kind, (torch.empty((), dtype=torch.float64, device=device) for _ in fields(kind)))
    clear(totals)
    return totals


def clear(totals: PassNumbers[Tensor]) -> None:
    """Reset to the totals of no passes."""
    for total, across in _declared(totals):
        total.fill_(_START[across])


def add(totals: PassNumbers[Tensor], part: PassNumbers[Tensor]) -> None:
    """Add a part to this rank's totals."""
    for (total, across), value in zip(_declared(totals), vars(part).values(), strict=True):
        _JOIN[across](total, value, out=total)


def over_ranks(totals: N) -> N:
    """Their reductions over all ranks. Collective."""
    found = named(type(totals), (total.clone() for total in vars(totals).values()))
    for total, across in _declared(found):
        # One by one: the place of a value in a vector decides the order in which some rings add it up.
        dist.all_reduce(total, op=_REDUCE[across])
    return found


def _declared(totals: PassNumbers[Tensor]) -> Iterator[tuple[Tensor, str]]:
    return ((getattr(totals, number.name), number.metadata["across"]) for number in fields(totals))


class PendingNumbers:
    """The numbers of a step, copied to the host asynchronously.

    Args:
        values: on the device, in the order of `StepNumbers`.
        timeout: longest wait for them; None: the timeout of the communication that they wait for.
    """

    def __init__(self, values: Iterable[Tensor], *, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        together = torch.stack([value.double() for value in values])
        self._values, self._ready = together, None
        if together.device.type == "cuda":
            # A copy to pageable memory would make the host wait.
            self._values = torch.empty_like(together, device="cpu", pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> StepNumbers[float]:
        """Wait for the copy; raises `CommunicationError` after the timeout."""
        if self._ready is not None:
            self._wait(self._ready)
        return named(StepNumbers, self._values.tolist())

    def _wait(self, ready: torch.cuda.Event) -> None:
        if self._timeout is None:
            ready.synchronize()
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not ready.query():
            if time.monotonic() > deadline:
                problem = f"no end within {self._timeout.total_seconds():g} s"
                raise CommunicationError(dist.get_rank(), "replay of a step's CUDA graphs", problem)
            time.sleep(_POLL_SECONDS)
