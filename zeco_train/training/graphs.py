"""The passes of a training step as CUDA graphs: captured once, then replayed, so that the host launches no kernels.

At 2k tokens a GPU launching a 1B model's kernels takes several times as long as running them. Captured are forward
and backward of a micro-batch with FSDP's communication and the scans over ranks, the gradient norm, and the
optimizer; each segment's passes are a part, and those of one form share a graph. What changes between replays is in
device tensors at fixed addresses. The same kernels run in the same order, so the bits are those of launched steps.

All graphs share one memory pool, and a later one uses memory that an earlier one has freed. So a graph must not be
replayed after a part whose results outlive it, such as the first gradients, unless it was captured after that part:
its key includes the kinds of parts that ran before it in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.loader.batches import Batch
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.torch_private import forget_gathers
from zeco_train.errors import CommunicationError, ConfigError, first_cause
from zeco_train.sp.exposed import Events, active_meter
from zeco_train.training.forward import to_device

logger = logging.getLogger(__name__)

# Steps before the capture: they compile, connect, and allocate what stays, such as the optimizer's moments.
WARM_UP = 2


def capture_problem(config: Config) -> str | None:
    """What keeps a configuration's steps from being captured; None if nothing does."""
    if config.data.reset_state_at_document and config.model.attn.chosen(config.model.num_layers):
        # Their kernels get the borders from the host.
        return "data.reset_state_at_document=true with softmax layers"
    if config.parallel.strategy is Strategy.torch_ddp:
        return "parallel=torch_ddp"
    return None


