"""Case `model`: the whole training step of a model, by backend.

A step is the trainer's, with AdamW over master weights. Every rank has `tokens` random tokens a micro-batch: with a
backend its shard of one sequence over all ranks, with `dp` its own sequence. With `seq_len` all sequences have that
length: each rank has `tokens / seq_len` of its own with `dp`, and its shards of `ranks · tokens / seq_len` with a
backend. A hybrid's softmax layers do more work per token the longer the sequence is, so only then is their work equal.

All backends train one model with one optimizer, sharded over all ranks alike, and take turns, a block of steps each:
only the scan differs. `products` takes turns with them; its MFU is of its own FLOPs, the fraction of peak that products
reach here. The peer, `fla`, is a separate model, measured after the first is freed. `dp:no_optimizer` is forward and
backward with FSDP's copies, as replayed in the other steps.

Checks before timing, on untrained weights:
- the whole gradient of each backend on a short sequence, against a plain scan in float64, and softmax layers over
  gathered keys: of a hybrid no farther from it than twice what other rounding of those layers does;
- the loss of the first step: close to log of the vocabulary size (a uniform guess), and equal for all backends, with
  `seq_len` that of `dp`, too;
- the peer's logits against ours, with the same weights.

With `mixers`, or `every` for hybrids, several models are measured one after the other, each built after the last is
freed; a table and a figure (`mixers.md`, `mixers.png`) set them beside each other.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from models.spec import spec_of
from zeco_train.bench import trace
from zeco_train.bench.backends import Backends, RandomTokens, state_elements
from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import ModelConfig, ModelSettings
from zeco_train.bench.figures import mixer_rows, mixer_table
from zeco_train.bench.peer import Peer, Weights, check_peer
from zeco_train.bench.products import Products, product_flops
from zeco_train.bench.session import Row, Session, check_results, choice_of, gradient_norms, marked
from zeco_train.bench.timing import Contender, Subject, time_in_turns, warm_again
from zeco_train.bench.variants import PRODUCTS, Variant, gathered_exchange
from zeco_train.config.schema import Config
from zeco_train.errors import ConfigError
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import find_slow_paths
from zeco_train.system.files import write_result
from zeco_train.system.numbers import relative_error
from zeco_train.tracking.metrics import utilisation
from zeco_train.training.checks import kernel_calls
from zeco_train.training.config import Dtype

# Gradients: with four ranks and 12 layers in bf16 rounding of states gives 4e-3; omitting states gives 0.05 to 9.
TOLERANCE = {Dtype.bf16: 2e-2, Dtype.fp32: 1e-3, Dtype.fp64: 1e-10}
# First losses among backends. The loss of random tokens depends little on the states from other ranks.
LOSS_TOLERANCE = {Dtype.bf16: 1e-3, Dtype.fp32: 1e-5, Dtype.fp64: 1e-10}
# First loss relative to a uniform guess: initial logits are not zero, and the wider the model the smaller they are.
GUESS_TOLERANCE = 0.1
# Logits, in bf16 through all layers (20: 0.19). The tolerance must allow for fla's own rounding; wrong weights give an
# error of 1.4.
PEER_TOLERANCE = 0.4
PAPER_STEPS = 100
MIXERS_FILE = "mixers.md"
# Beyond any timed step's: other tokens.
_TRACED_STEP = 1 << 16
COLUMNS = {
    "mixer": ("mixer", "<10"),
    "heads": ("H", ">3"),
    "tokens": ("tokens", ">7"),
    "seq_len": ("sequence", ">8"),
    "micro_batches": ("batches", ">7"),
    "variant": ("variant", "<18"),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ">12:.0f"),
    "ratio": ("of dp", ">6:.3f"),
    "wall_ms": ("wall ms", ">9:.2f"),
    **time_columns("ms", 2, ("median", "p10", "p90")),
    "runs": ("steps", ">5"),
    "mfu": ("MFU", ">6:.3f"),
    "hfu": ("HFU", ">6:.3f"),
    "host_ms": ("host ms", ">8:.2f"),
    "exposed_ms": ("exposed ms", ">10:.3f"),
    "peak_gb": ("peak GB", ">7:.2f"),
    "first_step_seconds": ("first step s", ">12:.1f"),
    "loss": ("loss", ">8:.4f"),
    "relative_error": ("error", ">8:.1e"),
    "choice": ("all-scan", "<"),
}


def run(config: ModelConfig, session: Session, report: Report) -> None:
    """Measure all combinations into the report.

    Raises:
        WrongResultError: before anything of the same model is timed.
        ConfigError: this machine supports none of the variants.
    """
    if config.trace and not session.on_cuda:
        report.note(trace.NONE_ON_CPU)
    if config.seq_len % (session.world_size * config.segments):
        parts = f"{session.world_size} ranks" + (f" of {config.segments} segments" if config.segments > 1 else "")
        raise ConfigError("seq_len", config.seq_len, f"must divide by {parts}")
    available = _available(config, session, report)
    if config.steps < PAPER_STEPS:
        report.note(f"{config.steps} steps of each variant; the papers' are {PAPER_STEPS}")
    has_products = any(variant.kind == PRODUCTS for own in available.values() for variant in own)
    if has_products and (config.recompute is not Recompute.none or config.segments > 1):
        report.note(f"{PRODUCTS}: of the plain step, without recompute and segments")
    for settings in available:
        session.check_kernels(config.kernels, kernel_calls(config.run_config(settings)))
    for settings, own in available.items():
        measurement = _Measurement(config.run_config(settings), config, session, report)
        measurement.measure([each for each in own if not each.is_peer], [each for each in own if each.is_peer])
    if len(rows := mixer_rows(report.rows)) > 1:
        text = mixer_table(rows)
        session.say(text)
        session.agree(lambda: write_result(report.folder / MIXERS_FILE, text) if session.mesh.is_main else None)


CASE = Case("model", ModelConfig, COLUMNS, run)


def _available(config: ModelConfig, session: Session, report: Report) -> dict[ModelSettings, list[Variant]]:
    available: dict[ModelSettings, list[Variant]] = {}
    problem = None
    for settings in config.models:
        run, available[settings] = config.run_config(settings), []
        for variant in config.chosen:
            try:
                if variant.is_peer:
                    session.agree(partial(check_peer, run, session))
                elif variant.has_scan:
                    session.agree(partial(session.exchange, variant, state_elements(run)))
                available[settings].append(variant)
            except ConfigError as error:
                problem = error
                text = f"{variant.name} is not measured: {error}"
                text = text if len(config.models) == 1 else f"{run.model.name}: {text}"
                if text not in report.notes:
                    report.note(text)
    if problem is not None and not any(available.values()):
        raise problem
    return available


class _Measurement:
    # Of one model: its backends with each number of tokens, and then the peer. The budget is estimated from the time of
    # one variant with one number of tokens: the peer's configurations have one variant each, ours all the others.

    def __init__(self, run: Config, config: ModelConfig, session: Session, report: Report) -> None:
        self._run, self._config, self._session, self._report = run, config, session, report
        self._shape = f"{run.model.name}, H {run.model.num_heads}"
        self._started = time.monotonic()
        # `dp` rows, by tokens.
        self._rates: dict[int, float] = {}
        # Numbers of tokens measured with the backends.
        self._measured: list[int] = []

    def measure(self, backends: Sequence[Variant], peers: Sequence[Variant]) -> None:
        self._session.enter(self._shape)
        weights = self._measure_backends(backends, len(peers))
        # Only here are all references to the model gone; the next one needs its memory.
        _forget()
        for index, peer in enumerate(peers):
            assert weights is not None
            self._measure_peer(peer, weights, len(peers) - index - 1)
            _forget()

    def _measure_backends(self, variants: Sequence[Variant], peers: int) -> Weights | None:
        # Returns the initial weights if there are peers that need them.
        ours = Backends(self._run, self._session, self._config.tokens[0])
        built = time.monotonic() - self._started
        checked = self._check(ours, variants)
        weights = self._weights(ours) if peers else None
        seconds = time.monotonic() - self._started - built
        self._report.note(f"{self._shape}: built in {built:.1f} s, checked in {seconds:.1f} s")
        for count in self._config.tokens if variants else ():
            # Each peer is measured with all numbers of tokens of the backends.
            later = peers * (len(self._measured) + 1)
            if not self._may_start(f"{self._shape}, {count:,} tokens a rank", len(variants) + later):
                break
            # Avoid dynamic shapes: code compiled for any length may be slower.
            _forget()
            # With `seq_len` variants differ in shape: the later ones would get code for any shape.
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                rows = self._time_backends(ours, variants, count, later)
            self._rates |= {row["tokens"]: row["tokens_per_second_per_gpu"] for row in rows if row["variant"] == "dp"}
            self._add([row | checked[row["variant"]] for row in rows])
            self._measured.append(count)
        return weights

    def _time_backends(self, ours: Backends, variants: Sequence[Variant], count: int, later: int) -> list[Row]:
        started = time.monotonic()
        tokens = self._tokens(count)
        contenders = [self._contender(ours, variant, tokens) for variant in variants]
        self._check_losses({each.variant: float(each.loss) for each in contenders if each.name != PRODUCTS})
        rows = self._time(contenders, count, later, started)
        for contender in contenders if self._config.trace and self._session.on_cuda else ():
            if contender.name != PRODUCTS:
                self._session.enter(f"{self._shape}, {count:,} tokens a rank, trace of {contender.name}")
                others = [each for each in contenders if each is not contender]
                warm_again(contender, others, itertools.count(_TRACED_STEP + 1), self._session)
                self._trace(contender, count)
        return rows

    def _trace(self, contender: Contender, count: int) -> None:
        model = self._run.model
        path = self._report.folder / f"trace_{contender.variant.file_name}_{model.name}_t{count}.json"
        subject, replayed = Subject(contender.name, partial(contender.step, _TRACED_STEP)), contender.graphs is not None
        found = trace.record(subject, path, self._session, replayed=replayed)[0]
        what = f"{contender.name}, {count:,} tokens, rank 0"
        self._report.note(f"trace of {what}: {found}; {found.idle}")
        self._report.note(f"parts of {what}, ms of kernels: {trace.described(found.parts)}")

    def _measure_peer(self, variant: Variant, weights: Weights, peers: int) -> None:
        # `peers` is the number of peers after it.
        name = variant.name
        if not self._may_start(f"{self._shape}, {name}", 1):
            return
        peer = Peer(variant, weights, self._run, self._session.mesh)
        started = time.perf_counter()
        results = {"logits": (peer.logits(weights.ids).cpu(), weights.logits)}
        error = self._session.check(name, results, PEER_TOLERANCE)
        tuned = time.perf_counter() - started
        counts = self._measured or self._config.tokens
        for index, count in enumerate(counts):
            if not self._may_start(f"{self._shape}, {name}, {count:,} tokens a rank", 1):
                break
            later, began = peers * len(counts) + len(counts) - index - 1, time.monotonic()
            # Autotuning is mostly independent of the length, and was done in the check.
            contender = Contender(variant, partial(peer.step, self._tokens(count)), first_seconds=tuned)
            tuned = 0.0
            rows = self._time([contender], count, later, began)
            # No HFU: the peer's recomputation is not counted here.
            self._add([{**row, "hfu": None, "relative_error": error} for row in rows])

    def _may_start(self, what: str, variants: int) -> bool:
        # Whether this many variants, each with one number of tokens, would end in time.
        if self._session.within_budget(times=variants):
            self._session.enter(what)
            return True
        budget = self._config.budget_seconds
        self._report.note(f"{what} is not measured, nor what comes after it of the same: budget_seconds={budget:g}")
        return False

    def _tokens(self, count: int, *, seq_len: int | None = None) -> RandomTokens:
        config = self._config
        length = config.seq_len if seq_len is None else seq_len
        vocab_size = self._run.model.vocab_size
        return RandomTokens(vocab_size, count, config.seed, self._session, config.micro_batches, length)

    def _contender(self, ours: Backends, variant: Variant, tokens: RandomTokens) -> Contender:
        # A backend after one forward and backward pass, with its loss; or the products.
        if variant.kind == PRODUCTS:
            run, device = self._run, self._session.device
            products = Products(run.model, tokens.count, run.train.dtype.compute, device, run.seed)
            return products.contender(times=tokens.micro_batches)
        contender = ours.contender(variant, tokens)
        started = time.perf_counter()
        contender.loss, _ = ours.gradient(ours.exchange_of(variant), tokens, alone=variant.is_dp, keep=False)
        contender.first_seconds = time.perf_counter() - started
        return contender

    def _time(self, contenders: Sequence[Contender], count: int, later: int, started: float) -> list[Row]:
        # `later` measurements of one variant must fit in the budget after these, whose setup began at `started`.
        def share() -> float:
            return (time.monotonic() - started) / len(contenders)

        config = self._config
        what = f"{self._shape}, {count:,} tokens a rank"
        steps = time_in_turns(contenders, config.warmup, config.steps, self._session, lambda: later * share(), what)
        self._session.spent(share())
        if steps < config.steps:
            names = ", ".join(contender.name for contender in contenders)
            text = f"{names}, {count:,} tokens: {steps} of {config.steps} steps"
            self._report.note(f"{text}: budget_seconds={config.budget_seconds:g}")
        return [self._row(contender, count) for contender in contenders]

    def _row(self, contender: Contender, count: int) -> Row:
        model, train = self._run.model, self._run.train
        row: Row = {"model": model.name, "mixer": model.mixer, "heads": model.num_heads, "tokens": count}
        row |= {"micro_batches": self._config.micro_batches}
        row |= contender.as_row(self._session)
        spec, alone = spec_of(model), contender.variant.is_alone
        seq_len = row["seq_len"] = self._tokens(count).seq_len(alone)
        flops = spec.flops_per_token(seq_len)
        all_flops = flops + spec.recomputed_flops_per_token(seq_len, train.recompute, train.segments)
        if contender.name == PRODUCTS:
            flops = all_flops = product_flops(model)
            row |= {"loss": None, "seq_len": None, "peak_gb": row["peak_gb"] and contender.held_gb}
        rate = 1e3 * count * self._config.micro_batches / row["wall_ms"]
        device, dtype = self._session.device, train.dtype.compute
        mfu, hfu = (utilisation(rate * each.total, device, dtype) for each in (flops, all_flops))
        row |= {"tokens_per_second_per_gpu": rate, "mfu": mfu, "hfu": hfu}
        if contender.name == PRODUCTS or contender.variant.is_peer:
            return row
        return marked(row, find_slow_paths(kernel_calls(self._run), self._session.target, count))

    def _add(self, rows: Sequence[Row]) -> None:
        dp = self._rates.get(rows[0]["tokens"])
        self._report.add([{**row, "ratio": row["tokens_per_second_per_gpu"] / dp if dp else None} for row in rows])

    def _check(self, ours: Backends, variants: Sequence[Variant]) -> dict[str, Row]:
        # Fields of each backend's rows: gradient error on a short sequence, and the choice of `auto`.
        session, dtype = self._session, self._config.dtype
        tokens = self._tokens(self._config.check_tokens, seq_len=0)
        checked: dict[str, Row] = {variant.name: {} for variant in variants}
        scans = [variant for variant in variants if variant.has_scan]
        if not scans:
            return checked
        # Not compiled: that would compile for another length, and takes long.
        with torch.compiler.set_stance("force_eager"):
            _, expected = ours.gradient(gathered_exchange(), tokens)
            allowed = max(TOLERANCE[dtype], 2 * self._rounding(ours, tokens, expected))
            for variant in scans:
                name, exchange = variant.name, ours.exchange_of(variant)
                _, found = ours.gradient(exchange, tokens)
                results = {"gradient": gradient_norms(found, expected)}
                errors = check_results(name, session.rank, results, allowed)
                checked[name] = {"relative_error": errors["gradient"], "choice": choice_of(exchange)}
        return checked

    def _rounding(self, ours: Backends, tokens: RandomTokens, expected: list[Tensor]) -> float:
        # How far a hybrid's gradient moves if its softmax layers round differently: in bf16 some per cent after many
        # layers, whatever crosses ranks.
        model = self._run.model
        if not model.attn.chosen(model.num_layers):
            return 0.0
        _, cut = ours.gradient(gathered_exchange(num_calls=2), tokens)
        error = relative_error(*gradient_norms(cut, expected))
        self._report.note(f"{model.name}: softmax layers that round differently move the gradient by {error:.1e}")
        return error

    def _check_losses(self, losses: dict[Variant, float]) -> None:
        # Against a uniform guess, and the backends' against each other.
        guess = torch.tensor(math.log(self._run.model.vocab_size))
        for variant, loss in losses.items():
            results = {"the first loss, to be log(vocabulary),": (torch.tensor(loss), guess)}
            check_results(variant.name, self._session.rank, results, GUESS_TOLERANCE)
        shared = {each.name: loss for each, loss in losses.items() if self._config.seq_len or not each.is_dp}
        for name, loss in shared.items():
            first = next(iter(shared))
            pair = torch.tensor(loss), torch.tensor(shared[first])
            tolerance = LOSS_TOLERANCE[self._config.dtype]
            check_results(name, self._session.rank, {f"the first loss, to be that of {first},": pair}, tolerance)

    def _weights(self, ours: Backends) -> Weights:
        ids = self._tokens(self._config.check_tokens, seq_len=0).own(0)
        with torch.compiler.set_stance("force_eager"):
            return Weights(ours.weights(), ids, ours.logits(ids).cpu())


def _forget() -> None:
    # Compiled code may hold references.
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
