"""Operators of the affine family, `S_t = A_t S_{t-1} + k_t v_tᵀ`, over a sequence that may lie on several ranks.

One folder per operator, all with the same files: `__init__` (an `Operator`, what other rooms read of it, its FLOPs, and
one token for generation), `chunked` (in PyTorch), `cuda` (by the Triton kernels in `kernels`); shared by them
`operator` (its facts and the checks of operands), `passes` (the interface of an implementation), `chunks` (layout and
decays of chunks), `pairs` (of the tokens inside them) and `oracle` (exact results, to compare with). `registry` lists
the operators. `mix` is the custom op seen by autograd and compilers, `seam` its interface to communication,
`slow_paths` names the calls of a run that kernels do not serve. The loss is here too.
"""

from __future__ import annotations

import torch

# Maximum tokens per chunk: operators pass states between chunks and compute token pairs inside them.
CHUNK = 64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, decays, statistics and all arithmetic on tensors of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
