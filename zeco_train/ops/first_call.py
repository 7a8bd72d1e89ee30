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
import torch.distributed as dist
from torch import Tensor

from zeco_train.ops.passes import BackwardPass, ForwardPass, Passes

logger = logging.getLogger(__name__)

# Triton compiles anew for sizes that divide by 16; tokens come in chunks of 64.
_TOKENS = 16 * 64

_lock = threading.Lock()


def compiling_first(passes: Passes) -> Passes:
    """Passes that compile their kernels, all at once, before the first call of each form.

    Where an operand of a forward pass needs gradients, the kernels of the backward pass are among them.
    """
    compiled = set[Hashable]()

    def forward(operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> ForwardPass:
        needs_grad = any(x.requires_grad for x in operands)

        def run() -> None:
            local = passes.forward(operands, scale, doc_ids)
            # A matrix that no state passes is not computed.
            if dist.is_initialized() and dist.get_world_size() > 1:
                _ = local.transition
            local.overlap()
            o = local.outputs(local.state)
            if needs_grad:
                kept, saved = list(operands), list(local.saved)
                for position in passes.replaced:
                    kept[position] = saved.pop(0)
                state = local.state if passes.needs_incoming else None
                _run_backward(passes.backward(kept, o, saved, state, scale, doc_ids))

        _once(compiled, (needs_grad, doc_ids is None, *map(_form, operands)), run)
        return passes.forward(operands, scale, doc_ids)

    def backward(operands: Sequence[Tensor], do: Tensor, *rest: Any) -> BackwardPass:
        key = "backward", rest[-1] is None, *map(_form, operands)
        _once(compiled, key, lambda: _run_backward(passes.backward(operands, do, *rest)))
        return passes.backward(operands, do, *rest)

    forward.__wrapped__, backward.__wrapped__ = passes.forward, passes.backward  # type: ignore[attr-defined]
    return passes._replace(forward=forward, backward=backward)


def _run_backward(local: BackwardPass) -> None:
    local.overlap()
    local.operand_grads(local.state_grad)


def _form(operand: Tensor) -> Hashable:
    # Lengths of one form have the same kernels.
    tokens = operand.shape[1] if operand.dim() > 1 else 0
    return operand.shape[2:], operand.dtype, tokens % _TOKENS == 0, tokens % 16 == 0


def _once(compiled: set[Hashable], key: Hashable, run: Callable[[], None]) -> None:
    if key in compiled:
        return
    with _lock:
        # Kernels are also asked about, and interpreted, on machines without a GPU.
        if key in compiled or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return
        compiled.add(key)
        try:
            with torch.no_grad(), compiled_at_once(max(2, torch.get_num_threads())):
                run()
        except torch.OutOfMemoryError:
            logger.info("too little memory to compile kernels all at once; they are compiled when first launched")


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
