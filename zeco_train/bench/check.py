"""Correctness checks before timing: errors relative to a float64 reference, and the exception that ends a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.errors import ZecoError
from zeco_train.system.numbers import relative_error


class WrongResultError(ZecoError):
    """A variant to be timed computes a wrong result: names variant, rank, result, error and tolerance.

    Attributes:
        reason: the same without the variant.
    """

    exit_code = 8

    def __init__(self, variant: str, rank: int, result: str, error: float, tolerance: float) -> None:
        self.reason = f"{result} on rank {rank} has a relative error of {error:.2g}, allowed are {tolerance:.0e}"
        super().__init__(f"{variant} is wrong, nothing is timed: {self.reason}")


def check_results(
    variant: str, rank: int, results: Mapping[str, tuple[Tensor, Tensor]], tolerance: float
) -> dict[str, float]:
    """Errors of `{name: (found, expected)}`.

    Raises:
        WrongResultError: an error is above the tolerance or NaN; the first one.
    """
    errors = {name: relative_error(found, expected) for name, (found, expected) in results.items()}
    for name, error in errors.items():
        # Not `error > tolerance`, which is false for NaN.
        if not error <= tolerance:
            raise WrongResultError(variant, rank, name, error, tolerance)
    return errors


def gradient_norms(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Two vectors with the same relative difference as gradients sharded over all ranks. Collective."""
    squares = torch.zeros(2, dtype=torch.float64, device=found[0].device)
    for one, other in zip(found, expected, strict=True):
        squares += torch.stack([(one - other).double().square().sum(), other.double().square().sum()])
    dist.all_reduce(squares)
    difference, norm = squares.sqrt().cpu()
    return torch.stack([norm, difference]), torch.stack([norm, torch.zeros_like(norm)])
