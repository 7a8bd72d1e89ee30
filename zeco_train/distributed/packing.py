"""FSDP2's copy of gradients into the buffer of a reduction, on GPUs by a kernel of this project.

FSDP2 copies the gradients of a unit by an operator of its own, `fsdp::chunk_cat`, which torch implements at half of the
memory's speed when the copy is also a cast. The operator's implementation for CUDA devices is replaced in this process;
the result is the same bit for bit.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@functools.cache
def use_pack_kernel() -> None:
    """Replace the operator's implementation for CUDA devices, once; a torch that forbids it keeps its own."""
    library = torch.library.Library("fsdp", "IMPL")
    if "allow_override" not in inspect.signature(library.impl).parameters:
        logger.info("FSDP2 packs gradients by torch's own kernel: this torch does not let it be replaced")
        return
    with warnings.catch_warnings():
        # That an implementation is replaced.
        warnings.simplefilter("ignore", UserWarning)
        library.impl("chunk_cat", _chunk_cat, "CUDA", allow_override=True)
    # With it the implementation would go.
    _KEPT.append(library)


_KEPT: list[torch.library.Library] = []


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    from zeco_train.kernels.pack.launch import DTYPES, pack

    is_known = all(tensor.is_contiguous() and tensor.dtype in DTYPES and tensor.ndim for tensor in tensors)
    if dim == 0 and is_known and out.is_contiguous() and out.dtype in DTYPES:
        pack(tensors, num_chunks, out)
    else:
        torch._chunk_cat(tensors, dim, num_chunks, out=out)
