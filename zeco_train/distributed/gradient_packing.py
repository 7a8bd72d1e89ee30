"""FSDP2's copy of gradients into the buffer of a reduction, on GPUs by a kernel of this project.

torch implements FSDP2's operator for it, `fsdp::chunk_cat`, at half of the memory's speed when the copy is also a cast.
Its implementation is replaced in this process; the result is the same bit for bit. On CPUs torch's copy remains.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zeco_train.distributed.torch_private import replace_gradient_copy, torch_copy, torch_gradient_copy
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
