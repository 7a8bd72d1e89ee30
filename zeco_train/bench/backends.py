"""One model with one optimizer, trained on random tokens by any backend: the subject of case `model`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.loader.batches import Batch, DataSplit
from models.parameters import parameter_rules
from models.spec import spec_of
from zeco_train.bench.session import Session
from zeco_train.bench.timing import Contender
from zeco_train.bench.variants import Variant
from zeco_train.config.schema import Config
from zeco_train.distributed.mesh import device_mesh
from zeco_train.distributed.owned_matrices import local
from zeco_train.distributed.parallelize import reshard
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import build_softmax, local_exchange, softmax_load
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.training.build import build_graphs, build_model
from zeco_train.training.graphs import StepGraphs
from zeco_train.training.kernels_ahead import kernels_ahead
from zeco_train.training.optim.optimizer_registry import build_optimizer
from zeco_train.training.schedule import set_learning_rate
from zeco_train.training.step import TrainingStep

# Random tokens cannot be learned: small enough to leave the weights almost unchanged; the speed does not depend on it.
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class RandomTokens:
    """Random tokens of all ranks for each micro-batch: `count` per rank.

    `sequence`: tokens of a sequence, a part of `count`; 0: all tokens of a rank that is alone, else of all ranks.
    """

    vocab_size: int
    count: int
    seed: int
    session: Session
    micro_batches: int = 1
    sequence: int = 0

    @property
    def per_step(self) -> int:
        return self.micro_batches * self.count

    def numbers(self, step: int) -> range:
        """The micro-batches of a step: no two steps have the same tokens."""
        return range(step * self.micro_batches, (step + 1) * self.micro_batches)

    def stream(self, number: int) -> Tensor:
        """[ranks · count + 1] int64, on the device, the same on all ranks."""
        device = self.session.device
        # Runs with different seeds share no tokens, up to 2^20 micro-batches.
        generator = torch.Generator(device).manual_seed((self.seed << 20) + number)
        size = (self.session.world_size * self.count + 1,)
        return torch.randint(self.vocab_size, size, device=device, generator=generator)

    def own(self, number: int) -> Tensor:
        """[sequences, tokens of one]: this rank's."""
        own = self.stream(number)[self.session.rank * self.count :][: self.count]
        return own.view(-1, self.seq_len(alone=True))

    def seq_len(self, alone: bool) -> int:
        """Tokens of a sequence, if each rank has its own (`alone`) or all share one."""
        return self.sequence or (self.count if alone else self.count * self.session.world_size)

    def batches(self, number: int, alone: bool, segments: int) -> list[Batch]:
        """This rank's part of its sequences, by segment."""
        stream, (rank, ranks) = self.stream(number), (self.session.rank, self.session.world_size)
        if alone:
            stream, rank, ranks = stream[rank * self.count :], 0, 1
        seq_len = self.seq_len(alone)
        split = DataSplit(seq_len, sp_rank=rank, sp_size=ranks, segments=segments)
        inputs, nexts = (stream[first:][: ranks * self.count].view(-1, seq_len) for first in (0, 1))
        sequences = [number * len(inputs) + index for index in range(len(inputs))]
        batches = []
        for segment in range(segments):
            position = split.position(segment)
            ids, labels = (x[:, position.start : position.stop] for x in (inputs, nexts))
            batches.append(Batch(ids, labels, position, sequences))
        return batches


