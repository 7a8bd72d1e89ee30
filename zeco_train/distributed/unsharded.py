"""Parameters that a rank holds whole, in FSDP2: without its copies, by the extensions that it offers.

FSDP2 gathers weights and reduces gradients by copying, also where a rank has them all. Bytes read and written for a
parameter, in bf16 with fp32 shards:

| | FSDP2's way | here |
|---|---|---|
| weights, fp32 → bf16 | cast to a temporary tensor and copied: 10 | cast in place: 6 |
| gradients of a first micro-batch, bf16 → fp32 | cast, one launch a parameter: 6 | packed: 6 |
| of each further one | added, one launch a parameter: 10 | added by the same kernel: 10 |
| after the last one | packed and copied: 16 | – |

`cast_in_place` serves each rank that holds a unit's parameters whole, as with `ddp`; `OneRankReduction` a job of one
rank, which has nothing to reduce.

Gradients of sharded parameters are packed by the same kernel on GPUs: torch implements FSDP2's operator for their copy
into the buffer of a reduction, `fsdp::chunk_cat`, at half of the memory's speed when the copy is also a cast. Its
implementation is replaced in this process; the result is the same bit for bit. On CPUs torch's copy remains.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zeco_train.distributed.owned_matrices import local
from zeco_train.distributed.torch_private import (
    UnitParameter,
    replace_gradient_copy,
    torch_copy,
    torch_gradient_copy,
    unit_parameters,
)
from zeco_train.ops.operator import KernelRule

KERNELS = KernelRule()
# Addresses of the buffers to which the next copy adds.
_sums: set[int] = set()


@functools.cache
def use_own_packing() -> torch.library.Library:
    """Replace the operator's implementation, once; returns its owner: torch takes it back when the owner is freed."""
    return replace_gradient_copy(_chunk_cat)


def add_next(out: Tensor) -> None:
    """Have the next copy to `out` add to its elements, each sum rounded once as in torch's `add_`.

    Call right before the copy, after `use_own_packing`; the copy is for one rank.
    """
    if out.numel():
        _sums.add(out.data_ptr())


def copy_next(out: Tensor) -> None:
    """Have the next copy to `out`, new memory, add nothing, even if sums whose copy failed lay at the same address."""
    _sums.discard(out.data_ptr())


def cast_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target, with as many elements, in the target's dtype: the bits of `Tensor.to`."""
    if _has_kernel(sources) and _has_kernel(targets):
        from zeco_train.kernels.pack import cast

        cast(sources, targets)
    else:
        torch_copy(targets, sources)


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    is_sum = out.data_ptr() in _sums
    _sums.discard(out.data_ptr())
    assert not is_sum or (dim == 0 and num_chunks == 1), "a sum for several ranks"
    is_known = dim == 0 and all(tensor.ndim for tensor in tensors) and _has_kernel([*tensors, out])
    if is_known and not (is_sum and out.dtype is not torch.float32):
        from zeco_train.kernels.pack import pack

        pack(tensors, num_chunks, out, add=is_sum)
    elif is_sum:
        parts = out.view(-1).split([tensor.numel() for tensor in tensors])
        for part, tensor in zip(parts, tensors, strict=True):
            part.view(tensor.shape).add_(tensor)
    else:
        torch_gradient_copy(tensors, dim, num_chunks, out)


def _has_kernel(tensors: Sequence[Tensor]) -> bool:
    return all(KERNELS.serves(tensor, tensor) and tensor.is_contiguous() for tensor in tensors)


