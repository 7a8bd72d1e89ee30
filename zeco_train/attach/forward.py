"""One forward pass of an attached model: where its tokens lie, and what its layers receive from other ranks.

A pass is known to the thread that runs it, and to functions that a checkpoint calls again, from whichever thread. So
two batches may be in flight, and a recomputation reads the batch of its own forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeco_train.errors import ZecoError
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.mix import mix_at, operator_of
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import GroupExchange

if TYPE_CHECKING:
    from torch import nn


class AttachError(ZecoError):
    """A model, a layer or a batch that cannot be exact over ranks: names it, and the reason."""

    exit_code = 2


@dataclass
class Pass:
    """A forward pass of one batch."""

    position: SequencePosition  # of the rank's tokens, as it came with the batch
    over: GroupExchange
    positions: Tensor | None  # [B, T] int64, of the tokens in their documents
    labels: Mapping[str, Any]  # `shift_labels` [B, T] and `num_items_in_batch`, or None each
    # [B, T] bool: those that are no padding; None: all.
    tokens: Tensor | None
    random_state: Any  # of the generators before the pass, if it draws numbers of its own
    _on_devices: dict[tuple[torch.device, int], SequencePosition] = field(default_factory=dict)

    def position_on(self, x: Tensor, exchange: Exchange) -> SequencePosition:
        """The position over an exchange on the device of x [B, T, …]; copied there once for all layers."""
        if (key := (x.device, id(exchange))) not in self._on_devices:
            self._place(x, exchange)
        return self._on_devices[key]

    @torch.compiler.disable  # it would be compiled again for other lengths and documents
    def _place(self, x: Tensor, exchange: Exchange) -> None:
        known = next((found for (device, _), found in self._on_devices.items() if device == x.device), None)
        self._on_devices[x.device, id(exchange)] = (known or self.position).over(exchange).on(x)

    def positions_of(self, x: Tensor) -> Tensor:
        """`positions` on the device of x."""
        if self.positions is None:
            raise AttachError("position_ids: missing; `shard` gives them")
        return self.positions.to(x.device)


@dataclass(frozen=True)
class Frame:
    """What runs now: a pass, the layer among those attached, and what a checkpoint keeps of it."""

    of: Pass
    layer: Layer | None = None
    keep: list[Tensor] | None = None  # receives what other ranks send
    replay: Iterator[Tensor] | None = None  # what a first pass received: nothing is communicated then

    def mix(self, operator: str, operands: Sequence[Tensor], scale: float | None = None) -> Tensor:
        """An operator over all ranks' tokens; `operands` as `zeco_train.ops.mix.mix` takes them."""
        position = self.of.position_on(operands[0], self.of.over.exchange)
        scale = operator_of(operator, operands).scale_of(operands, scale)
        o, state = mix_at(operator, operands, scale, position, self.next_state())
        self.received(state)
        return o

    def next_state(self) -> StateInput:
        """Of the next state that crosses ranks: the one to replay, or none."""
        return StateInput(None if self.replay is None else next(self.replay))

    def received(self, state: StateOutput) -> None:
        """Keep a state for recomputation."""
        if self.keep is not None:
            self.keep.append(state.received)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that a module was written as: FSDP2 makes one of its own of it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))


@dataclass
class Layer:
    """An attached layer."""

    name: str
    module: nn.Module
    kind: str  # `linear` or `softmax`
    calls: int = 0  # that were answered; of a frame's own copy

    def __str__(self) -> str:
        return f"{self.name} ({class_of(self.module).__name__})"

    def error(self, problem: str) -> AttachError:
        return AttachError(f"{self}: {problem}")


class _Running(threading.local):
    # Of this thread, the innermost last.
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_running = _Running()


def current() -> Frame | None:
    """The innermost frame of this thread."""
    return _running.frames[-1] if _running.frames else None


def push(frame: Frame) -> None:
    """Make a frame the innermost of this thread."""
    _running.frames.append(frame)


def pop(*, within: Pass | None = None) -> None:
    """Leave the innermost frame of this thread; with `within` all frames of that pass, which an error has left."""
    if within is None:
        _running.frames.pop()
    while _running.frames and _running.frames[-1].of is within:
        _running.frames.pop()


@contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """The block runs in this frame."""
    before = len(_running.frames)
    push(frame)
    try:
        yield
    finally:
        # An error leaves the frames of layers inside.
        del _running.frames[before:]


class Checkpoint:
    """A checkpointing function of a model, called as that: recomputation replays what the first pass received."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = current()
        return self.function(function if frame is None else _Recomputed(function, frame), *args, **kwargs)


class _Recomputed:
    # Called first by the forward pass, then by the backward pass, once or more.
    def __init__(self, function: Callable[..., Any], frame: Frame) -> None:
        self._function, self._frame = function, replace(frame, layer=None)
        self._received: list[Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._received is None:
            self._received = []
            frame = replace(self._frame, keep=self._received, replay=None)
        else:
            frame = replace(self._frame, keep=None, replay=iter(self._received))
        with entered(frame):
            return self._function(*args, **kwargs)
