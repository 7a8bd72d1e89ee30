"""FSDP2's copy of gradients into the buffer of a reduction, on GPUs by a kernel of this project.

FSDP2 copies the gradients of a unit by an operator of its own, `fsdp::chunk_cat`, which torch implements at half of the
memory's speed when the copy is also a cast. The operator's implementation for CUDA devices is replaced in this process;
the result is the same bit for bit.
"""

from __future__ import annotations

import functools
import warnings

import torch

# It defines the operator, and its own implementation, when it is imported: a later import would replace ours.
import torch.distributed.fsdp
from torch import Tensor


@functools.cache
def use_pack_kernel() -> torch.library.Library:
    """Replace the operator's implementation for CUDA devices, once.

    Returns:
        Its owner, which the cache keeps: torch takes the replacement back when the owner is freed.
    """
    library = torch.library.Library("fsdp", "IMPL")
    with warnings.catch_warnings():
        # That an implementation is replaced.
        warnings.simplefilter("ignore", UserWarning)
        library.impl("chunk_cat", _chunk_cat, "CUDA", allow_override=True)
    return library


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    from zeco_train.kernels.pack.launch import DTYPES, pack

    is_known = all(tensor.is_contiguous() and tensor.dtype in DTYPES and tensor.ndim for tensor in tensors)
    if dim == 0 and is_known and out.is_contiguous() and out.dtype in DTYPES:
        pack(tensors, num_chunks, out)
    else:
        torch._chunk_cat(tensors, dim, num_chunks, out=out)
