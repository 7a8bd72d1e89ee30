"""Question: what does a late rank or a late state cost, and are the planner's rules right about it?
Command: torchrun --standalone --nproc-per-node 2 -m lab.delays
Date: 2026-11-24, 4b7cfad, 2 × H200
Answer: 5.7 µs a hop of the chain; 0.19 of the forward and 0.37 of the backward pass hide a late state; ranks drift
    apart in replayed steps. lab/README.md, "Late ranks and states"; lab/results/delays_2xh200.txt.
"""

from __future__ import annotations

import gc
import itertools
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lab.bench_case import LabCase
from lab.delays.config import DelaysConfig
from lab.delays.hops import measure_chains, measure_hops
from lab.delays.model import OVERLAPS, PATTERNS, Predicted, gpu_of, late_by
from lab.delays.spins import Place, Spins, spinning
from models.spec import spec_of
from zeco_train.bench.backends import Backends, RandomTokens, state_elements
from zeco_train.bench.case import Report, time_columns
from zeco_train.bench.operator import TOLERANCE, Inputs, Shape, operator_step
from zeco_train.bench.session import Row, Session, check_results
from zeco_train.bench.timing import Mark, Runner, Subject, Summary, mark, milliseconds
from zeco_train.bench.variants import Variant, gathered_exchange
from zeco_train.errors import ConfigError, ZecoError, first_cause
from zeco_train.ops.mix import mix
from zeco_train.ops.seam import Exchange
from zeco_train.system.signals import run_command
from zeco_train.system.terminal import format_table
from zeco_train.training.checks import kernel_calls
from zeco_train.training.graphs import WARM_UP

K = TypeVar("K", bound=Hashable)
# A delay is a spin, before the scan's kernel on the scan's stream (parts operator, step), or before the launch on the
# stream of compute (drift). All is launched with spins, also without delay; steps with all delays take turns.
# Growth is the median time less that without delay, for each delayed scan or layer; its share is growth over the delay.
# Pattern `same`: 1 where nothing hides the delay, since the slowest rank has all the work. `alternating`: 1, too, if
# ranks hold each other in every layer; if they may drift apart by the delay, each is late in half of the layers, and
# the receiver waits for the other's first: (layers + 2) / (2 · layers) of a long delay. `once`: 1 over the layers.
# Growth below this share of the delay counts as hidden.
HIDDEN = 0.1
# A spin may take longer by its launch, and by a share of it.
_SPIN_US, _SPIN_SHARE = 20.0, 0.05
_ON_CPU = "no symmetric memory and no CUDA graphs on a CPU: hops go by gloo, chains are skipped, and spins are sleeps"
_PASSES = {"forward": False, "backward": True}
COLUMNS = {
    "part": ("part", "<8"),
    "variant": ("variant", "<20"),
    "strategy": ("strategy", "<8"),
    "heads": ("H", ">3"),
    "tokens": ("tokens", ">7"),
    "mode": ("mode", "<6"),
    "pass": ("delayed", "<8"),
    "pattern": ("late", "<11"),
    "delay_us": ("delay µs", ">8:g"),
    **time_columns("ms", 4, ("median", "p10", "p90")),
    "each_us": ("µs each", ">9:.2f"),
    "model_us": ("model µs", ">9:.2f"),
    "share": ("of delay", ">8:.3f"),
    "model_share": ("model", ">6:.3f"),
    "relative_error": ("error", ">8:.1e"),
}
# Of the short table at the end.
_SUMMARY = {
    "what": ("", "<84"),
    "found": ("measured", ">10:.3f"),
    "model": ("model", ">10:.3f"),
}


def run(config: DelaysConfig, session: Session, report: Report) -> None:
    """Measure all parts into the report. What fails is noted, and the rest is measured.

    Raises:
        ConfigError: not two ranks.
    """
    if session.world_size != 2:
        raise ConfigError("ranks", session.world_size, "this case is of two: torchrun --nproc-per-node 2")
    session.check_kernels(config.kernels, kernel_calls(config.run_config(config.strategies[0])))
    _Measurement(config, session, report).measure()


class _DelayedBackends(Backends):
    """`Backends` whose scans are delayed by `spins`.

    Each `purpose` has scans of its own: a scan whose capture failed cannot be used again.
    """

    def __init__(self, config: DelaysConfig, strategy: str, session: Session) -> None:
        self.run, self.strategy = config.run_config(strategy), strategy
        super().__init__(self.run, session, config.drift_tokens)
        self.spins = Spins(config.layers, session.device)

    def exchange_of(self, variant: Variant) -> Exchange:
        """See `Backends.exchange_of`."""
        return spinning(super().exchange_of(variant), self.spins)


