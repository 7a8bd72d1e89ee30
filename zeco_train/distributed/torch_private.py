"""FSDP2's private interface (torch 2.13): the only file that names it, so that a new torch is checked in one place.

- `unit_parameters`, for `unsharded`, which has the figures: FSDP2's public extension of the all-gather is an attribute
  of the local tensor itself, which only FSDP2's records name.
- `replace_gradient_copy`, for `unsharded`; `torch_gradient_copy` and `torch_copy` are what torch does without this
  project's kernels.
- `forget_gathers`, for CUDA graphs: the event of FSDP2's last all-gather must not be between a capture and other work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# It defines the operator, and its own implementation, when it is imported: a later import would replace ours.
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class UnitParameter:
    """A parameter of an FSDP unit, by FSDP2's record of it: `load_state_dict(assign=True)` replaces the parameter."""

    _record: Any

    @property
    def sharded(self) -> nn.Parameter:
        return self._record.sharded_param

    @property
    def shard(self) -> Tensor:
        """Its local tensor itself: `to_local` would make another one, without the attributes set here."""
        return self._record.sharded_param._local_tensor

    @property
    def module(self) -> nn.Module:
        return self._record._module_info.module


def unit_parameters(module: FSDPModule) -> tuple[list[UnitParameter], torch.device | None]:
    """The parameters of a unit (by its only or first module), in FSDP2's order, and their device, if it has any."""
    group = module._get_fsdp_state()._fsdp_param_group
    return ([], None) if group is None else ([UnitParameter(record) for record in group.fsdp_params], group.device)


def replace_gradient_copy(copy: Callable[[list[Tensor], int, int, Tensor], None]) -> torch.library.Library:
    """Have FSDP2 copy gradients into the buffer of a reduction by `copy(tensors, dim, num_chunks, out)`.

    Returns the replacement's owner: torch takes it back when the owner is freed.
    """
    library = torch.library.Library("fsdp", "IMPL")
    with warnings.catch_warnings():
        # That an implementation is replaced.
        warnings.simplefilter("ignore", UserWarning)
        for device in ("CUDA", "CPU"):
            library.impl("chunk_cat", copy, device, allow_override=True)
    return library


def torch_gradient_copy(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """What `replace_gradient_copy` replaces."""
    torch._chunk_cat(list(tensors), dim, num_chunks, out=out)


def torch_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in the target's dtype."""
    torch._foreach_copy_(list(targets), list(sources))


def forget_gathers(model: nn.Module) -> None:
    """Drop the event of the last all-gather, which FSDP2 keeps for the next one."""
    assert isinstance(model, FSDPModule)
    model._get_fsdp_state()._comm_ctx.all_gather_state = None
