"""Case `decode`: throughput and memory of generation, by context length.

Contexts are processed in increasing order: the tokens that one adds to the previous one go through the model as a
prompt, over all ranks together. Then each rank continues on its own from the resulting states, with the configured
number of sequences: it picks the greedy token of each, and takes a step with it. A step ends when its token is on the
host, as for a user. Weights and tokens are random. Contexts, batches and variants take turns, a part of the steps each.

Memory is that of the rank during decoding, weights included: on CUDA the peak allocation, on CPUs the resident set size
of the process, with everything that libraries and allocators keep, including from prompts of longer contexts. States of
a hybrid include its caches of keys and values, with the capacity of the context and the tokens after it.

Before timing, logits by steps and those of the chunked operator are both compared with the chunked operator's in fp64:
bf16 rounds both, and over many random layers by so much (0.1 of gla_1b's logits) that a tolerance for their difference
would be meaningless. The error of steps may be up to 1.5 times the operator's, whose own may be up to 1.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.spec import spec_of
from zeco_train.bench.backends import state_elements
from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import DecodeConfig
from zeco_train.bench.session import Row, Session, check_results, marked
from zeco_train.bench.timing import Summary, in_rounds
from zeco_train.bench.variants import backend_variant
from zeco_train.errors import ConfigError
from zeco_train.generate.decode import Decoder
from zeco_train.generate.prefill import Prefill, whole_logits
from zeco_train.generate.sampling import Sampler, Sampling
from zeco_train.sp.exchange import build_softmax, softmax_load
from zeco_train.system.environment import process_memory
from zeco_train.training.config import Dtype

# Largest error of the chunked operator itself: an infinite one would allow any error of steps.
LARGEST_CHUNKED = 1.0
# Error of logits by steps relative to the chunked operator's; and an error that always passes, below which the ratio is
# noise.
RATIO = 1.5
TOLERANCE = {Dtype.bf16: 1e-3, Dtype.fp32: 1e-5, Dtype.fp64: 1e-10}
COLUMNS = {
    "context": ("context", ">9"),
    "batch": ("batch", ">5"),
    "variant": ("variant", "<7"),
    "tokens_per_second": ("tokens/s", ">10:.1f"),
    **time_columns("ms", 3, ("median", "p10", "p90")),
    "memory_gb": ("GB", ">8:.3f"),
    "state_mb": ("states MB", ">9:.3f"),
    "prefill_tokens_per_second": ("prefill tokens/s", ">16:.0f"),
    "relative_error": ("error", ">8:.1e"),
    "chunked_error": ("of chunks", ">9:.1e"),
}


def run(config: DecodeConfig, session: Session, report: Report) -> None:
    """Measure all combinations into the report.

    Raises:
        WrongResultError: before anything is timed.
        ConfigError: this machine supports none of the variants.
    """
    _DecodeMeasurement(config, session, report).measure()


CASE = Case("decode", DecodeConfig, COLUMNS, run)


@dataclass(frozen=True)
class _Context:
    # What is known after a context, and the tokens per second of its prefill.
    tokens: int
    logits: Tensor
    states: list[Tensor]
    rate: float


@dataclass
class _Kind:
    # A timed combination and its results on this rank: ms of each step, and bytes.
    context: _Context
    batch: int
    variant: str
    samples: list[float] = field(default_factory=list)
    memory: int = 0
    state_bytes: int = 0


class _DecodeMeasurement:
    def __init__(self, config: DecodeConfig, session: Session, report: Report) -> None:
        self._config, self._session, self._report = config, session, report
        self._variants = [name for name in config.variants if name != "graph" or session.on_cuda]
        if not self._variants:
            raise ConfigError("variants", config.variants, "CUDA graphs need CUDA")
        if self._variants != config.variants:
            report.note("graph is not measured: there is no CUDA device")
        self._run = config.load_run()
        spec, dtype = spec_of(self._run.model), self._run.train.dtype.compute
        calls = [*spec.calls(dtype), *spec.calls(dtype, steps=True)]
        self._slow = session.check_kernels(config.kernels, calls)
        self._model = spec.allocate(dtype, session.device)
        self._model.init_weights(self._run.seed)
        self._model.eval().requires_grad_(False)
        exchange = session.exchange(backend_variant("zeco"), state_elements(self._run), with_halo=spec.needs_halo)
        if (load := softmax_load(self._run.model, session.world_size)) is not None:
            exchange = exchange.replaced(attention=build_softmax(self._run.sp, session.mesh, load))
        self._prefill = Prefill(self._model, session.mesh, exchange, config.prefill_tokens)
        self._tokens = torch.Generator().manual_seed(config.seed)

    def measure(self) -> None:
        self._session.enter("checking")
        ids = self._random(self._config.check_tokens)
        exact = copy.deepcopy(self._model).double()
        expected = whole_logits(exact, ids[None].to(self._session.device))[0]
        # Its memory would count in the measured peaks.
        del exact
        errors = {variant: self._check(variant, ids, expected) for variant in self._variants}
        contexts = list(self._contexts())
        kinds = [_Kind(*each) for each in itertools.product(contexts, self._config.batches, self._variants)]
        for count in in_rounds(self._config.steps):
            for kind in kinds:
                self._session.enter(f"decoding after {kind.context.tokens:,} tokens")
                self._time(kind, count)
        self._report.add([self._row(kind) | errors[kind.variant] for kind in kinds])

    def _contexts(self) -> Iterator[_Context]:
        # No rate is measured before the first context: it counts as free.
        states, position, rate = None, 0, math.inf
        timed = self._config.warmup + self._config.steps
        for context in self._config.contexts:
            if not self._session.within_budget((context - position) / rate):
                self._report.note(f"contexts from {context:,} on are not measured: budget_seconds is over")
                return
            self._session.enter(f"a context of {context:,} tokens")
            started = time.monotonic()
            ids = self._random(context - position)
            found = self._prefill.run([ids], states=states, position=position, capacity=context + timed)
            assert found is not None
            logits, states = found
            if self._session.on_cuda:
                torch.cuda.synchronize()
            rate = (context - position) / max(self._session.gather(time.monotonic() - started))
            position = context
            yield _Context(context, logits, states, rate)

    def _time(self, kind: _Kind, steps: int) -> None:
        session, batch = self._session, kind.batch
        # Copies, also of a single sequence: a decoder updates them in place.
        own = [state.repeat(batch, 1, 1, 1) for state in kind.context.states]
        if session.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        positions = torch.full((batch,), kind.context.tokens, device=session.device)
        decoder = Decoder(self._model, own, positions, cuda_graph=kind.variant == "graph")
        sampler = Sampler(Sampling(temperature=0), [0] * batch, session.device)
        logits, samples = kind.context.logits.expand(batch, -1), []
        for _ in range(self._config.warmup + steps):
            started = time.perf_counter()
            tokens = sampler.draw(logits)
            logits = decoder.step(tokens)
            tokens.tolist()
            if session.on_cuda:
                torch.cuda.synchronize()
            samples.append(1e3 * (time.perf_counter() - started))
        kind.samples += samples[self._config.warmup :]
        memory = torch.cuda.max_memory_allocated() if session.on_cuda else process_memory("VmRSS") or 0
        kind.memory, kind.state_bytes = max(kind.memory, memory), sum(state.nbytes for state in own)

    def _row(self, kind: _Kind) -> Row:
        by_rank = self._session.gather(kind.samples)
        summary = Summary.of(by_rank)
        row = {
            "model": self._run.model.name,
            "context": kind.context.tokens,
            "batch": kind.batch,
            "variant": kind.variant,
            **summary.as_row(),
            "tokens_per_second": 1e3 * kind.batch / summary.median,
            "memory_gb": max(self._session.gather(kind.memory)) / 1e9,
            "state_mb": kind.state_bytes / 1e6,
            "prefill_tokens_per_second": kind.context.rate,
            "samples_ms_by_rank": by_rank,
        }
        return marked(row, self._slow)

    def _check(self, variant: str, ids: Tensor, expected: Tensor) -> dict[str, float]:
        # Errors of a second half's logits, by steps and by the chunked operator; the worst rank's.
        half, device = len(ids) // 2, self._session.device
        started = self._prefill.run([ids[:half]], capacity=len(ids))
        assert started is not None
        positions = torch.tensor([half], device=device)
        decoder = Decoder(self._model, started[1], positions, cuda_graph=variant == "graph")
        # Copies: a decoder's logits are valid until its next step only.
        steps = torch.cat([decoder.step(token[None].to(device)).clone() for token in ids[half:]])
        chunks = whole_logits(self._model, ids[None].to(device))[0, half:]

        def checked(name: str, logits: Tensor, tolerance: float) -> float:
            results = {name: (logits, expected[half:])}
            return self._session.agree(lambda: check_results(variant, self._session.rank, results, tolerance))[name]

        chunked = checked("logits by chunks", chunks, LARGEST_CHUNKED)
        by_steps = checked("logits by steps", steps, max(TOLERANCE[self._config.dtype], RATIO * chunked))
        found = {"relative_error": by_steps, "chunked_error": chunked}
        return {name: max(self._session.gather(error)) for name, error in found.items()}

    def _random(self, count: int) -> Tensor:
        return torch.randint(self._run.model.vocab_size, (count,), generator=self._tokens)
