"""Settings of the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from zeco_train.bench import variants as known
from zeco_train.bench.variants import Variant, parse_variants
from zeco_train.config.help import describe_settings
from zeco_train.config.overrides import load_settings, parse_settings
from zeco_train.config.schema import Config, load_config
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import Device
from zeco_train.errors import ConfigError
from zeco_train.ops.linear import Matmul
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import Kernels
from zeco_train.sp.attention.method_registry import AttentionChoice
from zeco_train.sp.backend_registry import SHARING
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import check_path, is_plain_name
from zeco_train.training.config import Compile, CudaGraphs, Dtype

PASSES = ("forward", "forward_backward")
_MIB = 1 << 20
_DECODERS = ("eager", "graph")


@dataclass
class CaseConfig:
    """Settings of every case.

    Attributes:
        out: output folder; empty is `runs/bench/<case>-<ranks>`.
        seed: of the inputs.
        timeout_seconds: bound of each wait for another rank.
        budget_seconds: time for all configurations; none is started that would end later, if it takes as long as the
            longest so far.
        commit: of this source tree; empty asks git, which may be missing or outdated in a copy of the tree.
    """

    out: str = ""
    device: Device = Device.auto
    seed: int = 0
    timeout_seconds: float = 120.0
    budget_seconds: float = 540.0
    commit: str = ""

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        return load_settings(cls, arguments)

    def validate(self) -> None:
        check_least(self, seed=0)
        if self.out:
            check_path("out", self.out)
        for name in ("timeout_seconds", "budget_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(name, getattr(self, name), "must be > 0 and ≤ 86400")

    def _check_different(self, name: str, legal: Iterable[str]) -> None:
        values = getattr(self, name)
        if not values or len(set(values)) < len(values) or not {*values} <= {*legal}:
            raise ConfigError(name, values, f"must be a list of different ones of {', '.join(legal)}")

    def _check_lists(self, **least: int) -> None:
        for name, smallest in least.items():
            values = getattr(self, name)
            if not values or any(value < smallest for value in values):
                raise ConfigError(name, values, f"must be a list of numbers ≥ {smallest}")


@dataclass
class BenchConfig(CaseConfig):
    """Settings of the cases that compare variants.

    Attributes:
        warmup: untimed runs, or steps, of each variant; the papers' are 5.
        variants: variants to compare, see `zeco_train.bench.variants`.
    """

    warmup: int = 5
    variants: list[str] = field(default_factory=list)

    def validate(self) -> None:
        super().validate()
        check_least(self, warmup=1)


@dataclass
class RunsConfig(BenchConfig):
    """Settings of the cases that time single operations.

    Attributes:
        runs: timed runs of each variant; the papers' are 50.
        flush_mb: MiB written before each run, to empty the L2 cache; −1 is four times the L2 (64 on CPUs), 0 none.
        graph: also time each variant inside CUDA graphs.
    """

    runs: int = 50
    flush_mb: int = -1
    graph: bool = False

    def validate(self) -> None:
        super().validate()
        check_least(self, runs=1, flush_mb=-1)

    def _check_operation(self, passes: list[str], check_tokens: int, least: int) -> None:
        if not passes or any(name not in PASSES for name in passes):
            raise ConfigError("passes", passes, f"must be a list of {', '.join(PASSES)}")
        if check_tokens < least and check_tokens != -1:
            raise ConfigError("check_tokens", check_tokens, f"must be ≥ {least}, or -1 for the device's default")


@dataclass
class CollectivesConfig(RunsConfig):
    """Settings of case `collectives`.

    Attributes:
        sizes_mb: MiB of a rank's state, [1, H, K, V] in fp32; must be whole heads.
        key_dim, value_dim: K and V.
        matrices: transitions are matrices, as of delta rules; the all-gather then has them, too.
        graph_operations: operations per CUDA graph.
    """

    variants: list[str] = field(default_factory=lambda: list(known.SCAN_VARIANTS))
    graph: bool = True
    sizes_mb: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0])
    key_dim: int = 64
    value_dim: int = 128
    matrices: bool = False
    graph_operations: int = 10

    def validate(self) -> None:
        super().validate()
        _ = self.chosen
        check_least(self, key_dim=1, value_dim=1, graph_operations=1)
        if not self.sizes_mb:
            raise ConfigError("sizes_mb", self.sizes_mb, "must be a list of numbers > 0")
        for size in self.sizes_mb:
            self.heads(size)

    @property
    def chosen(self) -> list[Variant]:
        return parse_variants(self.variants, *known.ANCHORS, *SHARING)

    def heads(self, size_mb: float) -> int:
        """H for a state of `size_mb` MiB."""
        head = self.key_dim * self.value_dim * 4 / _MIB
        heads = size_mb / head
        if heads < 1 or heads != round(heads):
            raise ConfigError("sizes_mb", size_mb, f"must be a multiple of {head:g}, the MiB of one head's K × V fp32")
        return round(heads)


@dataclass
class OperatorConfig(RunsConfig):
    """Settings of case `operator`.

    Attributes:
        operator: one of those listed.
        groups: heads of q and k, each for as many heads of v, of operators that can share them; null: as many as those.
        decay: of operators with constant decays: `retention` (the default), RetNet's; `none`, plain linear attention.
        heads, dims, tokens: H, [K, V] and tokens per rank; all combinations are measured, tokens innermost.
        dtype: of q, k, v; decays and strengths are fp32 (fp64 with fp64).
        passes: `forward`, `forward_backward`.
        check_tokens: tokens per rank in the correctness check; −1 is 4,096 on GPUs, where shorter inputs would give
            each walk over chunks a single chunk, and 256 on CPUs.
        kernels: of shapes that kernels on GPUs do not serve, as `train.kernels`.
        trace: also profile one forward + backward of each variant; reports the overlap of communication and compute.
    """

    variants: list[str] = field(default_factory=lambda: list(known.OPERATOR_VARIANTS))
    operator: str = field(default=DEFAULT, metadata={"options": known.BENCHED})
    groups: int | None = None
    decay: str | None = None
    heads: list[int] = field(default_factory=lambda: [16, 32])
    dims: list[list[int]] = field(default_factory=lambda: [[64, 128], [128, 128]])
    tokens: list[int] = field(default_factory=lambda: [8192, 16384, 32768, 65536])
    dtype: Dtype = Dtype.bf16
    passes: list[str] = field(default_factory=lambda: list(PASSES))
    check_tokens: int = -1
    kernels: Kernels = Kernels.auto
    trace: bool = False

    def validate(self) -> None:
        super().validate()
        _ = self.chosen
        self._check_lists(heads=1, tokens=1)
        self._check_operator()
        if not self.dims or any(len(pair) != 2 or min(pair) < 1 for pair in self.dims):
            raise ConfigError("dims", self.dims, "must be a list of pairs [K, V] of numbers ≥ 1")
        self._check_operation(self.passes, self.check_tokens, least=1)

    @property
    def chosen(self) -> list[Variant]:
        return parse_variants(self.variants, *known.OPERATOR_VARIANTS, known.FLA_CP)

    def _check_operator(self) -> None:
        if self.operator not in known.BENCHED:
            raise ConfigError("operator", self.operator, f"must be one of {', '.join(known.BENCHED)}")
        if self.groups is not None:
            if not OPERATORS[self.operator].is_grouped:
                raise ConfigError("groups", self.groups, f"{self.operator} has none; take another operator")
            if self.groups < 1 or any(heads % self.groups for heads in self.heads):
                raise ConfigError("groups", self.groups, f"must be ≥ 1 and divide heads={self.heads}")
        decays = {name: [peer.decay for peer in OPERATORS[name].peers if peer.decay] for name in known.BENCHED}
        if legal := decays[self.operator]:
            self.decay = legal[0] if self.decay is None else self.decay
            if self.decay not in legal:
                raise ConfigError("decay", self.decay, f"must be one of {', '.join(legal)}")
        elif self.decay is not None:
            takes = " or ".join(name for name, constant in decays.items() if constant)
            raise ConfigError("decay", self.decay, f"{self.operator} draws its decays; take operator={takes}")


@dataclass
class OfModelConfig(BenchConfig):
    """Settings of the cases that run a whole model.

    Attributes:
        model: a file of `configs/model`; `model.KEY=VALUE` overrides its fields, as in train.py.
        dtype: compute dtype.
        kernels: as `train.kernels`.
        overrides: the `model.KEY=VALUE` arguments.
    """

    model: str = "gla_1b"
    dtype: Dtype = Dtype.bf16
    kernels: Kernels = Kernels.auto
    overrides: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        """Settings from KEY=VALUE arguments; those of `model.` override the model's."""
        overrides = [text for text in arguments if text.lstrip("+").startswith("model.")]
        config = parse_settings(cls, [text for text in arguments if text not in overrides])
        config.overrides += overrides
        # Only now: the other settings may fit the overridden model only.
        config.validate()
        return config

    def load_run(self, *settings: str) -> Config:
        """A training run with this model; `ConfigError` for an unknown or invalid one."""
        own = f"train.dtype={self.dtype.name}", f"seed={self.seed}"
        config = load_config([f"model={self.model}", *self.overrides, *own, *settings])
        # The results are read back only with such a name; see `stored`.
        if not (is_plain_name(config.model.name) and config.model.name.isprintable()):
            raise ConfigError("model.name", config.model.name, "names the figures; must be a plain name without /")
        return config


