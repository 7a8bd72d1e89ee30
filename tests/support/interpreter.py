"""Triton's interpreter in less time: three quarters of it go to bookkeeping that is the same for every launch."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def quicken() -> None:
    """Look up once what the interpreter replaces in Triton's language, not at every launch.

    Call after TRITON_INTERPRET=1 is set, since it imports Triton.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}
    patch = interpreter._patch_attr

    def patch_builtins(package: Any, *rest: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            # One that a caller has replaced already is none any more.
            if is_builtin(member := getattr(package, name)):
                patch(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtins


def skip_overflow_checks() -> None:
    """Omit the check of each sum and product of integers in 64 bits, as a GPU does."""
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_bf16_rounding() -> None:
    """Have the interpreter convert between fp32 and bf16 as GPUs do, in this process, from now on.

    It cuts digits off instead of rounding to nearest, and has other values for the extremes.
    """
    import numpy as np
    import torch
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def exact(builder: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        numbers = torch.from_numpy(np.ascontiguousarray(source.data))
        if kinds == (float32, bfloat16):
            return TensorHandle(numbers.bfloat16().view(torch.uint16).numpy(), bfloat16)
        if kinds == (bfloat16, float32):
            return TensorHandle(numbers.view(torch.bfloat16).float().numpy(), float32)
        return cast(builder, source, to)

    InterpreterBuilder.cast_impl = exact
