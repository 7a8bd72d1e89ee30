"""Triton kernels, and how they are launched. Imported only on machines with a CUDA device."""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime import JITFunction, _async_compile

from zeco_train.kernels.replay import local


class Kernel(JITFunction):
    """A kernel whose launches are recorded where a call is, or only compiled (`zeco_train.kernels.replay`)."""

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        warmup = warmup or _async_compile.active_mode.get() is not None
        compiled = super().run(*args, grid=grid, warmup=warmup, **constants)
        if (recording := getattr(local, "recording", None)) is not None:
            rest = [constants.get(each.name, each.default) for each in self.params[len(args) :]]
            recording.launch(compiled, grid, [*args, *rest])
        return compiled


def jit(function: Any) -> Any:
    """`triton.jit` of a `Kernel`."""
    kernel = triton.jit(function)
    if isinstance(kernel, JITFunction):
        kernel.__class__ = Kernel
    return kernel


# Triton's own take 2 µs.
def cdiv(n: int, divisor: int) -> int:
    """A quotient, rounded up."""
    return (n + divisor - 1) // divisor


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n > 0."""
    return 1 << (n - 1).bit_length()
