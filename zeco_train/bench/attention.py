"""Case `attention`: softmax attention of one layer over ranks by each method, and linear attention beside it.

Every rank has `tokens` tokens. With a method, or a backend, they are its shard of one sequence over all ranks; with
`dp` its own sequence. Softmax attention does more work per token the longer the sequence is, so the methods' tokens per
second are not comparable with those of `dp`; their FLOPs per second are, and `ratio` compares them. A step is the
operator and autograd, from queries, keys and values as projected; `forward` is without autograd.

On GPUs each variant is profiled once, on all ranks, forward + backward:

exposed    time of communication kernels with no compute under it, waits for slower ranks included; of the slowest rank
slowest    compute time of the rank with the most, relative to the mean: 1 is a perfect balance
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from zeco_train.bench import trace
from zeco_train.bench.attention_variants import (
    DEFAULTS,
    LINEAR,
    TORCH,
    VARIANTS,
    AttentionVariant,
    OnRanks,
    build_variant,
)
from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import PASSES, RunsConfig
from zeco_train.bench.operands import Inputs, Shape
from zeco_train.bench.operator import PEER_TOLERANCE, TOLERANCE, operator_step, peak_gb
from zeco_train.bench.runner import Runner, Subject
from zeco_train.bench.samples import Row, marked
from zeco_train.bench.session import Session
from zeco_train.errors import ConfigError
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import exact_results, exact_softmax
from zeco_train.ops.slow_paths import Kernels, find_slow_paths
from zeco_train.sp.attention.pipelined import LEAST_TOKENS
from zeco_train.system.numbers import check_least
from zeco_train.training.config import Dtype

COLUMNS = {
    "heads": ("H", ">3"),
    "key_heads": ("G", ">3"),
    "head_dim": ("D", ">3"),
    "window": ("window", ">6"),
    "tokens": ("tokens", ">7"),
    "pass": ("pass", "<16"),
    "variant": ("variant", "<24"),
    **time_columns("ms", 4),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ">12:.4g"),
    "tflops_per_gpu": ("TFLOP/s/GPU", ">11:.4g"),
    "ratio": ("of dp", ">6:.3f"),
    "exposed_us": ("exposed µs", ">10:.1f"),
    "slowest": ("slowest", ">7:.3f"),
    "peak_gb": ("peak GB", ">7:.2f"),
    "relative_error": ("error", ">8:.1e"),
}


@dataclass
class AttentionConfig(RunsConfig):
    """Settings of case `attention`.

    Attributes:
        heads: H, heads of queries. Linear attention has as many, with K = V = D.
        key_heads: G, heads of keys and values; null: H.
        head_dim: D, width of a head.
        window: keys that a query reads at most, itself among them; null: all before it.
        tokens: per rank, one after the other.
        dtype: of q, k, v.
        passes: `forward`, `forward_backward`.
        kernels: of heads that kernels on GPUs do not serve, as `train.kernels`.
        check_tokens: tokens per rank in the correctness check; −1 is 8,192 on GPUs, where methods between nodes cut the
            heads into parts as in long runs, and 256 on CPUs.
    """

    variants: list[str] = field(default_factory=lambda: list(DEFAULTS))
    heads: int = 16
    key_heads: int | None = None
    head_dim: int = 128
    window: int | None = None
    tokens: list[int] = field(default_factory=lambda: [16_384, 65_536])
    dtype: Dtype = Dtype.bf16
    passes: list[str] = field(default_factory=lambda: list(PASSES))
    kernels: Kernels = Kernels.auto
    check_tokens: int = -1

    def validate(self) -> None:
        super().validate()
        unknown = [name for name in self.variants if name not in VARIANTS]
        if not self.variants or unknown or len(set(self.variants)) < len(self.variants):
            allowed = f"must be a list of different ones of {', '.join(VARIANTS)}"
            raise ConfigError("variants", self.variants, allowed)
        check_least(self, heads=1, head_dim=1)
        self._check_lists(tokens=2)
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            raise ConfigError("key_heads", self.key_heads, f"must be ≥ 1 and divide heads={self.heads}")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", self.window, "must be ≥ 1, or null")
        if self.graph:
            raise ConfigError("graph", self.graph, "a method's messages are not captured; take graph=false")
        self._check_operation(self.passes, self.check_tokens, least=2)

    @property
    def num_key_heads(self) -> int:
        """G."""
        return self.heads if self.key_heads is None else self.key_heads

    def shape(self, variant: AttentionVariant, tokens: int) -> Shape:
        """The sizes of a variant's operands."""
        operator, groups = (LINEAR, None) if variant.is_linear else ("softmax", self.num_key_heads)
        return Shape(self.heads, self.head_dim, self.head_dim, tokens, operator, groups)


def run(config: AttentionConfig, session: Session) -> Report:
    """Measure all combinations; results are in the report's folder.

    Raises:
        WrongResultError: before anything is timed.
        ConfigError: these ranks support none of the variants.
    """
    report = Report("attention", config, session, COLUMNS)
    ours = [VARIANTS[name] for name in config.variants if VARIANTS[name].method != TORCH]
    calls = [("bench attention", config.shape(each, 1).call(config.dtype)) for each in ours]
    session.check_kernels(config.kernels, calls)
    session.enter("checks")
    checked = _check_all(config, session, report)
    runner = Runner(config, session)
    for tokens in report.in_budget(config.tokens, "{:,} tokens a rank".format):
        report.add(_measure(tokens, config, session, runner, report.folder, checked))
    return report