class _Measurement:
    def __init__(self, config: DelaysConfig, session: Session, report: Report) -> None:
        self._config, self._session, self._report = config, session, report
        self._modes = ["eager", "graph"] if config.graph and session.on_cuda else ["eager"]
        self._summary: list[Row] = []
        # Longest duration of each kind of measurement.
        self._spent: dict[str, float] = {}

    def measure(self) -> None:
        """Add all rows to the report, and at last the summary."""
        config, session = self._config, self._session
        self._report.note(f"the model's columns are the planner's, gpu={gpu_of(session).value}")
        if not session.on_cuda:
            self._report.note(_ON_CPU)
        else:
            self._attempt("spin", "a spin", self._check_spin)
        if {"hops", "operator"} & {*config.parts}:
            runner = Runner(config, session)
        for heads in config.heads if "hops" in config.parts else ():
            self._attempt("hops", f"hops of {heads} heads", partial(self._hops, heads, runner, measure_hops))
            if session.on_cuda:
                self._attempt("chains", f"chains of {heads} heads", partial(self._hops, heads, runner, measure_chains))
        for variant, tokens in itertools.product(config.chosen, config.tokens) if "operator" in config.parts else ():
            what = f"operator, {variant}, {tokens:,} tokens"
            self._attempt("operator", what, partial(self._operator, variant, tokens, runner))
        self._models()
        if self._summary:
            self._report.note(format_table(self._summary, _SUMMARY))

    def _attempt(self, kind: str, what: str, action: Callable[[], object]) -> bool:
        """Run a measurement, if one more of its kind fits in the budget; note its failure on any rank. Collective.

        Returns:
            Whether it has succeeded on all ranks.
        """
        session = self._session
        if not session.within_budget(self._spent.get(kind, 0.0)):
            self._report.note(f"{what}: not measured: budget_seconds={self._config.budget_seconds:g}")
            return False
        session.enter(what)
        started, problem = time.monotonic(), ""
        try:
            action()
        except ZecoError as error:
            problem = str(error)
        except Exception as error:
            # Whatever it is, what is measured before and after it stands on its own.
            traceback.print_exc()
            problem = f"{type(error).__name__}: {first_cause(error)}"
        problems = [f"{what}: rank {rank}: {text}" for rank, text in enumerate(session.gather(problem)) if text]
        if problems:
            self._report.fail(problems[0])
        self._spent[kind] = max(self._spent.get(kind, 0.0), time.monotonic() - started)
        return not problems

    def _check_spin(self) -> None:
        """Note what spins take.

        Raises:
            RuntimeError: not their time.
        """
        wanted = max(self._config.delays_us)
        found = self._session.gather(Spins(1, self._session.device).measure(wanted))
        text = f"spins of {wanted:g} µs take {' and '.join(f'{each:.1f}' for each in found)} µs, with their launch"
        self._report.note(text)
        if any(abs(each - wanted) > _SPIN_US + _SPIN_SHARE * wanted for each in found):
            raise RuntimeError(text)

    def _hops(self, heads: int, runner: Runner, measure: Callable[..., list[Row]]) -> None:
        rows = measure(heads, self._config, self._session, runner)
        self._report.add(rows)
        for row in rows:
            what = f"{row['variant']}, {row['state_mb']:.2f} MB, {row['mode']}"
            if "each_us" in row:
                self._sum_up(f"µs a hop: {what}", row["each_us"], row["model_us"])
            if "median_ms" in row:
                self._sum_up(
                    f"ms, {row['hops']} hops: {what} (model: a chain)", row["median_ms"], row["model_chain_ms"]
                )

    def _operator(self, variant: Variant, tokens: int, runner: Runner) -> None:
        """Rows of the operator with each delay of each of its two scans."""
        config, session = self._config, self._session
        run = config.run_config(config.strategies[0])
        predicted = Predicted.of(run, variant, tokens, session)
        shape = Shape(*spec_of(run.model).state_shape, tokens)
        inputs = Inputs.random(shape, config.dtype, config.seed + 1 + session.rank, session.device)
        spins = Spins(1, session.device)
        delayed = spinning(session.exchange(variant, state_elements(run), "operator"), spins)
        tables = _tables_of_scans(spins, config.delays_us)

        def prepared(name: str, exchange: Exchange, table: Tensor) -> Subject:
            position = session.position(exchange, tokens)
            step = operator_step(name, "forward_backward", lambda *operands: mix("gla", operands, position)[0], inputs)

            def prepare() -> None:
                step.prepare()
                spins.load(table)

            return replace(step, prepare=prepare)

        spins.load(tables[_PASSES["forward"], config.delays_us[-1]])
        found, expected = (
            inputs.results(lambda *operands, at=position: mix("gla", operands, at)[0])
            for position in (session.position(exchange, tokens) for exchange in (delayed, gathered_exchange()))
        )
        pairs = {name: (found[name], expected[name]) for name in found}
        session.agree(partial(check_results, f"{variant}, delayed,", session.rank, pairs, TOLERANCE[config.dtype]))
        subjects = [prepared(variant.name, delayed, table) for table in tables.values()]
        timed = dict(zip(tables, runner.rows(subjects), strict=True))
        self._add_delayed({"part": "operator", "tokens": tokens}, timed, predicted, 1)

    def _models(self) -> None:
        """Rows of parts `drift` and `step`."""
        config, session = self._config, self._session
        strategies = config.strategies if "drift" in config.parts else config.strategies[:1]
        built: list[_DelayedBackends] = []

        def build(strategy: str) -> None:
            built.append(_DelayedBackends(config, strategy, session))

        for strategy in strategies if {"drift", "step"} & {*config.parts} else ():
            if not self._attempt("build", f"model, {strategy}", partial(build, strategy)):
                continue
            for variant, mode in itertools.product(config.chosen if "drift" in config.parts else (), self._modes):
                what = f"drift, {variant}, {strategy}, {mode}"
                self._attempt("drift", what, partial(self._drift, built[-1], variant, mode))
        if not built or "step" not in config.parts:
            return
        ours = built[0]
        built.clear()
        compiled = config.drift_tokens if "drift" in config.parts else None
        # First the number of tokens for which the blocks are compiled already.
        for tokens in sorted(config.tokens, key=lambda count: (count != compiled, count)):
            if compiled not in (None, tokens):
                # Else the blocks would be compiled for any number of tokens, and possibly be slower.
                _free_memory()
            compiled = tokens
            for variant in config.chosen:
                what = f"step, {variant}, {ours.strategy}, {tokens:,} tokens"
                self._attempt("step", what, partial(self._step, ours, variant, tokens))

    def _drift(self, ours: _DelayedBackends, variant: Variant, mode: str) -> None:
        config, session, spins, layers = self._config, self._session, ours.spins, self._config.layers
        predicted = Predicted.of(ours.run, variant, config.drift_tokens, session, replayed=mode == "graph")
        tables = {("", "", 0.0): _no_delay(spins)}
        for name, delay, pattern in itertools.product(_PASSES, config.drift_us, PATTERNS):
            late = late_by(pattern, session.rank, layers, delay)
            tables[name, pattern, delay] = spins.table(Place.compute, _PASSES[name], late)
        ours.purpose = f"drift {ours.strategy} {mode}"
        timed = self._time(ours, variant, config.drift_tokens, mode, tables)
        shape = {"part": "drift", "variant": variant.name, "strategy": ours.strategy, "tokens": config.drift_tokens}
        before, rows = timed["", "", 0.0]["median_ms"], []
        for (name, pattern, delay), row in timed.items():
            row |= {**shape, "pass": name or None, "pattern": pattern or "none", "delay_us": delay}
            if pattern:
                growth = 1e3 * (row["median_ms"] - before) / layers
                model = 1e6 * predicted.late_growth(pattern, _PASSES[name], 1e-6 * delay) / layers
                row |= {"each_us": growth, "share": growth / delay, "model_us": model, "model_share": model / delay}
                what = f"drift: {variant}, {ours.strategy}, {mode}, {name}, {pattern}, {delay:g} µs (of delay)"
                self._sum_up(what, row["share"], row["model_share"])
                if pattern == "alternating" and predicted.one_way:
                    seconds = 1e-6 * layers * growth
                    row["drift"] = predicted.drift_of(_PASSES[name], 1e-6 * delay, seconds)
                    self._sum_up(what.replace("(of delay)", "(DRIFT, or more)"), row["drift"], predicted.share)
            rows.append(row)
        self._report.add(rows)

    def _step(self, ours: _DelayedBackends, variant: Variant, tokens: int) -> None:
        mode = self._modes[-1]
        ours.purpose = f"step {mode}"
        timed = self._time(ours, variant, tokens, mode, _tables_of_scans(ours.spins, self._config.delays_us))
        predicted = Predicted.of(ours.run, variant, tokens, self._session)
        shape = {"part": "step", "variant": variant.name, "strategy": ours.strategy, "tokens": tokens}
        self._add_delayed(shape, timed, predicted, ours.spins.layers)

    def _time(
        self, ours: _DelayedBackends, variant: Variant, tokens: int, mode: str, tables: Mapping[K, Tensor]
    ) -> dict[K, Row]:
        """Times of a model's steps with each table of delays, which take turns. Collective.

        Raises:
            WrongResultError: the last loss is not finite.
        """
        config, session = self._config, self._session
        ids = RandomTokens(ours.run.model.vocab_size, tokens, config.seed, session)
        contender = ours.contender(variant, ids, replayed=mode == "graph")
        assert contender.meter is not None
        numbers, keys = itertools.count(), [*tables]
        marks: dict[K, list[tuple[Mark, Mark]]] = {key: [] for key in keys}
        ours.spins.load(tables[keys[0]])
        # A graph is captured after its own warm-up, and then has to be replayed once.
        for _ in range(max(config.warmup, WARM_UP + 2) if contender.graphs is not None else config.warmup):
            contender.step(next(numbers))
        session.settle()
        dist.barrier()
        loss: float | Tensor = 0.0
        for turn in range(config.steps):
            for index in range(len(keys)):
                key = keys[(turn + index) % len(keys)]
                ours.spins.load(tables[key])
                before = mark(session)
                loss = contender.step(next(numbers))
                marks[key].append((before, mark(session)))
        session.settle()
        # Not reported: the growth of steps is.
        contender.meter.take()
        check_results(variant.name, session.rank, {"the last loss": (torch.tensor(float(loss)),) * 2}, 0.0)
        found = {}
        for key in keys:
            by_rank = session.gather([milliseconds(*pair) for pair in marks[key]])
            found[key] = {"variant": variant.name, "mode": mode, **Summary.of(by_rank).as_row()}
            found[key] |= {"samples_ms_by_rank": by_rank}
        return found

    def _add_delayed(
        self, shape: Row, timed: Mapping[tuple[bool, float], Row], predicted: Predicted, scans: int
    ) -> None:
        """Rows of delayed scans, and what stays hidden of the delays.

        Args:
            shape: fields of all rows.
            timed: by direction and delay.
            predicted: of the same.
            scans: that are delayed in each direction.
        """
        alone = shape["part"] == "operator"
        names = {reverse: name for name, reverse in _PASSES.items()}
        before = next(row["median_ms"] for (_, delay), row in timed.items() if delay == 0)
        rows = []
        for (reverse, delay), row in timed.items():
            row |= {**shape, "pass": names[reverse] if delay else None, "delay_us": delay}
            if delay:
                growth = 1e3 * (row["median_ms"] - before) / scans
                grow = predicted.operator_growth if alone else predicted.step_growth
                model = 1e6 * grow(reverse, 1e-6 * delay)
                row |= {"each_us": growth, "share": growth / delay, "model_us": model, "model_share": model / delay}
            rows.append(row)
        for reverse, name in names.items():
            own = [timed[key] for key in timed if key[0] == reverse and key[1]]
            what = f"{shape['part']}: {own[0]['variant']}, {shape['tokens']:,} tokens, {name}"
            model = 1e6 * predicted.hidden(reverse, alone=alone)
            self._sum_up(f"µs hidden (< {HIDDEN:.0%}): {what}", hidden_us(own), model)
            # Beyond the window each further µs counts.
            slack = own[-1]["delay_us"] - own[-1]["each_us"]
            self._sum_up(f"µs of slack: {what}", slack, model)
            if alone:
                own[-1]["overlap"] = predicted.overlap_of(reverse, 1e-6 * slack)
                self._sum_up(f"OVERLAP_{name.upper()}: {what}", own[-1]["overlap"], OVERLAPS[reverse])
        self._report.add(rows)

    def _sum_up(self, what: str, found: float, model: float) -> None:
        self._summary.append({"what": what, "found": found, "model": model})


def hidden_us(rows: Sequence[Row]) -> float:
    """The longest delay of which less than `HIDDEN` is exposed, as of all shorter ones; 0 if there is none."""
    hidden = itertools.takewhile(lambda row: row["share"] < HIDDEN, rows)
    return max((row["delay_us"] for row in hidden), default=0.0)


def _tables_of_scans(spins: Spins, delays_us: Sequence[float]) -> dict[tuple[bool, float], Tensor]:
    """Tables without delay, and with each delay of all scans in one direction, by direction and delay."""
    tables = {(False, 0.0): _no_delay(spins)}
    for reverse, delay in itertools.product(_PASSES.values(), delays_us):
        tables[reverse, delay] = spins.table(Place.scan, reverse, [delay] * spins.layers)
    return tables


def _no_delay(spins: Spins) -> Tensor:
    return spins.table(Place.scan, False, [0.0] * spins.layers)


def _free_memory() -> None:
    """Free unused memory, including compiled code, which may hold references."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


CASE = LabCase("delays", DelaysConfig, COLUMNS, run)
main = CASE.main

if __name__ == "__main__":
    run_command("lab.delays.__main__")
