"""Section `parallel`, and how many ranks share a sequence or parameters. Light to import, since `--help` needs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.numbers import check_divides


class Strategy(Enum):
    """How parameters, gradients and optimizer state are sharded; `parallelize.py` has the table."""

    ddp = "ddp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    hsdp = "hsdp"
    torch_ddp = "torch_ddp"

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all parameters, gradients and optimizer state."""
        return self in (Strategy.ddp, Strategy.torch_ddp)

    @property
    def keeps_weights(self) -> bool:
        """Whether a rank has whole weights from a step's first pass to its last."""
        return self.is_replicated or self in (Strategy.zero1, Strategy.zero2)


@dataclass
class ParallelConfig:
    """Settings of sharding and of communication.

    Attributes:
        strategy: how parameters, gradients and optimizer state are sharded.
        shard_size: adjacent ranks over which they are sharded; all such groups hold the same. -1 is all ranks, with
            hsdp sp.size. `python -m zeco_train.plan` says when fewer are faster.
        timeout_seconds: longest wait for a peer in any communication; then the run ends and names it.
    """

    strategy: Strategy = Strategy.zero2
    shard_size: int = -1
    timeout_seconds: float = 300.0

    def __str__(self) -> str:
        """For logs: `zero2`, or `zero2 within 8 ranks`."""
        return self.strategy.value if self.shard_size == -1 else f"{self.strategy.value} within {self.shard_size} ranks"

    def validate(self) -> None:
        if self.shard_size != -1 and self.shard_size < 1:
            raise ConfigError("parallel.shard_size", self.shard_size, "must be ≥ 1, or -1 for the strategy's default")
        if self.shard_size != -1 and self.strategy.is_replicated:
            allowed = f"{self.strategy.value} shards nothing; take parallel=zero1, zero2, zero3 or hsdp"
            raise ConfigError("parallel.shard_size", self.shard_size, allowed)
        if not 1 <= self.timeout_seconds <= 1e6:
            raise ConfigError("parallel.timeout_seconds", self.timeout_seconds, "must be from 1 to 1e6")


def count_shards(strategy: Strategy, shard_size: int, world_size: int, sp_size: int) -> int:
    """Ranks over which parameters are sharded; `shard_size` as in `ParallelConfig`.

    Raises ConfigError for a shard size that does not divide the world size.
    """
    if strategy.is_replicated:
        return 1
    if shard_size == -1:
        return sp_size if strategy is Strategy.hsdp else world_size
    rule = f"must divide the world size {world_size}"
    check_divides("parallel.shard_size", shard_size, world_size, rule, ", or -1 for the strategy's default")
    return shard_size


def resolve_sp_size(sp_size: int, world_size: int, backend: str) -> int:
    """Resolve `sp.size`: −1 means the world size, or 1 for a backend that does not shard sequences.

    Raises ConfigError for a size that does not divide the world size, or that the backend does not support.
    """
    if sp_size == -1:
        return world_size if BACKENDS[backend].scans else 1
    rule = f"must divide the world size {world_size}"
    check_divides("sp.size", sp_size, world_size, rule, ", or -1 for the backend's default")
    if (problem := BACKENDS[backend].size_problem(sp_size)) is not None:
        raise ConfigError("sp.size", sp_size, problem)
    return sp_size
