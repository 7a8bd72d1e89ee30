"""The attention of a span to consecutive keys by PyTorch's FlashAttention kernel, for bf16 on GPUs.

Called as `torch.nn.attention.varlen` calls it, one sequence per document and row of the batch; that module has no
backward pass for an output and a log-sum-exp over more keys than those at hand, which blocks of keys need. The kernel
aligns the last query of a sequence with its last key, as a `KernelCall` does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from zeco_train.ops.kernel_operands import dense
from zeco_train.ops.softmax.span import Attended, KernelCall, Span


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, key_start: int, scale: float) -> Attended:
    """The attention of a span, as `zeco_train.ops.softmax.attention.attend`."""
    call = span.call(key_start, key_start + k.shape[1])
    batch = q.shape[0]
    if call is None:
        return Attended.by_no_keys(q, v)
    queries, keys, values = _packed(q, call.queries), _packed(k, call.keys), _packed(v, call.keys)
    found, sums, *_ = torch.ops.aten._flash_attention_forward(
        queries, keys, values, *_lengths(call, batch, q.device), 0.0, call.causal, False, scale=scale, **_window(call)
    )
    found, sums = found.unflatten(0, (batch, -1)), sums.unflatten(1, (batch, -1)).transpose(0, 1)
    if found.shape[1] == q.shape[1]:
        return Attended(found, sums)
    attended = Attended.by_no_keys(q, v)
    attended.o[:, call.queries], attended.lse[:, :, call.queries] = found, sums
    return attended


def attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    span: Span,
    key_start: int,
    scale: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, as `zeco_train.ops.softmax.attention.attend_backward`."""
    call, batch = span.call(key_start, key_start + k.shape[1]), q.shape[0]
    if call is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    queries, keys, values = _packed(q, call.queries), _packed(k, call.keys), _packed(v, call.keys)
    sums = attended.lse[:, :, call.queries].transpose(0, 1).flatten(1).contiguous()
    o, grad = _packed(attended.o, call.queries), _packed(do, call.queries)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    with _deterministic() if deterministic else contextlib.nullcontext():
        grads = torch.ops.aten._flash_attention_backward(
            grad, queries, keys, values, o, sums, *_lengths(call, batch, q.device), 0.0, call.causal, unused, unused,
            scale=scale, **_window(call),
        )  # fmt: skip
    dq, dk, dv = (
        _placed(found, part, like)
        for found, part, like in zip(grads, (call.queries, call.keys, call.keys), (q, k, v), strict=True)
    )
    return dq, dk, dv


# The kernel reads torch's global setting when it is launched; by default it adds up dq in any order.
@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Otherwise all its outputs and buffers are filled first.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


# [B, tokens, H, D] → [B · tokens of the part, H, D], at multiples of 16 bytes, as the kernel takes for granted.
def _packed(x: Tensor, part: slice) -> Tensor:
    return dense(x[:, part]).flatten(0, 1)


# [B · tokens of the part, H, D] → [B, tokens, H, D], 0 beside the part.
def _placed(found: Tensor, part: slice, like: Tensor) -> Tensor:
    found = found.unflatten(0, (like.shape[0], -1))
    if found.shape[1] == like.shape[1]:
        return found
    whole = torch.zeros_like(like)
    whole[:, part] = found
    return whole


def _lengths(call: KernelCall, batch: int, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    stream = torch.cuda.current_stream(device).cuda_stream
    queries, keys = (_borders(borders, batch, device, stream) for borders in (call.query_borders, call.key_borders))
    return queries[0], keys[0], queries[1], keys[1]


# int32 borders of the sequences of all rows on a device, and the length of the longest. A step's layers and passes have
# the same few: one for each span of queries and each block of keys. `stream` is the device's current one: the copy runs
# on it and nothing waits for the copy, so the kernels of another stream, as in the capture of a CUDA graph, need their
# own.
@functools.lru_cache(maxsize=256)
def _borders(of_row: tuple[int, ...], batch: int, device: torch.device, stream: int) -> tuple[Tensor, int]:
    rows = [row * of_row[-1] + border for row in range(batch) for border in of_row[bool(row) :]]
    # Pinned: a copy from pageable memory would wait for the device's queued work.
    copied = torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
    return copied, max(b - a for a, b in itertools.pairwise(of_row))


def _window(call: KernelCall) -> dict[str, Any]:
    if call.left < 0:
        return {}
    return {"window_size_left": call.left, "window_size_right": 0 if call.causal else -1}
