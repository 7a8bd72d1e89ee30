"""Calls on a GPU: compiled at first, then recorded, then replayed without the Python that chose their launches.

A call of an operator is some ten kernels. Their sizes, tiles and options depend on nothing but the call's form: shapes,
strides, dtypes and alignments; and to find them again takes the host longer than the kernels run. So

    first call    Triton compiles a kernel when it is launched, and a pass launches them in order: with empty caches a
                  call of kda takes 16 s on one core. So the steps run once without launching: all kernels go to
                  Triton's own asynchronous compilation, which works in C++ and in `ptxas`, mostly without Python's
                  lock. The results of that run are memory without meaning, which nothing reads.
    second        every torch function and every launch is recorded as a line of Python
    later ones    run these lines. A result is deleted after the last line that takes it, as early as without a record.

No step may depend on what tensors hold, for which the host would have to wait anyway.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from triton import knobs
from triton.runtime import _async_compile, driver

logger = logging.getLogger(__name__)

# A call: until its scan, which yields a state first; beside the scan; and, sent the state received, to the end.
Steps = Generator[Any, Tensor | None, None]
_PARTS = 3

# Triton compiles anew for sizes that divide by 16; tokens come in chunks of 64.
_TOKENS = 16 * 64
_MOST_FORMS = 1024
# By form; None: called once; False: it cannot be recorded.
_tapes: dict[Hashable, Callable[..., Steps] | bool | None] = {}
_compiled = set[Hashable]()
_local = threading.local()


def call(form: Hashable, tensors: Sequence[Tensor | None], steps: Callable[[], Steps]) -> Steps:
    """The steps of a call, or their record.

    Args:
        form: all that they depend on, besides
        tensors: those that they take, but for the state that they are sent.
        steps: on these tensors, on the current device.
    """
    if not all(x is None or type(x) in (Tensor, Parameter) for x in tensors) or _is_observed():
        return steps()
    key = (
        form,
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16) for x in tensors],
    )
    tape = _tapes.get(key)
    if callable(tape):
        return tape(*tensors)
    if key not in _tapes:
        if len(_tapes) >= _MOST_FORMS:
            _tapes.clear()
        _tapes[key] = None
        _compile(form, tensors, steps)
        return steps()
    # One tensor in two places would be one in all calls of the form.
    present = [id(x) for x in tensors if x is not None]
    return steps() if tape is False or len({*present}) < len(present) else Recording(key, tensors).record(steps())


def _is_observed() -> bool:
    """Whether launches have to be Triton's own, or are none."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or _async_compile.active_mode.get()
    return bool(hooked or runtime.interpret or runtime.debug or knobs.compilation.instrumentation_mode)


def recording() -> Recording | None:
    """Of this thread."""
    return getattr(_local, "recording", None)


class Recording(TorchFunctionMode):
    """Writes the lines of a generator that yields what the steps do."""

    def __init__(self, key: Hashable, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._is_whole = True
        self._key, self._lines, self._count = key, list[str](), 0
        self._names = WeakTensorKeyDictionary()
        stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
        self._fixed: dict[str, Any] = {"stream_of": stream_of, "device": device}
        self._inputs = [self._new(x) for x in tensors]

    def record(self, steps: Steps) -> Steps:
        """The steps, recorded."""
        given = None
        for part in range(1, _PARTS + 1):
            if given is not None:
                self._is_whole &= given not in self._names
                self._lines[-1] = f"{self._new(given)} = {self._lines[-1]}"
            self._lines.append("stream = stream_of(device)")
            _local.recording = self
            try:
                with self:
                    result = steps.send(given)
            finally:
                _local.recording = None
            self._lines.append(f"yield {self._text(result)}")
            if part == _PARTS:
                _tapes[self._key] = self._is_whole and self._tape()
            given = yield result

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it, and record it unless it only tells something about tensors."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if result is None or _has_tensors(result):
            given = [*map(self._text, args), *(f"{name}={self._text(x)}" for name, x in kwargs.items())]
            target = "" if result is None else f"{self._target(result)} = "
            self._lines.append(f"{target}{self._text(function)}({', '.join(given)})")
        return result

    def launch(self, compiled: Any, grid: Sequence[int], values: Sequence[Any]) -> None:
        """Record a launch; addresses, since Triton would ask the driver about each tensor."""
        if compiled is None:
            self._is_whole = False
            return
        given = [f"{self._text(x)}.data_ptr()" if isinstance(x, Tensor) else self._text(x) for x in values]
        fixed = [*map(self._text, (compiled.function, compiled.packed_metadata, None, None, None))]
        where = [*map(repr, (*grid, 1, 1)[:3]), "stream"]
        self._lines.append(f"{self._text(compiled.run)}({', '.join([*where, *fixed, *given])})")

    def _new(self, x: Tensor | None) -> str:
        self._count += 1
        name = f"x{self._count}"
        if x is not None:
            self._names[x] = name
        return name

    def _target(self, result: Any) -> str:
        return self._new(result) if isinstance(result, Tensor) else "".join(f"{self._target(x)}, " for x in result)

    def _text(self, x: Any) -> str:
        if isinstance(x, Tensor):
            self._is_whole &= x in self._names
            return self._names.get(x, "None")
        if _has_tensors(x):
            return f"[{', '.join(map(self._text, x))}]"
        if type(x) in (int, bool, type(None)):
            return repr(x)
        name = f"c{len(self._fixed)}"
        self._fixed[name] = x
        return name

    def _tape(self) -> Callable[..., Steps]:
        seen, lines = set[str](), list[str]()
        for line in (*reversed(self._lines), *self._inputs):
            last = {*re.findall(r"\bx\d+\b", line)} - seen
            seen |= last
            lines.append(f" {line}" + (f"; del {', '.join(sorted(last))}" if last else ""))
        exec("\n".join([f"def tape({', '.join(self._inputs)}):", *reversed(lines)]), self._fixed)
        tape: Callable[..., Steps] = self._fixed["tape"]
        return tape


def _has_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and any(map(_has_tensors, x)))


# All kernels at once, before the first call of a kind; errors of the compiler are those of the later launch.
def _compile(form: Hashable, tensors: Sequence[Tensor | None], steps: Callable[[], Steps]) -> None:
    # Lengths of one kind have the same kernels.
    lengths = (_TOKENS, 16)
    kinds = [
        x if x is None else (x.dtype, x.shape[2:], *(x.shape[1:2].numel() % n == 0 for n in lengths)) for x in tensors
    ]
    if (key := (form, *kinds)) in _compiled or torch.cuda.is_current_stream_capturing():
        return
    _compiled.add(key)
    pool = ThreadPoolExecutor(max(2, torch.get_num_threads()), "kernels")
    try:
        with torch.no_grad(), pool, _async_compile.AsyncCompileMode(pool, ignore_errors=True):
            once = steps()
            state, *_ = next(once)
            next(once)
            once.send(state)
    except torch.OutOfMemoryError:
        logger.info("too little memory to compile kernels all at once; they are compiled when first launched")
