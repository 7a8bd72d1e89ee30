"""The backends by name: their configuration, and the one `match` that builds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum

import torch
from torch.distributed import ProcessGroup

from zeco_train.collectives import Courier
from zeco_train.errors import ConfigError
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.dp import LocalScan
from zeco_train.sp.lasp1 import SerialScan
from zeco_train.sp.lasp2 import AllGatherScan
from zeco_train.sp.zeco import AllScan, AllScanAlgorithm, AllScanTransport


class Backend(Enum):
    """What joins the shards of a sequence."""

    dp = "dp"
    lasp1 = "lasp1"
    lasp2 = "lasp2"
    zeco = "zeco"


_MAX_BLOCKS = 1 << 20


@dataclass
class AllScanConfig:
    """Attributes:
    algorithm: `chain` is ZeCO's pipelined one, `two_shot` takes two all-to-alls; `auto` is the faster one by a model.
    transport: `symmetric` is one kernel over memory that all ranks map, within an NVLink domain; `p2p` is
        `torch.distributed`. `auto` is `symmetric` where the ranks can, else `p2p`.
    blocks: the pieces of a state that flow through `chain` one after another: a number, which needs algorithm=chain
        (under `auto` the model picks both), or `auto`, which over `p2p` is the model's best number and in one kernel
        blocks of 16,384 elements.
    """

    algorithm: AllScanAlgorithm = AllScanAlgorithm.auto
    transport: AllScanTransport = AllScanTransport.auto
    blocks: str = "auto"

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range, or one without effect."""
        if self.num_blocks is not None and self.algorithm is AllScanAlgorithm.two_shot:
            raise ConfigError(
                "sp.all_scan.blocks", self.blocks, "would be ignored; it needs sp.all_scan.algorithm=chain"
            )

    @property
    def num_blocks(self) -> int | None:
        """`blocks` as a number; None is `auto`.

        Raises:
            ConfigError: it is neither.
        """
        text = str(self.blocks)
        if text == "auto":
            return None
        if not text.isdecimal() or not 1 <= int(text) <= _MAX_BLOCKS:
            raise ConfigError("sp.all_scan.blocks", text, f"must be ≥ 1 and ≤ {_MAX_BLOCKS}, or auto")
        return int(text)


@dataclass
class SPConfig:
    """Attributes:
    backend: what joins the shards.
    size: ranks that share a sequence; −1 is 1 for `dp`, else the whole world.
    all_scan: for `zeco`.
    """

    backend: Backend = Backend.zeco
    size: int = -1
    all_scan: AllScanConfig = field(default_factory=AllScanConfig)

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        if self.size != -1 and self.size < 1:
            raise ConfigError("sp.size", self.size, "must be ≥ 1, or -1 for the backend's default")
        self.all_scan.validate()


def build_scan(
    config: SPConfig,
    groups: tuple[ProcessGroup, ProcessGroup],
    timeout: timedelta,
    device: torch.device | None = None,
) -> ScanBackend:
    """The scan of `config.backend` over an SP group, given once for each direction (forward, reverse).

    Each wait for a peer is bounded by `timeout`. With a `device` the groups are set up for scans of its tensors, which
    is collective; else the first scans do that.

    Raises:
        ConfigError: the ranks cannot do what was configured.
    """
    scan = _build(config, tuple(Courier(group, timeout) for group in groups))
    if device is not None:
        scan.prepare(device)
    return scan


def _build(config: SPConfig, couriers: tuple[Courier, ...]) -> ScanBackend:
    match config.backend:
        case Backend.dp:
            return LocalScan()
        case Backend.lasp1:
            return SerialScan(couriers)
        case Backend.lasp2:
            return AllGatherScan(couriers)
        case Backend.zeco:
            all_scan = config.all_scan
            return AllScan(couriers, all_scan.algorithm, all_scan.transport, all_scan.num_blocks)
