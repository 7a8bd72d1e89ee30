"""The kernels of an operator's first call, compiled by several threads at a time instead of one after another.

Triton compiles a kernel when it is first launched, and a pass launches its kernels in order: with empty caches the
first call of kda takes 16 s on one core. So before the first call of a form the passes run once without launching any
kernel: all go to Triton's own asynchronous compilation, which works in C++ and in `ptxas`, mostly without Python's
lock. The results of that run are memory without meaning, which nothing reads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import Passes

logger = logging.getLogger(__name__)

# Triton compiles anew for sizes that divide by 16; tokens come in chunks of 64.
_TOKENS = 16 * 64

_compiled: set[Hashable] = set()
_lock = threading.Lock()


def compile_forward(
    name: str, passes: Passes, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None, passed: bool
) -> None:
    """Compile the kernels of an operator's forward pass before its first call of this form, on a GPU.

    `passed`: that of the transition, too. If operands need gradients, those of the backward pass, too.
    """
    needs_grad = any(x.requires_grad for x in operands)

    def run() -> None:
        local = passes.forward(operands, scale, doc_ids)
        if passed:
            _ = local.transition
        local.overlap()
        local.outputs(local.state)
        if needs_grad:
            kept, saved = list(operands), list(local.saved)
            for position in passes.replaced:
                kept[position] = saved.pop(0)
            do = torch.empty_like(operands[OPERATORS[name].output])
            _run_backward(passes, kept, do, saved, local.state, scale, doc_ids)

    _once(name, (passed, needs_grad), operands, doc_ids, run)


def compile_backward(
    name: str,
    passes: Passes,
    operands: Sequence[Tensor],
    do: Tensor,
    saved: Sequence[Tensor],
    incoming_state: Tensor | None,
    scale: float,
    doc_ids: Tensor | None,
) -> None:
    """`compile_forward` for a backward pass."""
    rest = do, saved, incoming_state, scale, doc_ids
    _once(name, "backward", operands, doc_ids, lambda: _run_backward(passes, operands, *rest))


def _run_backward(passes: Passes, operands: Sequence[Tensor], do: Tensor, saved: Sequence[Tensor], *rest: Any) -> None:
    incoming_state, scale, doc_ids = rest
    state = incoming_state if passes.needs_incoming else None
    local = passes.backward(operands, do, saved, state, scale, doc_ids)
    local.overlap()
    local.operand_grads(local.state_grad)


def _once(
    name: str, which: Hashable, operands: Sequence[Tensor], doc_ids: Tensor | None, run: Callable[[], None]
) -> None:
    first = operands[0]
    if first.device.type != "cuda":
        return
    operator = OPERATORS[name]
    of_outputs = operands[operator.output].shape
    tokens = of_outputs[1]
    form = first.shape[2:], of_outputs[2:], tokens % _TOKENS == 0, tokens % 16 == 0, first.dtype, first.device
    key = name, which, form, doc_ids is None
    if key in _compiled:
        return
    with _lock:
        if key in _compiled or torch.cuda.is_current_stream_capturing():
            return
        _compiled.add(key)
        # PyTorch's own passes have no kernels to compile.
        if operator.select(operands) is operator.portable:
            return
        try:
            with torch.no_grad(), compiled_at_once(max(2, torch.get_num_threads())):
                run()
        except torch.OutOfMemoryError:
            logger.info("%s: too little memory to compile its kernels at once; they are when first launched", name)


@contextmanager
def compiled_at_once(threads: int) -> Iterator[None]:
    """Kernels that this thread launches inside are compiled, by so many threads, and not run.

    Errors of the compiler are those of the later launch. One thread at a time may be inside.
    """
    from triton.runtime import JITFunction
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    plain = JITFunction.run

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Other threads go on launching.
        return plain(kernel, *args, grid=grid, warmup=warmup or active_mode.get() is not None, **options)

    JITFunction.run = run
    try:
        with ThreadPoolExecutor(threads, "kernels") as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run = plain
