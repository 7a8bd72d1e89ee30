"""The settings of `zeco_train.verify`, and the resulting list of cases."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from functools import partial

import torch

from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.config.help import describe_settings
from zeco_train.distributed.mesh import Device
from zeco_train.errors import ConfigError
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS
from zeco_train.ops.slow_paths import Call, Kernels
from zeco_train.ops.softmax import attention
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig, AllScanTransport
from zeco_train.sp.attention.all_gather import ALL_GATHER, AllGather
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.attention.method_registry import METHODS as ATTENTION_METHODS
from zeco_train.sp.backend_registry import BACKENDS as SPECS
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import check_output_file
from zeco_train.verify.whole import SOFTMAX, VERIFIED

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
# Tolerances against float64: norm of the difference over norm.
LIMITS = {"bf16": 1e-2, "fp32": 1e-3, "fp64": 1e-12}

# Every backend with its defaults, and for All-Scan each algorithm over each transport that it supports.
BACKENDS: dict[str, SPConfig] = {
    **{name: SPConfig(Backend[name]) for name, spec in SPECS.items() if not spec.section},
    **{
        f"zeco:{scan.name}:{transport.value}": SPConfig(
            Backend["zeco"], all_scan=AllScanConfig(AllScanAlgorithm[scan.name], transport)
        )
        for transport in (AllScanTransport.p2p, AllScanTransport.symmetric)
        for scan in ALL_SCANS
        if scan.kernel or transport is AllScanTransport.p2p
    },
    **{name: SPConfig(Backend[name]) for name, spec in SPECS.items() if spec.section},
}


METHODS: dict[str, MethodSpec] = {
    **ATTENTION_METHODS,
    # Without a window, too, each rank computes its own queries.
    "all_gather:unpaired": dataclasses.replace(ALL_GATHER, build=partial(AllGather, paired=False)),
}
# Settings that select no cases.
_OF_ALL_CASES = ("seed", "device", "timeout", "table", "out")
# Settings without effect on softmax attention, and those that only softmax attention has.
_OF_STATES, _OF_SOFTMAX = ("backends", "value_dim", "carry"), ("methods", "key_heads", "window")


@dataclass
class VerifyConfig:
    """Settings of `python -m zeco_train.verify`.

    Without a setting that selects cases, all run: operator DEFAULT and softmax on the launched ranks, on GPUs every
    operator; then operators, scans, methods and training steps in fp64 on up to 6 ranks of its own, on the CPU.

    Attributes:
        operator: one of those listed; null: DEFAULT, and then softmax with the fewest tokens.
        backends: how ranks exchange states; subset of those listed.
        methods: how they exchange what softmax attention reads; subset of those listed.
        dtypes: of q, k, v, of bf16, fp32, fp64; empty is fp32, bf16 on GPUs and fp64, fp32 on CPUs.
        tokens: tokens per rank; one case each. Empty is 1000, 16384 on GPUs and 100, 512 on CPUs; 100 where all run.
        sp_sizes: ranks that share a sequence; empty is every divisor of the world size, on CPUs where all run the
            world size.
        batch, heads, key_dim, value_dim: B, H, K, V; in softmax attention V is K. Packed documents have a batch of 1.
        key_heads: heads of keys and values in softmax attention; null: half as many as of queries, if that is possible.
        window: keys that a query of softmax attention reads at most, itself among them; 0: no limit; null: no limit,
            and one and a half times `tokens`.
        documents: packed documents that straddle ranks (true), one document (false), both (null).
        carry: the sequence has an initial state and returns its final state. null: only without packed documents.
        kernels: of dtypes and shapes that kernels on GPUs do not serve, as `train.kernels`.
        seed: of all inputs on the launched ranks.
        device: auto takes CUDA devices if there are any.
        timeout: seconds that a rank waits for another, including the others' float64 reference.
        table: show each comparison, with the error of each tensor, in a table 240 columns wide; else those that failed.
        out: a JSON file for the results.
    """

    operator: str | None = None
    backends: list[str] = field(default_factory=lambda: list(BACKENDS))
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    dtypes: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sp_sizes: list[int] = field(default_factory=list)
    batch: int = 1
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 128
    key_heads: int | None = None
    window: int | None = None
    documents: bool | None = None
    carry: bool | None = None
    kernels: Kernels = Kernels.auto
    seed: int = 0
    device: Device = Device.auto
    timeout: float = 300.0
    table: bool = False
    out: str | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range, or one without effect on the operator."""
        if self.operator is not None and self.operator not in (*VERIFIED, SOFTMAX):
            raise ConfigError("operator", self.operator, f"must be one of {', '.join((*VERIFIED, SOFTMAX))}")
        default, ignored = VerifyConfig(), _OF_STATES if self.operator == SOFTMAX else _OF_SOFTMAX
        for name in ignored if self.operator is not None else ():
            if (value := getattr(self, name)) != getattr(default, name):
                raise ConfigError(name, value, f"would be ignored by operator={self.operator}")
        for name, legal in (("backends", list(BACKENDS)), ("methods", list(METHODS)), ("dtypes", list(DTYPES))):
            given = getattr(self, name)
            if wrong := [value for value in given if value not in legal]:
                raise ConfigError(name, wrong[0], f"must be a list of {', '.join(legal)}")
            if len(set(given)) < len(given):
                raise ConfigError(name, given, "names one twice")
            if not given and name != "dtypes":
                raise ConfigError(name, given, f"must be a list of {', '.join(legal)}")
        for name, least in (("tokens", 8), ("sp_sizes", 1)):
            if any(value < least for value in getattr(self, name)):
                raise ConfigError(name, getattr(self, name), f"must be numbers ≥ {least}")
        check_least(self, batch=1, heads=1, key_dim=1, value_dim=1)
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            raise ConfigError("key_heads", self.key_heads, f"must divide the {self.heads} heads of queries")
        # With one key only, gradients of queries are 0, and no error is relative to that.
        if self.window is not None and (self.window < 0 or self.window == 1):
            raise ConfigError("window", self.window, "must be ≥ 2, 0 for none, or null")
        if self.batch > 1 and self.documents:
            raise ConfigError("documents", "true", "packed documents have a batch of 1")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError("seed", self.seed, "must be ≥ 0 and < 2^32")
        if not 0 < self.timeout <= 86_400:
            raise ConfigError("timeout", self.timeout, "must be > 0 and ≤ 86400 seconds")
        if self.out is not None:
            check_output_file("out", self.out)

    def resolve(self, device: torch.device, world_size: int) -> VerifyConfig:
        """Fill in the machine's defaults.

        Raises:
            ConfigError: a setting that the machine or the number of ranks does not support.
        """
        on_gpu = device.type == "cuda"
        # Own ranks have long sequences, and fewer ranks.
        all_run = self.selects_nothing and not on_gpu
        on_cpu = [100] if all_run else [100, 512]
        legal = [size for size in range(1, world_size + 1) if world_size % size == 0]
        if wrong := [size for size in self.sp_sizes if size not in legal]:
            raise ConfigError("sp_sizes", wrong[0], f"must divide the number of ranks: {', '.join(map(str, legal))}")
        return dataclasses.replace(
            self,
            dtypes=self.dtypes or (["fp32", "bf16"] if on_gpu else ["fp64", "fp32"]),
            tokens=self.tokens or ([1000, 16384] if on_gpu else on_cpu),
            sp_sizes=self.sp_sizes or (legal[-1:] if all_run else legal),
        )

    @property
    def selects_nothing(self) -> bool:
        """Whether no setting selects cases, so that all run; before `resolve`."""
        return self == VerifyConfig(**{name: getattr(self, name) for name in _OF_ALL_CASES})

    @property
    def operators(self) -> list[str]:
        return [DEFAULT, SOFTMAX] if self.operator is None else [self.operator]

    @property
    def calls(self) -> list[tuple[str, Call]]:
        """What is verified and has kernels on GPUs."""
        found = []
        for name, dtype in itertools.product(self.operators, self.dtypes):
            rule = attention.KERNELS if name == SOFTMAX else OPERATORS[name].kernels
            dims = self.key_dim, self.key_dim if name == SOFTMAX else self.value_dim
            found += [] if rule is None else [("verify", Call(name, rule, DTYPES[dtype], *dims))]
        return found

    @property
    def num_key_heads(self) -> int:
        """G."""
        return self.key_heads or (self.heads if self.heads % 2 else self.heads // 2)

    def windows(self, tokens: int) -> list[int | None]:
        return [None, tokens + tokens // 2] if self.window is None else [self.window or None]


def describe() -> str:
    """The text of `--help`."""
    lists = {
        "operators": (*VERIFIED, SOFTMAX),
        "backends": BACKENDS,
        "methods of softmax attention": METHODS,
        "dtypes": DTYPES,
    }
    legal = "\n".join(f"{name}: {', '.join(names)}" for name, names in lists.items())
    return (
        "usage: torchrun --nproc-per-node N -m zeco_train.verify [KEY=VALUE ...]\n\n"
        f"{legal}\n\n{describe_settings(VerifyConfig).replace('DEFAULT', DEFAULT)}"
    )
