"""Calls on a GPU whose launches and torch functions are replayed without the Python that chose them.

A call of an operator is some ten kernels, and to find the sizes, tiles and options of each takes the host longer than
the kernel runs. They depend on the form of the call only: shapes, strides, dtypes and alignments. So the second call of
a form is recorded, every torch function and launch as a line of Python, and later calls run these lines instead. A
result is deleted after the last line that takes it, or earlier than without a recording. What tensors hold, which the
host would have to wait for, may change nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from triton import knobs
from triton.runtime import _async_compile, driver

# (part, *tensors) → its result: a part of a call, which takes tensors that were not there at the start.
Run = Callable[..., Any]
_Tape = Callable[..., Generator[Any, Any, None]]

_TENSORS, _NUMBERS = (Tensor, Parameter), (int, float, bool, type(None))
_MOST_FORMS = 1024
# None: called once.
_tapes: dict[Hashable, _Tape | None] = {}
_local = threading.local()


def running(form: Hashable, tensors: Sequence[Tensor | None], parts: int) -> Run:
    """How the parts of a call are run, in order: as they are, recorded, or in place of them what was recorded.

    Args:
        form: all that the parts depend on, besides tensors.
        tensors: that the first part takes, on the current device.
        parts: their number.
    """
    if not all(x is None or type(x) in _TENSORS for x in tensors) or is_observed():
        return _plain
    of_tensors = [
        x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16) for x in tensors
    ]
    key = form, *of_tensors
    if (tape := _tapes.get(key)) is not None:
        played = tape(*tensors)
        return lambda part, *more: played.send(more or None)
    # One tensor in two places would be one to all calls of the form.
    if key in _tapes:
        present = [id(x) for x in tensors if x is not None]
        return _plain if len({*present}) < len(present) else Recording(key, tensors, parts).run
    if len(_tapes) >= _MOST_FORMS:
        _tapes.clear()
    _tapes[key] = None
    return _plain


def _plain(part: Callable[..., Any], *tensors: Tensor) -> Any:
    return part(*tensors)


def is_observed() -> bool:
    """Whether launches have to be Triton's own, or are none."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or _async_compile.active_mode.get()
    return bool(hooked or runtime.interpret or runtime.debug or knobs.compilation.instrumentation_mode)


def recording() -> Recording | None:
    """Of this thread."""
    return getattr(_local, "recording", None)


class Recording(TorchFunctionMode):
    """Writes a generator of the parts' lines, which yields their results."""

    def __init__(self, key: Hashable, tensors: Sequence[Tensor | None], parts: int) -> None:
        super().__init__()
        self._key, self._parts, self._lines = key, parts, list[str]()
        self._names, self._count, self._is_closed = WeakTensorKeyDictionary(), 0, True
        self._fixed: dict[str, Any] = {"stream_of": driver.active.get_current_stream, "device": driver.active.get_current_device()}
        self._inputs = [self._new(x) for x in tensors]

    def run(self, part: Callable[..., Any], *tensors: Tensor) -> Any:
        """Run a part and record it."""
        assert not any(x in self._names for x in tensors), "given before"
        if self._lines:
            given = "".join(f"{self._new(x)}, " for x in tensors)
            self._lines[-1] = f"{given and f'{given}= '}{self._lines[-1]}"
        self._lines.append("stream = stream_of(device)")
        _local.recording = self
        try:
            with self:
                result = part(*tensors)
        finally:
            _local.recording = None
        self._lines.append(f"yield {self._text(result)}")
        self._parts -= 1
        # Not with a tensor that is neither given nor a result.
        if self._parts == 0 and self._is_closed:
            _tapes[self._key] = self._tape()
        return result

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it, and record it unless it tells something about tensors."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if result is None or _has_tensors(result):
            given = [*map(self._text, args), *(f"{name}={self._text(x)}" for name, x in kwargs.items())]
            line = f"{self._text(function)}({', '.join(given)})"
            self._lines.append(line if result is None else f"{self._target(result)} = {line}")
        return result

    def launch(self, compiled: Any, grid: Sequence[int], values: Sequence[Any]) -> None:
        """Record a launch."""
        fixed = [compiled.function, compiled.packed_metadata, None, None, None]
        given = [f"{self._text(x)}.data_ptr()" if isinstance(x, Tensor) else self._text(x) for x in values]
        where = [*map(repr, (*grid, 1, 1)[:3]), "stream", *map(self._text, fixed)]
        self._lines.append(f"{self._text(compiled.run)}({', '.join([*where, *given])})")

    def _new(self, x: Any) -> str:
        self._count += 1
        name = f"x{self._count}"
        if x is not None:
            self._names[x] = name
        return name

    def _target(self, result: Any) -> str:
        return self._new(result) if isinstance(result, Tensor) else "".join(f"{self._target(x)}, " for x in result)

    def _text(self, x: Any) -> str:
        if isinstance(x, Tensor):
            self._is_closed &= x in self._names
            return self._names.get(x, "None")
        if _has_tensors(x):
            return f"[{', '.join(map(self._text, x))}]"
        if x.__class__ in (int, bool, type(None)):
            return repr(x)
        name = f"c{len(self._fixed)}"
        self._fixed[name] = x
        return name

    def _tape(self) -> _Tape:
        seen, lines = set[str](), list[str]()
        for line in reversed(self._lines):
            last = {*re.findall(r"\bx\d+\b", line)} - seen
            seen |= last
            lines.append(f" {line}" + (f"; del {', '.join(sorted(last))}" if last else ""))
        unused = [x for x in self._inputs if x not in seen]
        text = "\n".join([f"def tape({', '.join(self._inputs)}):", *(f" del {x}" for x in unused), *reversed(lines)])
        exec(text, self._fixed)
        tape: _Tape = self._fixed["tape"]
        return tape


def _has_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and any(map(_has_tensors, x)))