class _Captured(NamedTuple):
    """A part of a step; `waits` are the events of its exposed communication."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]
    waits: list[Events]


class StepLauncher:
    """Launches the kernels of a step's parts one by one."""

    # Whether this step is replayed, not launched.
    are_replays = False

    def begin_step(self) -> bool:
        """Call before the first part of a step; returns whether its first passes write the gradients, not add."""
        return False

    def run(self, key: Hashable, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The results of `work`, which launches kernels on the current stream and waits for none.

        Parts with the same key launch the same kernels. All that a replayed `work` reads must stay at its address, and
        its results must be read before the next part with this key.

        Raises:
            ConfigError: `work` cannot be captured.
        """
        return work()

    def passes(
        self, key: Hashable, work: Callable[..., tuple[Tensor, ...]], batch: Batch, *states: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """`run` of `work(batch, *states)`, passes through the model; its results may be kept.

        The first passes of a step, and the first of a kind, need no key of their own. Positions may change from batch
        to batch, and documents for layers that read `doc_ids` only. States are at the borders of a segment.
        """
        return work(batch, *states)

    def keep_gradients(self) -> None:
        """Hold the memory of the gradients; call after the passes of a step."""

    @contextmanager
    def between_steps(self) -> Iterator[StepLauncher]:
        """A launcher for further passes, whose gradients may be lost."""
        yield self


class StepGraphs(StepLauncher):
    """Captures the parts of a step, and replays them from the first step after the warm-up on.

    The gradients of the model, which is parallelised, stay at their addresses from the capture on.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}
        self._inputs: dict[tuple[str, torch.Size], Tensor] = {}
        self._gradients: list[Tensor | None] = []
        self._step = 0
        # The kinds of passes that this step has run.
        self._passes: set[Hashable] = set()

    @property
    def are_replays(self) -> bool:  # type: ignore[override]
        return self._step > WARM_UP

    def begin_step(self) -> bool:
        """The first passes write the gradients, once they are captured."""
        self._step += 1
        self._passes.clear()
        if self._step == WARM_UP + 2:
            # The step before was captured, and replayed; batches of another form may add graphs.
            line = "train.cuda_graphs: steps are replayed from now on; CUDA graphs so far: %d"
            logger.info(line, len(self._captured))
        return bool(self._gradients)

    def run(self, key: Hashable, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """A replay writes its results into the same tensors as the one before."""
        with self._on_stream():
            if not self.are_replays:
                return work()
            captured = self._captured.get(key)
            if captured is None:
                captured = self._captured[key] = self._capture(work)
            captured.graph.replay()
            if (meter := active_meter()) is not None:
                meter.add_replay(captured.waits)
            return captured.outputs

    def passes(
        self, key: Hashable, work: Callable[..., tuple[Tensor, ...]], batch: Batch, *states: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The results are copies."""
        with self._on_stream():
            given = self._at_fixed_address(batch)
            fixed = [[self._fixed(f"{i}.{j}", x) for j, x in enumerate(of)] for i, of in enumerate(states)]
        # A step's first passes gather the weights; its first backward pass writes the gradients, to which others add,
        # in memory that graphs captured before it may use for something else.
        place = frozenset(self._passes)
        self._passes.add(key)
        form = given.input_ids.shape, given.position.doc_ids is not None, tuple(len(of) for of in states)
        part = key, place, form
        # Captured now, a step's first passes would add to the last step's gradients, which are kept.
        assert place or not self._gradients or part in self._captured, (
            f"a step begins with passes of a new form: {form}"
        )
        results = self.run(part, lambda: work(given, *fixed))
        with self._on_stream():
            return tuple(result.clone() for result in results)

    def keep_gradients(self) -> None:
        """Graphs write and read gradients where they were at the capture."""
        if self.are_replays and not self._gradients:
            self._gradients = [parameter.grad for parameter in self._model.parameters()]

    @contextmanager
    def between_steps(self) -> Iterator[StepLauncher]:
        """The gradients are those of the graphs again afterwards."""
        with self._on_stream():
            yield StepLauncher()
        for parameter, grad in zip(self._model.parameters(), self._gradients, strict=bool(self._gradients)):
            parameter.grad = grad

    def _at_fixed_address(self, batch: Batch) -> Batch:
        position = batch.position.on(batch.input_ids)
        # `doc_ids` says what the documents say, which change and so must not get into a captured kernel.
        doc_ids = None if position.doc_ids is None else self._fixed("doc_ids", position.doc_ids)
        positions = torch.arange(position.start, position.stop, device=self._device)
        return replace(
            batch,
            input_ids=self._fixed("input_ids", batch.input_ids),
            labels=self._fixed("labels", batch.labels),
            position=position.with_tensors(doc_ids, self._fixed("positions", positions)),
        )

    def _fixed(self, name: str, tensor: Tensor) -> Tensor:
        key = name, tensor.shape
        if key not in self._inputs:
            self._inputs[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        return self._inputs[key].copy_(to_device(tensor, self._device))

    def _capture(self, work: Callable[[], tuple[Tensor, ...]]) -> _Captured:
        graph, meter = torch.cuda.CUDAGraph(), active_meter()
        self._forget_events()
        try:
            # Threads of autograd and NCCL's watchdog may make calls that a capture forbids.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = work()
        except (CommunicationError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            # What the passes have left half done cannot be taken back.
            allowed = f"this step cannot be captured ({first_cause(error)}); take off"
            raise ConfigError("train.cuda_graphs", "auto", allowed) from error
        self._forget_events()
        return _Captured(graph, outputs, [] if meter is None else meter.take_captured())

    def memory(self) -> tuple[int, int]:
        """Bytes of the graphs' pool: of tensors that stay, and the rest, which is in use during replays only."""
        pool = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) == tuple(self._pool)]
        held = sum(part["allocated_size"] for part in pool)
        return held, sum(part["total_size"] for part in pool) - held

    def release(self) -> None:
        """Free the graphs, on an idle device; the next steps are launched and captured as the first ones were."""
        self._captured.clear()
        self._gradients.clear()
        self._model.zero_grad(set_to_none=True)
        # Of the old one something may be left, in the model's caches.
        self._pool, self._step = torch.cuda.graph_pool_handle(), 0

    def _forget_events(self) -> None:
        # FSDP2 keeps the event of its last gather for the next one: none may be between a capture and other work.
        torch.cuda.synchronize(self._device)
        forget_gathers(self._model)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        # The stream of all captures, also before them: what is cached by stream is then found in the capture.
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)
