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
    patched = set()

    # A function that a kernel calls finds the language replaced, but for that of Triton's own functions, which is
    # replaced at the first call and stays.
    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call


def skip_overflow_checks() -> None:
    """Omit the check of each sum and product of integers in 64 bits, as a GPU does."""
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_bf16() -> None:
    """Have the interpreter treat bf16 as GPUs do, in this process, from now on: conversions and products.

    It cuts digits off instead of rounding to nearest, has other values for the extremes, and multiplies matrices of
    bf16 as the integers that it stores them in.
    """
    import numpy as np
    import torch
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(source: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.bfloat16).float().numpy()

    def exact(builder: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        if kinds == (bfloat16, float32):
            return TensorHandle(widened(source), float32)
        if kinds[1] == bfloat16 != kinds[0]:
            numbers = torch.from_numpy(np.ascontiguousarray(source.data))
            return TensorHandle(numbers.bfloat16().view(torch.uint16).numpy(), bfloat16)
        return cast(builder, source, to)

    def of_bf16(builder: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
        if left.dtype.scalar == right.dtype.scalar == bfloat16:
            left, right = (TensorHandle(widened(x), float32) for x in (left, right))
        return dot(builder, left, right, total, *rest)

    InterpreterBuilder.cast_impl = exact
    InterpreterBuilder.create_dot = of_bf16
