"""Settings of case `delays`."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeco_train.bench.config import OfModelConfig, RunsConfig
from zeco_train.bench.variants import Variant, parse_variants
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import BACKENDS, SHARING
from zeco_train.system.numbers import check_least

PARTS = ("hops", "operator", "drift", "step")
# Those whose scans progress without their caller, so that they can be delayed alone.
_DELAYED = tuple(name for name in SHARING if not any(scan.in_series for scan in BACKENDS[name].scans))
_LONGEST_US = 1e6


@dataclass
class DelaysConfig(RunsConfig, OfModelConfig):
    """Settings of case `delays`.

    Attributes:
        parts: to measure, of `hops`, `operator`, `drift` and `step`.
        variants: scans to delay.
        runs: timed runs of the hops and of the operator.
        graph: hops, drift and step also inside CUDA graphs; `step` only there, where there are GPUs.
        hops: of a state from rank to rank and back.
        chain_ranks: ranks of the chains that two GPUs hold in turn, even numbers, rising.
        heads, key_dim, value_dim: of the states of `hops`, [1, H, K, V] in fp32, for each H.
        model: of mixer gla; its operator alone is measured, too.
        layers: of the model, instead of its own number.
        tokens: per rank, of `operator` and `step`.
        delays_us: µs by which the scans are delayed, rising.
        strategies: parallelism of the parameters, of `drift`; `step` takes the first.
        drift_tokens: per rank, of `drift`.
        drift_us: µs by which a rank is late.
        steps: timed steps with each delay.
    """

    variants: list[str] = field(default_factory=lambda: ["zeco:chain"])
    warmup: int = 4
    runs: int = 20
    graph: bool = True
    timeout_seconds: float = 60.0
    budget_seconds: float = 100.0
    parts: list[str] = field(default_factory=lambda: list(PARTS))
    hops: int = 255
    chain_ranks: list[int] = field(default_factory=lambda: [4, 16])
    heads: list[int] = field(default_factory=lambda: [16, 32])
    key_dim: int = 64
    value_dim: int = 128
    layers: int = 4
    tokens: list[int] = field(default_factory=lambda: [4096, 16_384, 32_768])
    delays_us: list[float] = field(default_factory=lambda: [50.0, 100.0, 200.0, 400.0, 800.0])
    strategies: list[str] = field(default_factory=lambda: ["zero2", "ddp"])
    drift_tokens: int = 16_384
    drift_us: list[float] = field(default_factory=lambda: [400.0, 1600.0])
    steps: int = 8

    def validate(self) -> None:
        """See `CaseConfig.validate`."""
        super().validate()
        _ = self.chosen
        check_least(self, hops=1, key_dim=1, value_dim=1, layers=2, drift_tokens=1, steps=1)
        self._check_lists(heads=1, tokens=1)
        names = {
            "parts": PARTS,
            "strategies": [each.name for each in Strategy if each not in (Strategy.hsdp, Strategy.torch_ddp)],
        }
        for name, allowed in names.items():
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or not {*values} <= {*allowed}:
                raise ConfigError(name, values, f"must be a list of different ones of {', '.join(allowed)}")
        lengths = self.chain_ranks
        if not lengths or sorted(set(lengths)) != lengths or lengths[0] < 2 or any(each % 2 for each in lengths):
            raise ConfigError("chain_ranks", lengths, "must be a list of rising even numbers ≥ 2")
        for name in ("delays_us", "drift_us"):
            values = getattr(self, name)
            if not values or sorted(set(values)) != values or not 0 < values[0] <= values[-1] <= _LONGEST_US:
                raise ConfigError(name, values, f"must be a list of rising numbers > 0 and ≤ {_LONGEST_US:g}")
        run = self.run_config(self.strategies[0])
        if run.model.mixer != "gla" or run.model.attn.chosen(run.model.num_layers):
            raise ConfigError("model", self.model, "must be a model whose layers are all of mixer gla")

    @property
    def chosen(self) -> list[Variant]:
        """The variants; `ConfigError` for a wrong one."""
        return parse_variants(self.variants, *_DELAYED)

    def run_config(self, strategy: str) -> Config:
        """The configuration of a training run of the model.

        Raises:
            ConfigError: an unknown or invalid model.
        """
        for text in self.overrides:
            key, _, value = text.lstrip("+").partition("=")
            if key == "model.num_layers":
                raise ConfigError(key, value, "write layers=… here")
        return self.load_run(f"model.num_layers={self.layers}", f"parallel.strategy={strategy}")
