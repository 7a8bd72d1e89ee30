"""Calls on a GPU: compiled at first, then recorded, then replayed without the Python that chose their launches.

An operator's pass is some five kernels. Their sizes, tiles and options depend on the form of the call only, on shapes,
strides, dtypes, devices and alignments, and to find them again takes the host longer than the kernels run. So of each
form

- before the first call the steps run once without launching: Triton compiles all kernels at once by several threads,
  mostly without Python's lock, instead of one at each launch (`kda`: 16 s). That run's results mean nothing.
- The second call is recorded: every torch function and every launch is a line of Python.
- Later ones run these lines. A result is deleted after the last line that takes it.

What tensors hold may change no step: the host would have to wait for it. A call in which torch functions read it is not
recorded. Who patches how kernels are launched calls `forget` before and after.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from triton import knobs
from triton.runtime import _async_compile, driver

logger = logging.getLogger(__name__)

# Of a pass: until its scan, which yields the state to send first; beside the scan; and, sent what it received, the end.
Steps = Generator[Any, Any, None]
_PARTS = 3
# Triton compiles anew for sizes that divide by 16; tokens come in chunks of 64.
_LENGTHS = 16 * 64
_MOST_FORMS, _MOST_LINES = 1024, 1000
# Torch functions that tell what a tensor holds.
_READS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "unique", "masked_select", "__bool__",
    "__int__", "__float__", "__index__", "__contains__",
}  # fmt: skip

# By form: None after one call, False if it cannot be recorded.
_tapes: dict[Hashable, Callable[..., Steps] | bool | None] = {}
_compiled = set[Hashable]()


# `recording`: of this thread.
local = threading.local()


def call(form: Hashable, tensors: Sequence[Tensor | None], steps: Callable[[], Steps]) -> Steps:
    """The steps of a call, or their record.

    Args:
        form: all that they depend on besides `tensors`.
        tensors: that they take, but for the state that they are sent, on the current device.
        steps: on these tensors.
    """
    if not all(x is None or type(x) in (Tensor, Parameter) for x in tensors) or _is_observed():
        return steps()
    found = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16) for x in tensors]
    if callable(tape := _tapes.get(key := (form, *found))):
        return tape(*tensors)
    if key not in _tapes:
        if len(_tapes) >= _MOST_FORMS:
            _tapes.clear()
        _tapes[key] = None
        _compile(form, tensors, steps)
    # One tensor in two places would be one in all calls of the form.
    elif tape is None and len({*map(id, filter(torch.is_tensor, tensors))}) == sum(map(torch.is_tensor, tensors)):
        return Recording(key, tensors).record(steps())
    return steps()


def forget() -> None:
    """Forget all records."""
    _tapes.clear()


def _is_observed() -> bool:
    """Whether launches have to be Triton's own, or are none."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or _async_compile.active_mode.get()
    return bool(hooked or runtime.interpret or runtime.debug or knobs.compilation.instrumentation_mode)


# All kernels at once, before the first call of a kind. A kernel that does not compile is an error where it is launched.
def _compile(form: Hashable, tensors: Sequence[Tensor | None], steps: Callable[[], Steps]) -> None:
    # Lengths of one kind have the same kernels.
    kinds = [x if x is None else (x.dtype, x.shape[2:], gcd(x.shape[1:2].numel(), _LENGTHS)) for x in tensors]
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


class Recording(TorchFunctionMode):
    """Writes the lines of a generator that yields what the steps do."""

    def __init__(self, key: Hashable, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._key, self._is_whole, self._count, self._names = key, True, itertools.count(), WeakTensorKeyDictionary()
        # All that is no tensor, by name.
        self._fixed: dict[str, Any] = {"stream_of": driver.active.get_current_stream}
        self._inputs = [self._named(x) for x in tensors]
        self._lines = [*self._inputs]

    def record(self, steps: Steps) -> Steps:
        """The steps, recorded."""
        received = None
        for part in range(1, _PARTS + 1):
            if received is not None:
                received = received.detach()  # it may be one that was there before, which has a name of its own
                self._lines[-1] = f"{self._named(received)} = {self._lines[-1]}"
            self._lines.append(f"stream = stream_of({self._text(driver.active.get_current_device())})")
            local.recording = self
            try:
                with self:
                    result = steps.send(received)
            finally:
                del local.recording
            self._lines.append(f"yield {self._text(result)}")
            self._is_whole &= len(self._lines) < _MOST_LINES
            _tapes[self._key] = self._is_whole and (self._tape() if part == _PARTS else None)
            received = yield result

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it, and record it unless it only tells something about tensors."""
        local.recording = None  # a kernel that the function launches is the function's
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            local.recording = self
        self._is_whole &= getattr(function, "__name__", "") not in _READS
        if result is None or _has_tensors(result):
            given = [*map(self._text, args), *(f"{name}={self._text(x)}" for name, x in (kwargs or {}).items())]
            self._lines.append(f"{self._named(result)} = {self._text(function)}({', '.join(given)})")
        return result

    def launch(self, compiled: Any, grid: Sequence[int], values: Sequence[Any]) -> None:
        """Record a launch; addresses, since Triton would ask the driver about each tensor."""
        fixed = compiled.function, compiled.packed_metadata, None, None, None
        given = [f"{self._text(x)}.data_ptr()" if isinstance(x, Tensor) else self._text(x) for x in (*fixed, *values)]
        sizes = map(repr, (*grid, 1, 1)[:3])
        self._lines.append(f"{self._text(compiled.run)}({', '.join((*sizes, 'stream', *given))})")

    def _named(self, x: Any) -> str:
        if isinstance(x, (tuple, list)):
            return f"[{', '.join(map(self._named, x))}]"
        name = f"x{next(self._count)}"
        if isinstance(x, Tensor):
            self._names[x] = name
        return name

    def _text(self, x: Any) -> str:
        if isinstance(x, Tensor):
            self._is_whole &= x in self._names
            return self._names.get(x, "None")
        if _has_tensors(x):
            return f"[{', '.join(map(self._text, x))}]"
        if type(x) in (int, bool, type(None)):
            return repr(x)
        parts = (x.start, x.stop, x.step) if type(x) is slice else ()
        self._is_whole &= not (isinstance(x, (dict, torch.UntypedStorage, torch.TypedStorage)) or _has_tensors(parts))
        name = f"c{len(self._fixed)}"
        self._fixed[name] = x
        return name

    def _tape(self) -> Callable[..., Steps]:
        seen, lines = set[str](), list[str]()
        for line in reversed(self._lines):
            last = {*re.findall(r"\bx\d+\b", line)} - seen
            seen |= last
            lines.append(f" {line}" + (f"; del {', '.join(sorted(last))}" if last else ""))
        exec("\n".join([f"def tape({', '.join(self._inputs)}):", *reversed(lines)]), self._fixed)
        return cast(Callable[..., Steps], self._fixed.pop("tape"))


def _has_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and any(map(_has_tensors, x)))
