"""One token of the recurrence, for generation: the state is updated in place, so memory is that of one state.

    S ← exp(g) ⊙_K S + k vᵀ,    o = scale · qᵀ S

On CUDA this is one kernel, which is not tuned and compiles in a second, so a process's first token is not delayed.
Elsewhere, and for fp64, three passes over the state in PyTorch. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.operator import KernelRule
from zeco_train.ops.passes import check_state

STEP_KERNELS = KernelRule()


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float | None = None) -> Tensor:
    """Compute the next token of each sequence of a batch.

    Args:
        q: [B, 1, H, K]; bf16, fp32 or fp64.
        k: [B, 1, H, K], same dtype.
        v: [B, 1, H, V], same dtype.
        g: [B, 1, H, K], log-decay ≤ 0; fp32 (fp64 for fp64 inputs).
        state: [B, H, K, V] in the dtype of g, contiguous, state after the previous token; updated in place.
        scale: factor of the output, K^-1/2 if None.

    Returns:
        o: [B, 1, H, V] in the dtype of v.

    Raises:
        ValueError: a state that does not fit, or several tokens; `Operator.step` checks the operands before.
    """
    check_state(state, "state", torch.Size((q.shape[0], *q.shape[2:], v.shape[-1])))
    if q.shape[1] != 1:
        raise ValueError(f"q: expected one token of each sequence, got {q.shape[1]}")
    if state.dtype != g.dtype:
        raise ValueError(f"state: expected the dtype of g, {g.dtype}, got {state.dtype}")
    if not state.is_contiguous():
        raise ValueError("state: expected a contiguous tensor, since it is updated in place")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (_kernel_step if _has_kernel(q, v, g) else _plain_step)(q, k, v, g, state, scale)


def _has_kernel(q: Tensor, v: Tensor, g: Tensor) -> bool:
    return STEP_KERNELS.serves(q, v, g)


def _kernel_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    from zeco_train.ops.gla.kernels.step import launch_step  # imports Triton

    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # Triton launches on the current device.
    with torch.cuda.device_of(q):
        launch_step(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), state, o, scale)
    return o


def _plain_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    heads = state.view(-1, *state.shape[-2:])
    query, key, value, log_decay = (x.to(state.dtype).reshape(len(heads), 1, -1) for x in (q, k, v, g))
    heads.mul_(log_decay.exp().mT).baddbmm_(key.mT, value)
    return torch.bmm(query * scale, heads).view(v.shape).to(v.dtype)
