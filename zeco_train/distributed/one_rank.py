"""FSDP2 over one rank without its copies, by the extensions that it offers.

Where one rank holds a unit's parameters whole, FSDP2 gathers and reduces by copying:

| | FSDP2's way, bytes a parameter | here |
|---|---|---|
| weights, fp32 → bf16 | cast to a temporary tensor and copied: 10 | cast in place: 6 |
| gradients of a first micro-batch, bf16 → fp32 | cast, one launch a parameter: 6 | packed: 6 |
| of each further one | added, one launch a parameter: 10 | added by the same kernel: 10 |
| after the last one | packed and copied: 16 | – |
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeco_train.distributed.packing import add_next, cast_all
from zeco_train.distributed.whole import local


class OneRankReduction:
    """Reduce-scatter over one rank (`FSDPModule.set_custom_reduce_scatter`): a unit's gradients are one buffer.

    FSDP2 copies a backward pass's gradients into a buffer (`zeco_train.distributed.packing`), and the sharded gradients
    are views of it. In the next backward pass this class hands FSDP2 the same buffer, and the copy adds to it. So the
    gradients of a step's micro-batches are summed in place; their sums have the bits of FSDP2's.

    Where the gradients are no such views, or the backward pass has not reached all parameters, FSDP2 copies to a buffer
    of its own and adds it to them.

    Args:
        parameters: the unit's, sharded over this rank alone.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input of a reduction, of `size`; the next call returns the same tensor as its output."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = self._take_sums(torch.Size(size), dtype)
            if buffer is None:
                buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffer = buffer
        assert buffer.shape == torch.Size(size), (buffer.shape, size)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Never called: FSDP2 reduces nothing over one rank."""
        raise AssertionError("a reduction over one rank")

    def _take_sums(self, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """The buffer of all gradients, which lose it: FSDP2 sets them anew. None if they are not one."""
        if sum(parameter.numel() for parameter in self._parameters) != size.numel():
            return None
        grads = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if len(grads) < len(self._parameters) or not size.numel():
            return None
        storage = grads[0].untyped_storage()
        if storage.nbytes() != size.numel() * dtype.itemsize:
            return None
        if any(g.dtype is not dtype or g.untyped_storage().data_ptr() != storage.data_ptr() for g in grads):
            return None
        for parameter in self._parameters:
            parameter.grad = None
        sums = grads[0].as_strided(size, (1,), 0)
        add_next(sums)
        return sums


def cast_in_place(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Have FSDP2 cast a unit's parameters straight into the memory of the gathered ones, on GPUs in a few launches.

    It is FSDP2's extension of the all-gather, as functions of the local tensors: nothing is sent, and what is gathered
    is computed from the shards afterwards. The bits are those of `Tensor.to`. Call after `fully_shard`.

    Args:
        parameters: the unit's, fp32, sharded over one rank, so whole.
        dtype: that of the gathered parameters.
    """
    if not parameters:
        return
    unit = _Unit(parameters[0].device)
    for parameter in parameters:
        # An attribute of this very tensor: `to_local` would make another one.
        shard = parameter._local_tensor  # type: ignore[attr-defined]
        assert shard.is_contiguous()
        shard.fsdp_pre_all_gather = unit
        shard.fsdp_post_all_gather = _Cast(unit, shard, dtype)


class _Unit:
    """The casts of a unit: FSDP2 begins all, then ends all, and the last one to end does the work of all.

    It is the `fsdp_pre_all_gather` of each of the unit's parameters.
    """

    # FSDP2 looks the signature up at each call, which would take most of its time.
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_ONLY)])

    def __init__(self, device: torch.device) -> None:
        self._waiting, self._nothing = 0, torch.empty(0, device=device)
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """What a parameter sends: nothing."""
        self._waiting += 1
        return (self._nothing,), None

    def end(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to `target`, at the latest with the last one's."""
        self._waiting -= 1
        self._sources.append(source)
        self._targets.append(target)
        if self._waiting:
            return
        sources, self._sources = self._sources, []
        targets, self._targets = self._targets, []
        cast_all(sources, targets)


class _Cast:
    """FSDP2's `fsdp_post_all_gather` of a parameter."""

    def __init__(self, unit: _Unit, shard: Tensor, dtype: torch.dtype) -> None:
        self._unit, self._shard, self._dtype = unit, shard, dtype

    def __call__(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Fill `out`, or a new tensor, whose memory FSDP2 frees and allocates from then on."""
        assert dtype is self._dtype
        if out is not None:
            # The pass has saved it for its gradients: `data` has a count of changes of its own.
            self._unit.end(self._shard, out.data)
            return None
        gathered = torch.empty_like(self._shard, dtype=dtype)
        self._unit.end(self._shard, gathered)
        return gathered, (gathered,)
