"""The launch of the kernel that packs gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from zeco_train.kernels.pack.kernel import pack_kernel

_BLOCK, _WARPS = 4096, 4
# Tensors of a launch: its code grows with them.
_MOST = 16
DTYPES = torch.bfloat16, torch.float32


def pack(tensors: Sequence[Tensor], ranks: int, out: Tensor) -> None:
    """Write row r of `out` from the r-th of `ranks` equal parts of each tensor's rows, one tensor after the other.

    Args:
        tensors: contiguous, of dtypes in `DTYPES`, with one dimension or more; rows are padded with zeros to a multiple
            of `ranks`.
        ranks: P.
        out: [P, …], contiguous, of one of `DTYPES`.
    """
    # fsdp's own rule: parts of ⌈rows / P⌉ rows.
    chunks = [-(-tensor.shape[0] // ranks) * math.prod(tensor.shape[1:]) for tensor in tensors]
    places = [0, *itertools.accumulate(chunks)]
    row = places.pop()
    assert out.is_contiguous()
    assert out.numel() == ranks * row, f"{list(out.shape)} for {ranks} rows of {row}"
    for start in range(0, len(tensors), _MOST):
        part = slice(start, start + _MOST)
        sources = tuple(tensors[part])
        firsts = [0, *itertools.accumulate(triton.cdiv(chunk, _BLOCK) for chunk in chunks[part])]
        programs = firsts.pop()
        if programs:
            pack_kernel[(programs, ranks)](
                sources, tuple(tensor.numel() for tensor in sources), tuple(chunks[part]), tuple(places[part]),
                tuple(firsts), out, row, N=len(sources), BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
