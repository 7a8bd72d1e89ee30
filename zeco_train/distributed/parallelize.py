"""Sharding of parameters, gradients and optimizer state: FSDP2 with five strategies, and torch's DDP beside them.

Those of FSDP2 differ in the mesh, and in when they communicate, so norms and checkpoints need no special case:

| strategy | mesh | weights in compute | gradients | master weights, optimizer state |
|---|---|---|---|---|
| `ddp` | (world, 1) | whole | whole | whole |
| `zero1` | (world,) | gathered from a step's first forward to its last backward pass | whole until the last | sharded |
| `zero2` | (world,) | likewise | sharded | sharded |
| `zero3` | (world,) | gathered around each block in both passes | sharded | sharded |
| `hsdp` | (dp, sp) | gathered around each micro-batch over an SP group | sharded, replicated over dp | likewise |
| `torch_ddp` | – | whole | whole | whole |

With `shard_size` S the four that shard use the mesh (world / S, S): S adjacent ranks hold the model once, and ranks of
equal position in such groups hold the same shards.

ZeRO's paper (Rajbhandari et al., 2020) counts master weights as optimizer state, and so does `zero1`. The last of a
step's backward passes reduces the gradients, and frees each block's once that is done: a step of one pass is `zero2`'s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zeco_train.distributed.config import Strategy, count_shards
from zeco_train.distributed.mesh import ProcessMesh, device_mesh, world_mesh
from zeco_train.distributed.unsharded import OneRankReduction, cast_in_place, use_own_packing


def parallelize(
    model: nn.Module,
    units: Sequence[nn.Module | list[nn.Module]],
    strategy: Strategy,
    compute_dtype: torch.dtype,
    mesh: ProcessMesh,
    shard_size: int = -1,
) -> None:
    """Shard an initialised model in place; each of `units` (its blocks) is an FSDP unit of its own.

    A list of modules is one unit as well, whose parameters are gathered in their own dtype: those that stay fp32. The
    model calls all modules of the list, one after the other, in each forward pass.

    Gradients are *summed* over all ranks: the loss is already divided by the tokens of the global batch, and each
    rank holds different tokens. With bf16 compute, they are reduced in fp32. `torch_ddp` shards nothing: it joins the
    ranks in `connected`.
    """
    if strategy is Strategy.torch_ddp:
        return
    # Activations have the compute dtype from the embedding on; recurrent states must stay in fp32.
    policy = as_stored = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    use_own_packing()
    shards = count_shards(strategy, shard_size, mesh.world_size, mesh.sp_size)
    shard_mesh = _shard_mesh(strategy, shards, mesh)
    # The model last: an FSDP unit takes the parameters that no unit inside it has taken.
    for module in (*units, model):
        # Wide parameters are few: not worth a second gathering in the backward pass.
        is_wide = isinstance(module, list)
        fully_shard(
            module,
            mesh=shard_mesh,
            mp_policy=as_stored if is_wide else policy,
            reshard_after_forward=strategy is Strategy.zero3 and not is_wide,
        )
        # The modules of a list share one state.
        unit = module[0] if isinstance(module, list) else module
        assert isinstance(unit, FSDPModule)
        if shards == 1 and compute_dtype == torch.bfloat16 and not is_wide:
            cast_in_place(unit, compute_dtype)
        if mesh.world_size == 1:
            unit.set_custom_reduce_scatter(OneRankReduction(unit))  # type: ignore[arg-type]
    # By default FSDP2 starts a unit's all-gather at its own forward; prefetch the next one explicitly. The head, if a
    # unit of its own, is not prefetched: a states-only pass does not use it.
    head = getattr(model, "lm_head", None)
    firsts = [unit[0] if isinstance(unit, list) else unit for unit in units]
    for unit, after in itertools.pairwise(unit for unit in firsts if unit is not head):
        assert isinstance(unit, FSDPModule)
        assert isinstance(after, FSDPModule)
        unit.set_modules_to_forward_prefetch([after])
    for module in model.modules():
        # The setting does not propagate to nested FSDP modules, which would divide by the world size.
        if isinstance(module, FSDPModule) and mesh.world_size > 1:
            module.set_gradient_divide_factor(1.0)
            # A custom divide factor makes FSDP use PREMUL_SUM, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)


def _shard_mesh(strategy: Strategy, shards: int, mesh: ProcessMesh) -> DeviceMesh:
    device, world_size = mesh.device.type, mesh.world_size
    # One rank alone has no replica.
    if strategy is Strategy.hsdp and shards == mesh.sp_size and world_size > 1:
        return mesh.devices
    if shards == world_size:
        return world_mesh(device, world_size, "shard", mesh.timeout)
    return device_mesh(device, (world_size // shards, shards), ("replicate", "shard"), mesh.timeout)


def connected(model: nn.Module, strategy: Strategy, mesh: ProcessMesh) -> nn.Module:
    """What a training step calls in place of a parallelised model: the model itself, or torch's DDP of it."""
    if strategy is not Strategy.torch_ddp:
        return model
    group = world_mesh(mesh.device.type, mesh.world_size, "replicate", mesh.timeout).get_group()
    # Every rank has drawn or loaded the same parameters.
    return DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=True)


def begin_micro_batch(model: nn.Module, strategy: Strategy, shards: int, last: bool) -> None:
    """Set the communication of a micro-batch's backward pass, perhaps the step's `last`; `shards` as of `num_shards`.

    Replicated gradients are all-reduced once a step, sharded ones reduce-scattered in every micro-batch. Where
    parameters are not sharded, and with `zero1`, each of several ranks accumulates whole gradients and reduces them in
    the last one; a single rank adds them to its sums in every one. `model` is that of `connected`.
    """
    if isinstance(model, DistributedDataParallel):
        # What its `no_sync` sets.
        model.require_backward_grad_sync = last
        return
    assert isinstance(model, FSDPModule)
    if shards > 1 and strategy is not Strategy.zero1:
        # Without effect where all ranks are one group.
        model.set_requires_all_reduce(last)
    elif dist.get_world_size() > 1:
        model.set_requires_gradient_sync(last)
    if strategy.keeps_weights:
        model.set_reshard_after_backward(last)


def num_shards(model: nn.Module) -> int:
    """Ranks over which the parameters of a model are sharded; call while none is gathered."""
    if not isinstance(model, FSDPModule):
        return 1
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor), "its parameters are gathered"
    mesh = parameter.device_mesh
    return math.prod(mesh.size(axis) for axis, placement in enumerate(parameter.placements) if placement.is_shard())


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after forward passes without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def global_norm(model: nn.Module) -> torch.Tensor:
    """The global gradient 2-norm, the same scalar on every rank and for every strategy."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    # Of sharded gradients it is a DTensor; where that is a partial norm, `full_tensor` reduces it over the ranks.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
