"""One token of the recurrence; its time is that of reading and writing the state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeco_train.ops.gla.kernels.tiles import decay, state_pointers

# Elements of a program's tile of the state: 32 fp32 registers a thread.
_TILE = 4096
_WARPS = 4


@triton.jit
def step_kernel(
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, H, V]
    g,  # [B, H, K] fp32
    state,  # [B, H, K, V] fp32, updated
    o,  # [B, H, V], written
    scale,
    K,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program updates BV columns of one head's state and computes their outputs."""
    batch_head = tl.program_id(0).to(tl.int64)
    first_value = tl.program_id(1) * BV
    keys = tl.arange(0, BK)
    values = first_value + tl.arange(0, BV)
    of_keys = batch_head * K + keys
    of_values = batch_head * V + values
    pointers, inside = state_pointers(state, batch_head, K, V, 0, first_value, BK, BV)

    survives = decay(tl.load(g + of_keys, mask=keys < K, other=0.0))
    key = tl.load(k + of_keys, mask=keys < K, other=0.0).to(tl.float32)
    query = tl.load(q + of_keys, mask=keys < K, other=0.0).to(tl.float32) * scale
    value = tl.load(v + of_values, mask=values < V, other=0.0).to(tl.float32)
    new = tl.load(pointers, mask=inside, other=0.0) * survives[:, None] + key[:, None] * value[None, :]
    tl.store(pointers, new, mask=inside)
    tl.store(o + of_values, tl.sum(query[:, None] * new, axis=0).to(o.dtype.element_ty), mask=values < V)


def launch_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, o: Tensor, scale: float) -> None:
    """Launch on contiguous tensors: q, k, g [B, 1, H, K]; v, o [B, 1, H, V]; state [B, H, K, V], updated."""
    B, H, K, V = state.shape
    BK = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), max(1, _TILE // BK))
    step_kernel[(B * H, triton.cdiv(V, BV))](q, k, v, g, state, o, scale, K, V, BK=BK, BV=BV, num_warps=_WARPS)