class Backends:
    """A model with its optimizer, trained by any backend. Collective.

    `tokens`: per rank and micro-batch, at first. `purpose`: of the exchanges, see `Session.exchange`.

    Raises:
        ConfigError: the configured method of softmax attention cannot spread the model's heads over the ranks.
    """

    purpose = "eager"

    def __init__(self, run: Config, session: Session, tokens: int) -> None:
        self._run, self._session = run, session
        with kernels_ahead(run.model, run.train, (1, tokens // run.train.segments), False, session.device):
            self.model = build_model(run.model, run.train, run.parallel.strategy, session.mesh, run.seed)
        self._optimizer = build_optimizer(parameter_rules(self.model), run.optim, run.train.dtype.compute)
        set_learning_rate(self._optimizer, LEARNING_RATE)
        # `auto` chooses one method for all numbers of tokens, as for a long sequence.
        load = softmax_load(run.model, session.world_size, dtype=run.train.dtype.compute)
        self._softmax = None if load is None else build_softmax(run.sp, session.mesh, load)
        ranks = device_mesh(session.device.type, (session.world_size, 1), ("dp", "sp"), session.mesh.timeout)
        self._alone = replace(session.mesh, devices=ranks)

    def exchange_of(self, variant: Variant) -> Exchange:
        """The exchange of a variant; `ConfigError` if this machine does not support it."""
        if variant.is_dp:
            return local_exchange()
        with_halo = spec_of(self._run.model).needs_halo
        found = self._session.exchange(variant, state_elements(self._run), self.purpose, with_halo=with_halo)
        return found.replaced(attention=self._softmax)

    def contender(self, variant: Variant, tokens: RandomTokens, *, replayed: bool = True) -> Contender:
        """A variant as a contender; `replayed`: as CUDA graphs, if the run's steps are."""
        alone, segments = variant.is_dp, self._run.train.segments
        graphs = build_graphs(self._run, self.model, self._session.device) if replayed else None
        meter, step = ExposedMeter(), self._training_step(self.exchange_of(variant), alone, tokens, graphs)
        launching: list[float] = []

        def train(number: int) -> float | Tensor:
            started = time.perf_counter()
            step.zero_grad()
            with meter.measuring():
                for index in tokens.numbers(number):
                    last = index == tokens.numbers(number)[-1]
                    step.backward(tokens.batches(index, alone, segments), last=last, proceed=_no_rank_stops)
            if not variant.updates:
                step.skip_update()
                launching.append(time.perf_counter() - started)
                # As with an update: the mean over ranks is the loss.
                return step.totals.loss * self._session.world_size
            numbers = step.update()
            launching.append(time.perf_counter() - started)
            return numbers.read().loss

        return Contender(variant, train, None if alone else meter, launching=launching, graphs=graphs)

    def gradient(
        self, exchange: Exchange, tokens: RandomTokens, *, alone: bool = False, keep: bool = True
    ) -> tuple[float, list[Tensor]]:
        """Mean loss over the first micro-batch of all ranks, and this rank's shard of its gradient, if to `keep`.

        Does not train. Collective. `exchange` joins the shards of all ranks, or of each rank's own sequence if `alone`.
        """
        step = self._training_step(exchange, alone, replace(tokens, micro_batches=1))
        step.zero_grad()
        step.backward(tokens.batches(0, alone, self._run.train.segments), last=True)
        loss = step.totals.loss.clone()
        grads = []
        for parameter in self.model.parameters() if keep else ():
            assert parameter.grad is not None
            grads.append(local(parameter.grad))
        step.zero_grad()
        self._session.drain()
        dist.all_reduce(loss)
        return loss.item(), grads

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """[1, T] → [1, T, vocab], for each rank alone. Collective."""
        logits = self.model(ids, SequencePosition((0, ids.shape[1]), exchange=local_exchange()))
        # FSDP frees gathered parameters in the backward pass, of which there is none.
        reshard(self.model)
        return logits

    def weights(self) -> dict[str, Tensor]:
        """All parameters, unsharded, on the host, in the compute dtype. Collective."""
        dtype = self._run.train.dtype.compute
        return {
            # One after the other: all of them together need not fit the device.
            name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().to("cpu", dtype)
            for name, parameter in self.model.named_parameters()
        }

    def _training_step(
        self, exchange: Exchange, alone: bool, tokens: RandomTokens, graphs: StepGraphs | None = None
    ) -> TrainingStep:
        run = self._run
        return TrainingStep(
            self.model,
            self._optimizer,
            exchange,
            self._alone if alone else self._session.mesh,
            strategy=run.parallel.strategy,
            grad_clip=run.optim.grad_clip,
            tokens_per_step=self._session.world_size * tokens.per_step,
            graphs=graphs,
        )


def state_elements(run: Config) -> int:
    """Elements of a layer's state."""
    return math.prod(spec_of(run.model).state_shape)


def _no_rank_stops() -> bool:
    # As the trainer asks, before each segment, whether any rank wants to stop.
    stopped = torch.tensor(0)
    dist.all_reduce(stopped)
    return not stopped
