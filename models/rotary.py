"""Rotary position embeddings (Su et al., 2021, arXiv 2104.09864), exact at any position.

Channels j and j + K/2 of a head of K are rotated by the angle position · theta^(-2j/K): the halves of a head, not
neighbouring channels, as in flash-linear-attention and transformers. A product of a rotated query and a rotated key
depends on the difference of their positions only. At position 8 million, angles in fp32 would be multiples of 0.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype

# Positions are split at this power of two, see `_turns`.
_LOW_BITS = 12


def rotate(q: Tensor, k: Tensor, positions: Tensor, theta: float, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        q: [B, T, H, K], K even; bf16, fp32 or fp64.
        k: [B, T, H, K], same dtype.
        positions: [T] int64, positions of the tokens; or [B, T] if sequences differ, as [B, 1] in generation.
        theta: base of the frequencies.
        size: channels of a head that are rotated, the first ones, an even number; None: all.

    Returns:
        q and k, in their shapes and dtypes. Angles are computed in fp64, the rotation in fp32 (fp64 for fp64).
    """
    # In [-π, π], so fp32 is enough for them.
    size = q.shape[-1] if size is None else size
    angles = (_turns(positions, theta, size) * (2 * math.pi)).to(accumulation_dtype(q.dtype)).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _turns(positions: Tensor, theta: float, size: int) -> Tensor:
    """The angles as fractions of a turn, in [-1/2, 1/2]: [..., size / 2] in fp64.

    A position is a · 2^12 + b. A frequency f, in turns, times 2^12 is exact, and so is its distance to the nearest
    whole number, so that no product below is large: errors stay below 1e-12 up to 2^24 tokens, and no sine of large
    numbers is computed.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / -size
    frequencies = torch.pow(theta, exponents) / (2 * math.pi)
    high = (positions >> _LOW_BITS).unsqueeze(-1).double()
    low = (positions & ((1 << _LOW_BITS) - 1)).unsqueeze(-1).double()
    turns = high * _fraction(frequencies * (1 << _LOW_BITS)) + low * frequencies
    return _fraction(turns)


def _fraction(turns: Tensor) -> Tensor:
    return turns - turns.round()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, T, H, K] by angles of cosine and sine [T, 1, R/2] or [B, T, 1, R/2]; channels from R on stay."""
    half = cos.shape[-1]
    first, second, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    rotated = first * cos - second * sin, first * sin + second * cos
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1).to(x.dtype)


def check_rotary(theta: float | None, size: int) -> None:
    """Raise `ConfigError` for a `model.rope_theta` or a head dimension that cannot be rotated; None: no rotation."""
    if theta is None:
        return
    if not (math.isfinite(theta) and theta > 1):
        raise ConfigError("model.rope_theta", theta, "must be finite and > 1, or null for no position embedding")
    if size % 2:
        allowed = f"rotates pairs of channels: a head's keys must be of even width, not {size}; or null"
        raise ConfigError("model.rope_theta", theta, allowed)
