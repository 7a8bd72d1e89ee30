"""Settings of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeco_train.bench.variants import GLA_VARIANTS, SCAN_VARIANTS, check_variants
from zeco_train.config import Device, Dtype
from zeco_train.errors import ConfigError
from zeco_train.overrides import describe_attributes, describe_settings

PASSES = ("forward", "forward_backward")
_MIB = 1 << 20


@dataclass
class BenchConfig:
    """What every case has.

    Attributes:
        out: folder of the results; empty is `runs/bench/<case>-<ranks>`.
        seed: of the inputs.
        warmup, runs: untimed and timed runs of each variant; the papers' are 5 and 50.
        flush_mb: MiB written before each run, to empty the L2 cache; −1 is four times the L2 (64 on CPUs), 0 none.
        timeout_seconds: bound of each wait for another rank.
        budget_seconds: no configuration is started that would, by the longest so far, end after this many seconds.
        variants: what is compared, see `zeco_train.bench.variants`.
        graph: also time each variant inside CUDA graphs.
        commit: of this source tree; empty asks git, which a copy of the tree may lack, or have of an older state.
    """

    out: str = ""
    device: Device = Device.auto
    seed: int = 0
    warmup: int = 5
    runs: int = 50
    flush_mb: int = -1
    timeout_seconds: float = 120.0
    budget_seconds: float = 540.0
    variants: list[str] = field(default_factory=list)
    graph: bool = False
    commit: str = ""

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for name, least in (("warmup", 1), ("runs", 1), ("flush_mb", -1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"must be ≥ {least}")
        for name in ("timeout_seconds", "budget_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(name, getattr(self, name), "must be > 0 and ≤ 86400")

    def _check_lists(self, **least: int) -> None:
        """Raise `ConfigError` for a list that is empty or has a number below its least."""
        for name, smallest in least.items():
            values = getattr(self, name)
            if not values or any(value < smallest for value in values):
                raise ConfigError(name, values, f"must be a list of numbers ≥ {smallest}")


@dataclass
class CollectivesConfig(BenchConfig):
    """Attributes:
    sizes_mb: MiB of a rank's state, [1, H, K, V] in fp32; whole heads.
    key_dim, value_dim: K and V.
    graph_operations: operations in one CUDA graph.
    """

    variants: list[str] = field(default_factory=lambda: list(SCAN_VARIANTS))
    graph: bool = True
    sizes_mb: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0])
    key_dim: int = 64
    value_dim: int = 128
    graph_operations: int = 10

    def validate(self) -> None:
        super().validate()
        check_variants(self.variants, "all_gather", "all_reduce", "lasp1", "lasp2", "zeco")
        for name in ("key_dim", "value_dim", "graph_operations"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be ≥ 1")
        if not self.sizes_mb:
            raise ConfigError("sizes_mb", self.sizes_mb, "must be a list of numbers > 0")
        for size in self.sizes_mb:
            self.heads(size)

    def heads(self, size_mb: float) -> int:
        """H of a state of `size_mb` MiB."""
        head = self.key_dim * self.value_dim * 4 / _MIB
        heads = size_mb / head
        if heads < 1 or heads != round(heads):
            raise ConfigError("sizes_mb", size_mb, f"must be a multiple of {head:g}, the MiB of one head's K × V fp32")
        return round(heads)


@dataclass
class OperatorConfig(BenchConfig):
    """Attributes:
    heads, dims, tokens: H, [K, V] and tokens a rank; all combinations are measured, tokens innermost.
    dtype: of q, k, v; decays are fp32 (fp64 with fp64).
    passes: `forward`, `forward_backward`.
    check_tokens: tokens a rank of the check of correctness; −1 is 4,096 on GPUs, where shorter ones leave the walks
        over chunks a chunk each, and 256 on CPUs.
    trace: also write a profile of one forward + backward of each variant, and report what runs under what.
    """

    variants: list[str] = field(default_factory=lambda: list(GLA_VARIANTS))
    heads: list[int] = field(default_factory=lambda: [16, 32])
    dims: list[list[int]] = field(default_factory=lambda: [[64, 128], [128, 128]])
    tokens: list[int] = field(default_factory=lambda: [8192, 16384, 32768, 65536])
    dtype: Dtype = Dtype.bf16
    passes: list[str] = field(default_factory=lambda: list(PASSES))
    check_tokens: int = -1
    trace: bool = False

    def validate(self) -> None:
        super().validate()
        check_variants(self.variants, "dp", "copy", "lasp1", "lasp2", "zeco", "fla")
        self._check_lists(heads=1, tokens=1)
        if not self.dims or any(len(pair) != 2 or min(pair) < 1 for pair in self.dims):
            raise ConfigError("dims", self.dims, "must be a list of pairs [K, V] of numbers ≥ 1")
        if not self.passes or any(name not in PASSES for name in self.passes):
            raise ConfigError("passes", self.passes, f"must be a list of {', '.join(PASSES)}")
        if self.check_tokens < 1 and self.check_tokens != -1:
            raise ConfigError("check_tokens", self.check_tokens, "must be ≥ 1, or -1 for the device's default")


def describe() -> str:
    """The settings of both cases."""
    cases = (("collectives", CollectivesConfig), ("operator", OperatorConfig))
    common = f"Of both cases:\n{describe_attributes(BenchConfig)}"
    return "\n\n".join([common, *(f"Case {case}:\n{describe_settings(schema)}" for case, schema in cases)])