class OneRankReduction:
    """Reduce-scatter over one rank (`FSDPModule.set_custom_reduce_scatter`): a unit's gradients are one buffer.

    For each reduction FSDP2 allocates the input, copies a backward pass's gradients into it, and allocates the output,
    of which the sharded gradients are views; over one rank it does not call the reduction itself. Input and output are
    the same tensor here, which FSDP2 gets again in the next backward pass, and its copy (`add_next`) adds to
    it: the gradients of a step's micro-batches are summed in place, with the bits of FSDP2's sums. Where gradients are
    no such views, or the backward pass has not reached all parameters, FSDP2 adds a buffer of its own to them.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._unit, _ = unit_parameters(module)
        # Weak: FSDP2 holds the input until it has the output. A backward pass that failed between them left nothing.
        self._input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input of a reduction, of `size`; the next call returns the same tensor as its output."""
        buffer, self._input = None if self._input is None else self._input(), None
        if buffer is None:
            buffer = self._take_sums(torch.Size(size), dtype)
            if buffer is None:
                buffer = torch.empty(size, dtype=dtype, device=device)
                copy_next(buffer)
                if any(parameter.grad is not None for parameter in self._parameters()):
                    # FSDP2 adds the output to them in a stream of its own, and needs it to be allocated there.
                    return buffer
            self._input = weakref.ref(buffer)
        assert buffer.shape == torch.Size(size), (buffer.shape, size)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Never called: FSDP2 reduces nothing over one rank."""
        raise AssertionError("a reduction over one rank")

    def _parameters(self) -> list[nn.Parameter]:
        # As they are now: they may be frozen.
        return [parameter.sharded for parameter in self._unit if parameter.sharded.requires_grad]

    def _take_sums(self, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        # The buffer that all gradients are views of, taken from them; None if there is no such buffer.
        parameters = self._parameters()
        if sum(parameter.numel() for parameter in parameters) != size.numel():
            return None
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if len(grads) < len(parameters) or not size.numel():
            return None
        storage = grads[0].untyped_storage()
        if storage.nbytes() != size.numel() * dtype.itemsize:
            return None
        place = 0
        for grad in grads:
            # In FSDP2's order, one after another.
            if grad.dtype is not dtype or grad.untyped_storage().data_ptr() != storage.data_ptr():
                return None
            if grad.numel() and (grad.storage_offset() != place or not grad.is_contiguous()):
                return None
            place += grad.numel()
        for parameter in parameters:
            parameter.grad = None
        sums = grads[0].as_strided(size, (1,), 0)
        add_next(sums)
        return sums


def cast_in_place(module: FSDPModule, dtype: torch.dtype) -> None:
    """Have FSDP2 cast a unit's parameters straight into the memory of the gathered ones, on GPUs in a few launches.

    It is FSDP2's extension of the all-gather, as functions of the local tensors: nothing is sent, and what is gathered
    is computed from the shards afterwards. The bits are those of `Tensor.to`. Call after `fully_shard` of the unit, by
    its only or first module; its parameters are fp32, and whole on this rank.
    """
    parameters, device = unit_parameters(module)
    casts = _UnitCasts(device)
    for parameter in parameters:
        cast = _Cast(casts, parameter, dtype)
        cast.extend()
        # `load_state_dict(assign=True)` replaces the tensor.
        parameter.module.register_load_state_dict_post_hook(cast.extend)


class _UnitCasts:
    # The casts of a unit: FSDP2 begins all, then ends all, and the last one to end does the work of all. A gather that
    # failed in between, for lack of memory, is forgotten when the next one begins.
    def __init__(self, device: torch.device | None) -> None:
        self.nothing = torch.empty(0, device=device)
        self._waiting: set[_Cast] = set()
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def begin(self, cast: _Cast) -> None:
        self._waiting.add(cast)
        self._pairs.clear()

    def end(self, cast: _Cast, source: Tensor, target: Tensor) -> None:
        self._waiting.remove(cast)
        self._pairs.append((source, target))
        if self._waiting:
            return
        pairs, self._pairs = self._pairs, []
        cast_all([source for source, _ in pairs], [target for _, target in pairs])


class _Cast:
    # FSDP2's `fsdp_pre_all_gather` of a parameter, called with the mesh alone, and its `fsdp_post_all_gather`.
    # FSDP2 looks up the first one's signature at each call, which would take longer than the rest of the call.
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_ONLY)])

    def __init__(self, casts: _UnitCasts, parameter: UnitParameter, dtype: torch.dtype) -> None:
        self._casts, self._parameter, self._dtype = casts, parameter, dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> _Cast:
        # A copy of the shard shares the cast: FSDP2 gathers the shard only.
        return self

    def extend(self, *loaded: Any) -> None:
        # Make this the extension of the parameter's shard.
        shard = self._parameter.shard
        assert shard.is_contiguous()
        shard.fsdp_pre_all_gather = shard.fsdp_post_all_gather = self  # type: ignore[attr-defined]

    def __call__(self, *args: Any, out: Tensor | None = None) -> Any:
        # With the mesh alone: nothing is sent. Else fill `out`, or a new tensor, whose memory FSDP2 manages then.
        if len(args) == 1:
            self._casts.begin(self)
            return (self._casts.nothing,), None
        if out is not None:
            # `data`: autograd's version counter must not change, since the pass has saved this tensor.
            self._casts.end(self, self._parameter.shard, out.data)
            return None
        gathered = torch.empty_like(self._parameter.shard, dtype=self._dtype)
        self._casts.end(self, self._parameter.shard, gathered)
        return gathered, (gathered,)
