"""Unmasked linear attention (LASP-2, Sun et al. 2025, arXiv 2502.07563, algorithm 1): each token reads all tokens.

    S = Σ_j k_j v_jᵀ over the whole sequence,    o_i = scale · q_iᵀ S

q, k [B, T, H, K]; v, o [B, T, H, V]; no decay, since decays need an order. The gradient with respect to S is one sum
over the whole sequence, too (algorithm 3): dS = scale · Σ_i q_i do_iᵀ. A scan over ranks gives both sums as its state
after the whole sequence (`Operator.reads_whole`). On GPUs too the products are PyTorch's: there are no chunks.
"""

from __future__ import annotations

from zeco_train.ops.operator import Kind, Operator
from zeco_train.ops.oracle import by_pairs
from zeco_train.ops.scalar_decay import FIXED_TIME
from zeco_train.ops.unmasked.flops import forward_flops, recomputed_flops
from zeco_train.ops.unmasked.passes import UNMASKED_PASSES
from zeco_train.ops.unmasked.step import refuse_step

UNMASKED = Operator(
    operands=("q", "k", "v"),
    dims=("BTHK", "BTHK", "BTHV"),
    kind=Kind.diagonal,
    portable=UNMASKED_PASSES,
    oracle=by_pairs,
    one_token=refuse_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    reads_whole=True,
    # Not measured; the most like it.
    time=FIXED_TIME,
)
