"""Operators of the affine family, `S_t = A_t S_{t-1} + k_t v_tᵀ`, over a sequence that may lie on several ranks.

To read them: `operator_registry` (the operators), `operator` (what one is, and which implementation serves a call),
`mix` (the custom op seen by autograd and compilers), `passes` (the interface of an implementation), an operator's
folder (`chunked` in PyTorch, `kernels` in Triton) and `seam` (the interface to communication). `chunks` and `pairs` are
shared by them, `oracle` has exact results, `slow_paths` names the calls of a run without kernels.
"""

from __future__ import annotations

import torch

# Maximum tokens per chunk: operators pass states between chunks and compute token pairs inside them.
CHUNK = 64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, decays, statistics and all arithmetic on tensors of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
