"""Softmax layers: transformers' registry of attention functions and of masks.

A layer's mask tells which keys a query reads, so this project's mask function answers with the one number that is left
of it, the window, and refuses every mask that is neither causal nor a window, over documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco_train.attach.forward import AttachError, Frame, current
from zeco_train.attach.linear import refuse_unknown
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput

# In transformers' registries.
IMPLEMENTATION = "zeco"
_SHAPE = (1, 1, 1, 1)


def register() -> None:
    """Add this project's function and mask to transformers' registries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, window_of_mask)


def _frame(module: Any) -> Frame:
    frame = current()
    if frame is None or frame.layer is None:
        raise AttachError(f"{type(module).__name__}: softmax attention outside the attached model's forward pass")
    return frame


@torch.compiler.disable
def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: q [B, H, T, D], k [B, G, T, D], v [B, G, T, V] → [B, T, H, V]."""
    frame = _frame(module)
    assert frame.layer is not None
    # `is_causal` says what the mask says.
    refuse_unknown(frame, "attention", rest, is_causal=True)
    if dropout:
        raise frame.layer.error(f"attention dropout {dropout:g}: no two ranks could draw what one device draws")
    if attention_mask is None or attention_mask.shape != _SHAPE or attention_mask.dtype != torch.int64:
        raise frame.layer.error("a mask of its own, which is neither causal nor a window, over documents")
    frame.layer.calls += 1
    window = int(attention_mask) or None
    if sliding_window not in (None, window):
        raise frame.layer.error(f"a window of {sliding_window} keys, where its mask has {window}")
    if query.shape[2] != key.shape[2]:
        raise frame.layer.error(f"{query.shape[2]} queries read {key.shape[2]} keys: a cache, or other tokens")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(frame, q, k, v, scaling, window), None


def attend(frame: Frame, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Q [B, T, H, D], k [B, T, G, D], v [B, T, G, V] → o [B, T, H, V], over all ranks' tokens."""
    width, values = q.shape[-1], v.shape[-1]
    # Kernels want one width: zeros in keys and queries change no score, zeros in values are cut off.
    scale = width**-0.5 if scale is None else scale
    q, k, v = (F.pad(x, (0, max(width, values) - x.shape[-1])) for x in (q, k, v))
    tokens = max(frame.of.position.seq_len // frame.of.over.size, 1)
    exchange = frame.of.over.for_softmax(q, k, window, tokens)
    position = frame.of.position_on(q, exchange)
    # A method that computes heads of all tokens keeps these for the backward pass; a replay would keep its own tokens,
    # and a checkpoint refuses a recomputation that keeps other tensors. So it is computed again, with its messages.
    over = 1 if exchange.attention is None else exchange.attention.heads_over
    if over > 1 and not k.shape[2] % over:
        return attend_at(q, k, v.to(q.dtype), scale, position, (StateInput(), StateInput()), window)[0][..., :values]
    o, states = attend_at(q, k, v.to(q.dtype), scale, position, (frame.next_state(), frame.next_state()), window)
    for state in states:
        frame.received(state)
    return o[..., :values]


@torch.compiler.disable
def window_of_mask(*args: Any, mask_function: Any, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Transformers' mask function: [1, 1, 1, 1] int64 on the CPU, keys that a query reads at most; 0: no limit."""
    if attention_mask is not None:
        raise AttachError("attention_mask: `shard` takes it out of the batch; no layer gets one")
    parts = dict(_parts(mask_function))
    if "causal_mask_function" not in parts:
        raise AttachError(f"attention mask: {', '.join(parts)} is not causal")
    return torch.full(_SHAPE, min((window for window in parts.values() if window is not None), default=0))


# The functions that transformers composes a mask of, by name, and their windows. A sample of the mask's values would
# not do: a window that is wider than a rank's slice looks causal there.
def _parts(function: Any) -> Iterator[tuple[str, int | None]]:
    place, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
    name = name.partition(".")[0]
    inside = inspect.getclosurevars(function).nonlocals if place == "transformers.masking_utils" else {}
    if inside.keys() >= {"mask_functions"} and name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence" and "mask_function" in inside:
        yield from _parts(inside["mask_function"])
    elif name == "sliding_window_overlay" and "sliding_window" in inside:
        yield name, int(inside["sliding_window"])
    # `shard` makes the positions from which transformers reads documents, and gives them to the layers itself.
    elif place == "transformers.masking_utils" and name in ("causal_mask_function", "packed_sequence_mask_function"):
        yield name, None
    else:
        raise AttachError(f"attention mask: {place}.{name} is neither causal nor a window, over documents")