@dataclass
class DecodeConfig(OfModelConfig):
    """Settings of case `decode`.

    Attributes:
        variants: how a step starts its kernels. `eager`: one by one; `graph`: as one CUDA graph.
        contexts: context lengths before the timed tokens, increasing.
        batches: concurrent sequences per rank.
        steps: timed tokens per sequence.
        prefill_tokens: tokens of a context per prefill pass and rank; more take more memory.
        check_tokens: tokens of the correctness check, half of them in steps.
    """

    variants: list[str] = field(default_factory=lambda: list(_DECODERS))
    contexts: list[int] = field(default_factory=lambda: [1 << 10, 1 << 14, 1 << 17, 1 << 20])
    batches: list[int] = field(default_factory=lambda: [1])
    steps: int = 64
    prefill_tokens: int = 16_384
    check_tokens: int = 200

    def validate(self) -> None:
        super().validate()
        self._check_different("variants", _DECODERS)
        self._check_lists(contexts=1, batches=1)
        if sorted(set(self.contexts)) != self.contexts:
            raise ConfigError("contexts", self.contexts, "must rise: one is the beginning of the next")
        check_least(self, steps=1, prefill_tokens=1, check_tokens=2)
        self.load_run()


@dataclass
class LongestConfig(OfModelConfig):
    """Settings of case `longest`.

    Attributes:
        warmup: steps of a trial before its last one; CUDA graphs are captured in the third.
        variants: backends, as `sp=`; empty: dp, and the others if there are ranks to share with.
        ranks: that train together; this command starts them.
        strategies: of the parameters, as `parallel=`.
        recompute: as `train.recompute`; each combination with `every`, `strategies` and `variants` is a search.
        every: patterns of softmax attention, one layer in this many, 0 in none; empty: the model's own.
        segments, compile, cuda_graphs: as train.py's `train.segments` and so on.
        micro_batches: sequences of a step in each group of ranks that share one.
        unit: lengths are multiples of so many tokens a rank and segment.
        precision: of a length, relative.
        most: tokens of a sequence, at most.
        memory_gb: of a process on a CPU, its data in 10^9 bytes; null: no limit of its own.
        trial_seconds: longest time of a trial.
    """

    warmup: int = 3
    variants: list[str] = field(default_factory=list)
    ranks: int = 1
    strategies: list[Strategy] = field(default_factory=lambda: [Strategy.zero2])
    recompute: list[Recompute] = field(default_factory=lambda: [*Recompute])
    every: list[int] = field(default_factory=list)
    segments: int = 1
    compile: Compile = Compile.auto
    cuda_graphs: CudaGraphs = CudaGraphs.auto
    micro_batches: int = 1
    unit: int = 1024
    precision: float = 0.05
    most: int = 1 << 26
    memory_gb: float | None = None
    trial_seconds: float = 300.0

    def validate(self) -> None:
        super().validate()
        self.variants = self.variants or ["dp", *(SHARING if self.ranks > 1 else ())]
        self._check_different("variants", ("dp", *SHARING))
        for name in ("strategies", "recompute", "every"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or (not values and name != "every"):
                raise ConfigError(name, [getattr(x, "name", x) for x in values], "must be a list of different ones")
        check_least(self, ranks=1, segments=1, micro_batches=1, unit=1, most=1)
        if self.most < (least := self.unit * self.segments * self.ranks):
            raise ConfigError("most", self.most, f"must be ≥ {least}, one unit of each rank and segment")
        if not 0 <= self.precision < 1:
            raise ConfigError("precision", self.precision, "must be ≥ 0 and < 1")
        for name in ("memory_gb", "trial_seconds"):
            if (value := getattr(self, name)) is not None and not 0 < value <= 1e6:
                raise ConfigError(name, value, "must be > 0 and ≤ 1e6")
        self.load_run()

    def trial_overrides(self, every: int | None, strategy: Strategy, recompute: Recompute, backend: str) -> list[str]:
        """Overrides of a trial's run, all but its files and its length."""
        dp_size = self.ranks if backend == "dp" else 1
        return [
            f"model={self.model}", *self.overrides, *([] if every is None else [f"model.attn.every={every or 'null'}"]),
            f"train.dtype={self.dtype.name}", f"seed={self.seed}", f"train.kernels={self.kernels.name}",
            f"parallel={strategy.name}", f"train.recompute={recompute.name}", f"sp={backend}",
            f"sp.size={1 if backend == 'dp' else self.ranks}", f"train.segments={self.segments}",
            f"train.compile={self.compile.name}", f"train.cuda_graphs={self.cuda_graphs.name}",
            "data=tokens", f"data.global_batch={dp_size * self.micro_batches}", "data.micro_batch=1",
            "train.eval_sequences=0", f"train.steps={self.warmup + 1}",
            "sched=constant", "sched.warmup_steps=0", "checkpoint.every=0", "checkpoint.final=false",
            f"parallel.timeout_seconds={self.timeout_seconds}",
        ]  # fmt: skip

    def load_trial(self, overrides: Sequence[str]) -> Config:
        """A trial's run; `ConfigError` if it is refused."""
        return load_config([*overrides, "data.path=store"])


def describe(cases: Mapping[str, type[CaseConfig]]) -> str:
    """The settings of cases, for `--help`: of one case all; of several a line each, first those that they share."""
    if len(cases) == 1:
        return "\n\n".join(f"Case {name}:\n{describe_settings(schema)}" for name, schema in cases.items())
    families = (CaseConfig, BenchConfig, RunsConfig, OfModelConfig)
    titles = {
        family: ", ".join(name for name, case in cases.items() if issubclass(case, family)) for family in families
    }
    shared = [f"Of {title}:\n{_own_settings(family)}" for family, title in titles.items() if title]
    own = [f"Case {name} (all of it: {name} --help):\n{_own_settings(schema)}" for name, schema in cases.items()]
    return "\n\n".join([*shared, *own])


def _own_settings(schema: type[CaseConfig]) -> str:
    return describe_settings(schema, brief=True, among=schema.__annotations__)


class ModelSettings(NamedTuple):
    """What distinguishes the models of case `model`; None is what the model's file has.

    With a `mixer`, it is the file of the same size; softmax attention is in one layer of `every`, 0: in none.
    """

    mixer: str | None = None
    every: int | None = None
    heads: int | None = None


@dataclass
class ModelConfig(OfModelConfig):
    """Settings of case `model`.

    Attributes:
        variants: dp, lasp1, lasp2, zeco train; dp:no_optimizer runs dp's passes alone; `products` runs only the matrix
            products of their plain step, as an upper bound; fla is the peer, with :no_optimizer and :compile.
        budget_seconds: each `fla` reserves as much of it as one of the other variants has taken; configurations with
            more tokens per rank are not started, and fewer steps are timed, if that would not be left.
        mixers: to measure one after the other, each with its file of the size of `model`; empty: the model's own.
        every: patterns to measure one after the other; softmax attention in one layer of this many, 0 in none, as
            `model.attn.every`; empty: the model's own.
        attention: method of softmax layers over ranks, as `sp.attention`.
        heads, tokens: H (null: that of the model's file), and tokens per rank and micro-batch; all combinations are
            measured, tokens innermost.
        seq_len: tokens of a sequence, which divide `tokens`; hybrids are compared at equal work only with one length.
            0: a sequence is all tokens of a rank with dp, and those of all ranks with a backend.
        micro_batches: of `tokens` tokens per rank each, of a step.
        steps: timed optimizer steps of each variant; the papers' are 100. Fewer, with a note, if another quarter of
            them would not end within budget_seconds.
        dtype, matmul, compile, cuda_graphs, recompute, segments: as train.py's `train.dtype` and so on. Only dtype
            applies to `products`, and none to `fla`, which is trained in bf16.
        strategy: parallelism of the parameters; not hsdp, which shards over other ranks with `dp` than with the rest,
            nor torch_ddp, which ties the model to the step of one variant.
        check_tokens: tokens per rank in the correctness check.
        trace: also profile one step of each variant that trains; notes the overlap of communication and compute, the
            time in which nothing runs, and what the parts of the step take (`zeco_train.bench.trace`).
    """

    variants: list[str] = field(default_factory=lambda: list(known.MODEL_VARIANTS))
    mixers: list[str] = field(default_factory=list)
    every: list[int] = field(default_factory=list)
    attention: AttentionChoice = AttentionChoice["auto"]
    heads: list[int] | None = None
    tokens: list[int] = field(default_factory=lambda: [16_384, 32_768])
    seq_len: int = 0
    micro_batches: int = 1
    steps: int = 100
    matmul: Matmul = Matmul.bf16
    compile: Compile = Compile.auto
    cuda_graphs: CudaGraphs = CudaGraphs.auto
    recompute: Recompute = Recompute.none
    segments: int = 1
    strategy: Strategy = Strategy.zero2
    check_tokens: int = 256
    trace: bool = False

    def validate(self) -> None:
        super().validate()
        _ = self.chosen
        self._check_lists(tokens=1, **({} if self.heads is None else {"heads": 1}))
        check_least(self, seq_len=0, micro_batches=1, steps=1, segments=1, check_tokens=1)
        for tokens in (*self.tokens, self.check_tokens):
            if tokens % self.segments:
                name = "check_tokens" if tokens == self.check_tokens else "tokens"
                raise ConfigError(name, tokens, f"must divide by segments={self.segments}")
        for tokens in self.tokens if self.seq_len else ():
            if tokens % self.seq_len:
                raise ConfigError("tokens", tokens, f"must divide by seq_len={self.seq_len}")
        if self.strategy in (Strategy.hsdp, Strategy.torch_ddp):
            raise ConfigError("strategy", self.strategy.name, "must be ddp, zero1, zero2 or zero3")
        for name in ("mixers", "every"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(name, values, "must be a list of different ones")
        for settings in self.models:
            self.run_config(settings)

    @property
    def chosen(self) -> list[Variant]:
        return parse_variants(self.variants, "dp", known.PRODUCTS, *SHARING, "fla", of_model=True)

    @property
    def models(self) -> list[ModelSettings]:
        own: list[None] = [None]
        combinations = itertools.product(self.mixers or own, self.every or own, self.heads or own)
        return [*itertools.starmap(ModelSettings, combinations)]

    def run_config(self, settings: ModelSettings) -> Config:
        """A training run of a model; `ConfigError` for an unknown or invalid one."""
        mixer, every, heads = settings
        for text in self.overrides:
            key, _, value = text.lstrip("+").partition("=")
            if key == "model.num_heads":
                raise ConfigError(key, value, "write heads=[…] here")
            for taken, name, setting in (("model.mixer", "mixers", mixer), ("model.attn.every", "every", every)):
                if key == taken and setting is not None:
                    raise ConfigError(key, value, f"is one of {name}=[…] already; leave it out")
        own = {"model.mixer": mixer, "model.attn.every": "null" if every == 0 else every, "model.num_heads": heads}
        # Refused for a model without softmax layers; a pattern without is there to compare with.
        if self.attention.name != "auto" and every != 0:
            own["sp.attention"] = self.attention.name
        run = self.load_run(
            *(f"{key}={value}" for key, value in own.items() if value is not None),
            *(f"train.{name}={getattr(self, name).name}" for name in ("matmul", "compile", "cuda_graphs", "recompute")),
            f"train.segments={self.segments}",
            f"parallel.strategy={self.strategy.name}",
        )
        if every:
            # Results of several patterns are told apart by name.
            run.model = replace(run.model, name=f"{run.model.name}_hybrid_{every}")
        return run
