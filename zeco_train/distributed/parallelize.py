"""How parameters, gradients and optimizer state lie over the ranks: FSDP2 in four arrangements.

All of them are one mechanism with another mesh, so that gradient sums, norms and checkpoints need no special case:

| strategy | mesh | parameters | gradients, optimizer state |
|---|---|---|---|
| `ddp` | (world, 1) | whole on every rank | whole on every rank |
| `zero2` | (world,) | sharded, whole from a step's first forward pass to its last backward pass | sharded |
| `zero3` | (world,) | sharded, gathered around each block in both passes | sharded |
| `hsdp` | (dp, sp) | sharded over an SP group, copied over dp | likewise |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zeco_train.distributed.mesh import ProcessMesh, device_mesh, world_mesh
from zeco_train.errors import ConfigError


class Strategy(Enum):
    """See the module's table."""

    ddp = "ddp"
    zero2 = "zero2"
    zero3 = "zero3"
    hsdp = "hsdp"


@dataclass
class ParallelConfig:
    """Attributes:
    strategy: where parameters live.
    timeout_seconds: longest wait for a peer in any communication; then the run ends and names it.
    """

    strategy: Strategy = Strategy.zero2
    timeout_seconds: float = 300.0

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        if not 1 <= self.timeout_seconds <= 1e6:
            raise ConfigError("parallel.timeout_seconds", self.timeout_seconds, "must be from 1 to 1e6")


def parallelize(
    model: nn.Module, units: Sequence[nn.Module], strategy: Strategy, compute_dtype: torch.dtype, mesh: ProcessMesh
) -> None:
    """Shard an initialised model in place, `units` (its blocks) apart from the rest.

    Gradients are *summed* over all ranks: the loss is already divided by the tokens of the global batch, and each
    rank holds other tokens. They are summed in fp32 where the compute dtype is bf16.
    """
    # Activations have the compute dtype from the embedding on; the states beside them are to stay in fp32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard_mesh = _shard_mesh(strategy, mesh)
    for module in (*units, model):
        fully_shard(module, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=strategy == Strategy.zero3)
    # Without a word, a unit's parameters are asked for when its own forward pass begins. The last one's, those of the
    # head, are left to that: a pass for the states alone does without.
    for unit, after in itertools.pairwise(units[:-1]):
        assert isinstance(unit, FSDPModule)
        assert isinstance(after, FSDPModule)
        unit.set_modules_to_forward_prefetch([after])
    for module in model.modules():
        # The setting does not reach nested FSDP modules by itself; missed ones divide by the world size.
        if not isinstance(module, FSDPModule):
            continue
        if mesh.world_size == 1:
            module.set_custom_reduce_scatter(_OneRank())  # type: ignore[arg-type]
        else:
            module.set_gradient_divide_factor(1.0)
            # A factor of its own makes FSDP use a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


class _OneRank:
    """Over one rank there is nothing to reduce, and no need for the copy of all gradients that FSDP2 makes instead:
    what it reduces from is what it reduces to."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input of a reduction, and then, asked again, its output: the same tensor."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            self._buffer = buffer = torch.empty(size, dtype=dtype, device=device)
        assert buffer.shape == torch.Size(size), (buffer.shape, size)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a reduction over one rank")


def _shard_mesh(strategy: Strategy, mesh: ProcessMesh) -> DeviceMesh:
    device, world_size = mesh.device.type, mesh.world_size
    match strategy:
        case Strategy.ddp:
            return device_mesh(device, (world_size, 1), ("replicate", "shard"), mesh.timeout)
        case Strategy.hsdp:
            return mesh.devices
        case Strategy.zero2 | Strategy.zero3:
            return world_mesh(device, world_size, "shard", mesh.timeout)


def begin_micro_batch(model: nn.Module, strategy: Strategy, last: bool) -> None:
    """Set what the micro-batch's backward pass communicates; `last` is the optimizer step's last one.

    Whole gradients (`ddp`, or between the copies of `hsdp`) are summed once a step. Sharded ones are reduced in every
    micro-batch: until then each rank would hold a whole gradient, which is what sharding is to avoid. `zero2` keeps its
    gathered parameters through the micro-batches of a step.
    """
    assert isinstance(model, FSDPModule)
    match strategy:
        case Strategy.ddp:
            model.set_requires_gradient_sync(last)
        case Strategy.hsdp:
            model.set_requires_all_reduce(last)
        case Strategy.zero2:
            model.set_reshard_after_backward(last)
        case Strategy.zero3:
            pass


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters after forward passes that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def global_norm(model: nn.Module) -> torch.Tensor:
    """The 2-norm of the whole gradient, the same scalar on every rank, whatever the strategy."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
