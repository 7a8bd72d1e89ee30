"""Unmasked linear attention (LASP-2, Sun et al. 2025, arXiv 2502.07563, algorithm 1): each token reads all tokens.

    S = Σ_j k_j v_jᵀ over the whole sequence,    o_i = scale · q_iᵀ S

q, k [B, T, H, K]; v, o [B, T, H, V]; no decay, since decays need an order. The gradient with respect to S is one sum
over the whole sequence, too (algorithm 3): dS = scale · Σ_i q_i do_iᵀ. A scan over ranks gives both sums as its state
after the whole sequence (`Operator.reads_whole`). On GPUs too the products are PyTorch's: there are no chunks.

Generation is refused: a token of an unmasked model reads tokens that are yet to be generated.
"""

from __future__ import annotations

from typing import NoReturn

from zeco_train.errors import ConfigError
from zeco_train.ops.operator import Kind, Operator
from zeco_train.ops.oracle import by_pairs
from zeco_train.ops.scalar_decay import FIXED_TIME
from zeco_train.ops.unmasked.passes import UNMASKED_PASSES


def forward_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of the forward pass: H · (2·KV + 2·KV), adding kᵀv to the state and applying q to it.

    Each product has two in the backward pass: dq = do Sᵀ, dS = qᵀ do, dk = v dSᵀ and dv = k dS.
    """
    return float(heads * 4 * key_dim * value_dim)


def recomputed_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """Nothing: the one state that the backward pass reads is kept."""
    return 0.0


def refuse_step(*operands: object) -> NoReturn:
    """The operator's `step`, which cannot exist.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("model.causal", "false", "each token reads the whole text; generation needs model.causal=true")


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
