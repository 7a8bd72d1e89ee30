"""The settings of `zeco_train.verify`, and the resulting list of cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.config.overrides import describe_settings
from zeco_train.distributed.device import Device
from zeco_train.errors import ConfigError
from zeco_train.sp.registry import BACKENDS as SPECS
from zeco_train.sp.registry import Backend, SPConfig
from zeco_train.sp.zeco import AllScanAlgorithm, AllScanConfig, AllScanTransport
from zeco_train.system.paths import check_output_file
from zeco_train.system.ranges import check_least
from zeco_train.verify.sequences import VERIFIED

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


@dataclass
class VerifyConfig:
    """Settings of `python -m zeco_train.verify`.

    Attributes:
        operator: of `VERIFIED`.
        backends: subset of `BACKENDS`.
        dtypes: of q, k, v, of bf16, fp32, fp64; empty is fp32, bf16 on GPUs and fp64, fp32 on CPUs.
        tokens: tokens per rank; one case each. Empty is 1000, 16384 on GPUs and 100, 512 on CPUs.
        sp_sizes: ranks that share a sequence; empty is every divisor of the world size.
        batch, heads, key_dim, value_dim: B, H, K, V. Packed documents have a batch of 1.
        documents: packed documents that straddle ranks (true), one document (false), or both (null).
        carry: the sequence has an initial state and returns its final state. null: only without packed documents.
        huge: instead of the other cases, values and chunk states of more than 2³¹ elements, on each GPU separately.
        seed: of all inputs.
        device: auto takes CUDA devices if there are any.
        timeout: seconds that a rank waits for another, including the others' float64 reference.
        out: a JSON file for the results.
    """

    operator: str = "gla"
    backends: list[str] = field(default_factory=lambda: list(BACKENDS))
    dtypes: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sp_sizes: list[int] = field(default_factory=list)
    batch: int = 1
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 128
    documents: bool | None = None
    carry: bool | None = None
    huge: bool = False
    seed: int = 0
    device: Device = Device.auto
    timeout: float = 300.0
    out: str | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        if self.operator not in VERIFIED:
            raise ConfigError("operator", self.operator, f"must be one of {', '.join(VERIFIED)}")
        if self.huge and self.operator != "gla":
            raise ConfigError("huge", "true", "is of the operator gla only")
        for name, legal in (("backends", list(BACKENDS)), ("dtypes", list(DTYPES))):
            given = getattr(self, name)
            if wrong := [value for value in given if value not in legal]:
                raise ConfigError(name, wrong[0], f"must be a list of {', '.join(legal)}")
            if len(set(given)) < len(given):
                raise ConfigError(name, given, "names one twice")
        if not self.backends:
            raise ConfigError("backends", self.backends, f"must be a list of {', '.join(BACKENDS)}")
        for name, least in (("tokens", 8), ("sp_sizes", 1)):
            if any(value < least for value in getattr(self, name)):
                raise ConfigError(name, getattr(self, name), f"must be numbers ≥ {least}")
        check_least(self, batch=1, heads=1, key_dim=1, value_dim=1)
        if self.batch > 1 and self.documents:
            raise ConfigError("documents", "true", "packed documents have a batch of 1")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError("seed", self.seed, "must be ≥ 0 and < 2^32")
        if not 0 < self.timeout <= 86_400:
            raise ConfigError("timeout", self.timeout, "must be > 0 and ≤ 86400 seconds")
        if self.out is not None:
            check_output_file("out", self.out)

    def resolve(self, device: torch.device, world_size: int) -> VerifyConfig:
        """Fill in defaults that depend on the machine and the number of ranks.

        Raises:
            ConfigError: a setting that the machine or the number of ranks does not support.
        """
        on_gpu = device.type == "cuda"
        if self.huge and not on_gpu:
            raise ConfigError("huge", "true", "needs a CUDA device with about 60 GB (bf16) or 110 GB (fp32) of memory")
        legal = [size for size in range(1, world_size + 1) if world_size % size == 0]
        if wrong := [size for size in self.sp_sizes if size not in legal]:
            raise ConfigError("sp_sizes", wrong[0], f"must divide the number of ranks: {', '.join(map(str, legal))}")
        return dataclasses.replace(
            self,
            dtypes=self.dtypes or (["fp32", "bf16"] if on_gpu else ["fp64", "fp32"]),
            tokens=self.tokens or ([1000, 16384] if on_gpu else [100, 512]),
            sp_sizes=self.sp_sizes or legal,
        )

    @property
    def layouts(self) -> list[tuple[bool, bool]]:
        """(documents, carry) of each kind of sequence."""
        kinds = [False, True] if self.documents is None else [self.documents]
        return [(documents, not documents if self.carry is None else self.carry) for documents in kinds]


def describe() -> str:
    """The text of `--help`."""
    legal = f"operators: {', '.join(VERIFIED)}; backends: {', '.join(BACKENDS)}; dtypes: {', '.join(DTYPES)}"
    return (
        "usage: torchrun --nproc-per-node N -m zeco_train.verify [KEY=VALUE ...]\n\n"
        f"{legal}\n\n{describe_settings(VerifyConfig)}"
    )
