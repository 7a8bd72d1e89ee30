"""State transition of a shard: the affine map `R ↦ A R + S` that every scan over ranks applies.

`S` is the shard's state from a zero start. `A` is its *transition*; its kind is given by its number of dimensions:

    [B, H, K]      log-decays: A = Diag(exp(transition)); −inf is a decay of 0. Gated linear attention and similar.
    [B, H, K, K]   matrices: A = transition; a zero matrix cuts the incoming state off. The delta rule and similar.

Backends and collectives use only these functions for arithmetic on transitions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_matrix(transition: Tensor) -> bool:
    """Whether a transition consists of matrices, [B, H, K, K], rather than log-decays, [B, H, K]."""
    return transition.ndim == 4


def fold(state: Tensor, transition: Tensor, incoming: Tensor) -> Tensor:
    """The state after a shard: `A incoming + state`.

    Args:
        state: [B, H, K, V], the shard's state from a zero start.
        transition: [B, H, K], log-decays ≤ 0, or [B, H, K, K], matrices; same dtype.
        incoming: [B, H, K, V], same dtype, finite: the state before the shard.

    Returns:
        [B, H, K, V], a new tensor; never NaN, since a 0 multiplies finite values only.
    """
    if not is_matrix(transition):
        return torch.addcmul(state, transition.exp().unsqueeze(-1), incoming)
    return torch.baddbmm(*(x.flatten(0, 1) for x in (state, transition, incoming))).view(state.shape)


def compose(later: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Compose two neighbouring shards into one pair.

    Args:
        later: (state, transition) of the later shard, as in `fold`.
        earlier: the same of the earlier one.

    Returns:
        (state, transition); its `fold` is that of the earlier one followed by that of the later one.
    """
    (state, transition), (earlier_state, earlier_transition) = later, earlier
    joined = transition @ earlier_transition if is_matrix(transition) else transition + earlier_transition
    return fold(state, transition, earlier_state), joined


def adjoint(transition: Tensor) -> Tensor:
    """Aᵀ, a view: the transition of a reverse scan, over gradients with respect to states."""
    return transition.mT if is_matrix(transition) else transition


def cut(transition: Tensor, heads: Tensor) -> Tensor:
    """The transitions of some heads as rows of K numbers, to be sent along with columns of states.

    Args:
        transition: [B, H, K] or [B, H, K, K].
        heads: […, N] indices.

    Returns:
        [B, …, N, K] or [B, …, N · K, K]; `join` is the inverse.
    """
    rows = transition[:, heads]
    return rows.flatten(-3, -2) if is_matrix(transition) else rows


def join(rows: Tensor, like: Tensor) -> Tensor:
    """Inverse of `cut`: transitions of the kind of `like`, [B, N, K] or [B, N, K, K]."""
    return rows.unflatten(-2, (-1, rows.shape[-1])) if is_matrix(like) else rows


def as_columns(transition: Tensor) -> Tensor:
    """A transition as columns of K numbers, to be sent along with those of a state: [B, H, K, 1] or [B, H, K, K]."""
    return transition if is_matrix(transition) else transition.unsqueeze(-1)


def from_columns(columns: Tensor, like: Tensor) -> Tensor:
    """Inverse of `as_columns`: a transition of the kind of `like`."""
    return columns if is_matrix(like) else columns.squeeze(-1)