CASE = Case(AttentionConfig, run)


def _check_all(config: AttentionConfig, session: Session, report: Report) -> dict[AttentionVariant, float]:
    # Each supported variant's largest error of o and all gradients, relative to exact results of the whole sequence.
    checked: dict[AttentionVariant, float] = {}
    problem: ConfigError | None = None
    default = LEAST_TOKENS if session.on_cuda else 256
    tokens = default if config.check_tokens == -1 else config.check_tokens
    for variant in (VARIANTS[name] for name in config.variants):
        name, shape = variant.name, config.shape(variant, tokens)
        try:
            # A rank alone takes the whole sequence.
            length = replace(shape, tokens=session.world_size * tokens) if variant.is_alone else shape
            built = session.agree(partial(build_variant, variant, length, config.window, session))
        except ConfigError as error:
            problem = error
            report.note(f"{name} is not measured: {error}")
            continue
        own = Inputs.random(shape, config.dtype, config.seed + 1 + session.rank, session.device)
        whole = own.gathered()
        if variant.is_linear:
            expected = exact_results(OPERATORS[shape.operator], whole.operands, whole.do)
        else:
            q, k, v = whole.operands.values()
            expected = exact_softmax(q, k, v, whole.do, window=config.window)
        with built.within():
            found = whole.at(built.positions).results(built.attention)
        pairs = {key: (value, expected[key][:, built.positions]) for key, value in found.items()}
        tolerance = PEER_TOLERANCE if variant.method == TORCH else TOLERANCE[config.dtype]
        checked[variant] = session.check(name, pairs, tolerance)
    if problem is not None and not checked:
        raise problem
    return checked


def _measure(
    tokens: int,
    config: AttentionConfig,
    session: Session,
    runner: Runner,
    folder: Path,
    checked: dict[AttentionVariant, float],
) -> list[Row]:
    variants = {variant.name: variant for variant in checked}
    built = {each: build_variant(each, config.shape(each, tokens), config.window, session) for each in checked}
    seed = config.seed + 1 + session.rank
    inputs = {
        name: Inputs.random(config.shape(VARIANTS[name], tokens), config.dtype, seed, session.device)
        for name in {variant.reference for variant in checked}
    }
    rows: list[Row] = []
    for kind in config.passes:
        subjects = {}
        for variant, on_ranks in built.items():
            step = operator_step(variant.name, kind, on_ranks.attention, inputs[variant.reference])
            subjects[variant.name] = replace(step, run=partial(_within, on_ranks, step))
        peaks = {name: peak_gb(subject, session) for name, subject in subjects.items()}
        profiles: dict[str, Row] = {name: {} for name in subjects}
        found = runner.rows([*subjects.values()])
        if kind == "forward_backward" and session.on_cuda:
            profiles = {name: _profiled(subject, tokens, folder, session) for name, subject in subjects.items()}
        flops = {name: _flops(config, each, tokens, kind, session.world_size) for name, each in variants.items()}
        rates = {row["variant"]: flops[row["variant"]] / row["median_ms"] for row in found}
        for row in found:
            variant = variants[name := row["variant"]]
            rest = {"pass": kind, "tokens": tokens, "peak_gb": peaks[name], "relative_error": checked[variant]}
            call = config.shape(variant, tokens).call(config.dtype)
            slow = find_slow_paths([("", call)] if variant.method != TORCH else [], session.target, tokens)
            row |= _compared(variant, row["median_ms"], tokens, rates) | profiles[name] | rest
            rows.append(marked(row, slow))
    shape = {"heads": config.heads, "key_heads": config.num_key_heads, "head_dim": config.head_dim}
    return [{**shape, "window": config.window, **row} for row in rows]


def _within(on_ranks: OnRanks, step: Subject) -> object:
    with on_ranks.within():
        return step.run()


def _flops(config: AttentionConfig, variant: AttentionVariant, tokens: int, kind: str, ranks: int) -> float:
    # Of a rank: two products forward, five backward, of each pair of a query and a key that it reads. Those of linear
    # attention depend on the chunks.
    if variant.is_linear:
        return math.nan
    ranks = 1 if variant.is_alone else ranks
    length = tokens * ranks
    window = min(length, config.window or length)
    # The first `window` queries read 1, 2, … keys, the others `window`.
    pairs = window * (window + 1) / 2 + (length - window) * window
    products = 2 if kind == "forward" else 7
    return 2 * products * config.heads * config.head_dim * pairs / ranks


def _compared(variant: AttentionVariant, median_ms: float, tokens: int, rates: dict[str, float]) -> Row:
    rate, dp = rates[variant.name], rates.get(variant.reference)
    row: Row = {"tokens_per_second_per_gpu": 1e3 * tokens / median_ms}
    if not math.isnan(rate):
        row |= {"tflops_per_gpu": rate * 1e-9, "ratio": rate / dp if dp else None}
    return row


def _profiled(step: Subject, tokens: int, folder: Path, session: Session) -> Row:
    overlaps = trace.record(step, folder / f"trace_{step.name.replace(':', '-')}_t{tokens}.json", session)
    compute = [each.compute_us for each in overlaps]
    mean = sum(compute) / len(compute)
    return {
        "exposed_us": max(each.communication_us - each.hidden_us for each in overlaps),
        "slowest": max(compute) / mean if mean else None,
        "compute_us_by_rank": compute,
    }
