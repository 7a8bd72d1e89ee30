"""The attention of a span to consecutive keys by cuDNN, for bf16 on GPUs from Hopper on.

cuDNN computes a graph of operations, which NVIDIA's package `cudnn` (nvidia-cudnn-frontend) describes; torch brings the
library itself. A graph is built once for each layout, in about 0.1 s. So few layouts are used: sequences of one length
that is a multiple of 128 are a batch. All others lie one behind the other, and their number and the longest length are
rounded up to powers of 2, with empty sequences at the end.

Backward passes are fast only with the first query of a sequence aligned with its first key: aligned as a `KernelCall`,
they take twice as long on an H100, with a window ten times. So a span's own keys and those before it are two calls.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeco_train.ops.operator import Target
from zeco_train.ops.softmax.span import Attended, KernelCall, Span

PACKAGE = "nvidia-cudnn-frontend"
# Of GPUs on which its kernels were measured.
_LEAST_ARCHITECTURE = (9, 0)
# Lengths in steps of it have graphs of their own.
_STEP = 128
# cuDNN reads 16 bytes at a time.
_ALIGNMENT = 16
_LOCK = threading.Lock()


@functools.cache
def problem(target: Target) -> str | None:
    """Why a GPU takes FlashAttention 2 instead; None: it takes cuDNN."""
    if target.architecture < _LEAST_ARCHITECTURE:
        return (
            f"cuDNN's attention is for compute capability {_LEAST_ARCHITECTURE[0]}.{_LEAST_ARCHITECTURE[1]} and later"
        )
    if importlib.util.find_spec("cudnn") is None:
        return f"the package {PACKAGE} is not installed"
    return None


def version() -> str:
    """Of the package, as in `cudnn 1.18.0`."""
    return f"cudnn {importlib.metadata.version(PACKAGE)}"


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, key_start: int, scale: float) -> Attended:
    """The attention of a span, as `zeco_train.ops.softmax.attention.attend`."""
    found: Attended | None = None
    for call in _calls(span, key_start, k.shape[1]):
        part = _forward(q[:, call.queries], k[:, call.keys], v[:, call.keys], call, scale)
        if found is None and part.o.shape == (*q.shape[:3], v.shape[3]):
            found = part
            continue
        found = Attended.by_no_keys(q, v) if found is None else found
        before = Attended(found.o[:, call.queries], found.lse[:, :, call.queries])
        o, lse = Attended.merged(before, part)
        found.o[:, call.queries], found.lse[:, :, call.queries] = o.to(q.dtype), lse
    return Attended.by_no_keys(q, v) if found is None else found


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
    grads: list[Tensor] | None = None
    for call in _calls(span, key_start, k.shape[1]):
        parts = call.queries, call.keys, call.keys
        operands = [x[:, part] for x, part in zip((q, k, v), parts, strict=True)]
        of_queries = do[:, call.queries], attended.o[:, call.queries], attended.lse[:, :, call.queries]
        found = _backward(*of_queries, *operands, call, scale, deterministic)
        if grads is None and [x.shape for x in found] == [x.shape for x in (q, k, v)]:
            grads = list(found)
            continue
        grads = [torch.zeros_like(x) for x in (q, k, v)] if grads is None else grads
        for grad, part, share in zip(grads, parts, found, strict=True):
            grad[:, part] += share
    dq, dk, dv = [torch.zeros_like(x) for x in (q, k, v)] if grads is None else grads
    return dq, dk, dv


# The span's own keys, and those before it.
def _calls(span: Span, key_start: int, num_keys: int) -> Iterator[KernelCall]:
    key_stop = key_start + num_keys
    for first, stop in ((span.start, key_stop), (key_start, min(span.start, key_stop))):
        call = span.call(first, stop) if max(first, key_start) < stop else None
        if call is not None:
            moved = first - key_start
            yield call._replace(keys=slice(call.keys.start + moved, call.keys.stop + moved))


class _Layout(NamedTuple):
    # Of the sequences of a call, over all rows of the batch.
    count: int
    queries: int  # of the longest
    keys: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None  # of queries and keys; None: all are as long


class _Operand(NamedTuple):
    # [sequences, heads, tokens, channels] of a graph.
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    side: int | None  # tokens are 0: queries, 1: keys, one sequence behind the other; None: they are a batch


class _Graph(NamedTuple):
    # What a graph is built for.
    device: int
    operands: tuple[_Operand, ...]  # q, k, v, o, log-sum-exp; do, dq, dk, dv
    totals: tuple[int, ...]  # most tokens of queries and keys in all, of a backward pass over such sequences
    is_causal: bool
    left: int | None  # a query reads keys from this many before the one aligned with it on, itself counted
    scale: float
    deterministic: bool

    @property
    def is_backward(self) -> bool:
        return len(self.operands) > 5


def _layout(call: KernelCall, batch: int) -> _Layout:
    queries, keys = ([b - a for a, b in itertools.pairwise(x)] for x in (call.query_borders, call.key_borders))
    count = batch * len(queries)
    if (
        len({*queries}) == len({*keys}) == 1
        and queries[0] % _STEP == keys[0] % _STEP == 0
        and 1 in (batch, len(queries))
    ):
        return _Layout(count, queries[0], keys[0], None)
    longest = (_power_of_2(max(_STEP, *x)) for x in (queries, keys))
    return _Layout(_power_of_2(count), *longest, (tuple(queries * batch), tuple(keys * batch)))


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


# Up by an eighth at most.
def _rounded(tokens: int) -> int:
    step = max(_STEP, _power_of_2(tokens) // 16)
    return -(-tokens // step) * step


def _forward(q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float) -> Attended:
    batch, num_queries, heads, _ = q.shape
    layout = _layout(call, batch)
    o = q.new_empty(batch, num_queries, heads, v.shape[3])
    lse = _new_sums(layout, q)
    _execute(call, layout, (q, k, v, o, lse), (0, 1, 1, 0, 0), scale, False)
    return Attended(o, lse if layout.lengths is None else lse.mT)


def _backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: KernelCall,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _layout(call, q.shape[0])
    sums = (lse if layout.lengths is None else lse.mT).contiguous()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    tensors = q, k, v, o, sums, do, dq, dk, dv
    _execute(call, layout, tensors, (0, 1, 1, 0, 0, 0, 0, 1, 1), scale, deterministic)
    return dq, dk, dv


# [B, H, N], or [B, N, H] for sequences one behind the other.
def _new_sums(layout: _Layout, q: Tensor) -> Tensor:
    batch, num_queries, heads, _ = q.shape
    shape = (heads, num_queries) if layout.lengths is None else (num_queries, heads)
    return torch.empty(batch, *shape, dtype=torch.float32, device=q.device)


def _execute(
    call: KernelCall,
    layout: _Layout,
    tensors: Sequence[Tensor],
    sides: Sequence[int],
    scale: float,
    deterministic: bool,
) -> None:
    q = tensors[0]
    tensors = [_readable(x, layout) if x.dim() == 4 else x for x in tensors]
    operands = [_operand(x, side, layout) for x, side in zip(tensors, sides, strict=True)]
    totals: tuple[int, ...] = 0, 0
    left = None if call.left < 0 else call.left + 1
    if not call.causal and left is not None:
        # Counted from the last query and key; from the first ones on it is as much less as keys are more.
        left -= call.key_borders[-1] - call.query_borders[-1]
    if layout.lengths is not None and len(tensors) > 5:
        totals = tuple(_rounded(sum(x)) for x in layout.lengths)
    graph = _Graph(q.device.index, tuple(operands), totals, call.causal, left, scale, deterministic)
    _run(graph, layout, tensors)


# Channels side by side; tokens, heads and the tensor itself at multiples of 16 bytes; rows of the batch one behind the
# other, if sequences are.
def _readable(x: Tensor, layout: _Layout) -> Tensor:
    steps = x.stride()[:-1]
    is_aligned = not any(number % _ALIGNMENT for number in (x.data_ptr(), *(step * x.itemsize for step in steps)))
    is_joined = layout.lengths is None or 1 in x.shape[:2] or steps[0] == x.shape[1] * steps[1]
    return x if x.stride(-1) == 1 and is_aligned and is_joined else x.clone(memory_format=torch.contiguous_format)


def _operand(x: Tensor, side: int, layout: _Layout) -> _Operand:
    most = (layout.queries, layout.keys)[side]
    if layout.lengths is None:
        if x.dim() == 3:
            # [B, H, N] as [sequences, H, length, 1]
            x = x.unflatten(2, (-1, most)).transpose(1, 2).flatten(0, 1).unsqueeze(-1)
        else:
            x = x.unflatten(1, (-1, most)).flatten(0, 1).transpose(1, 2)
        return _Operand(tuple(x.shape), x.stride(), None)
    # A step over a dimension of size 1 may be any number.
    heads, token, head = x.shape[2], x.stride(1 if x.shape[1] > 1 else 0), x.stride(2)
    channels = x.shape[3] if x.dim() == 4 else 1
    return _Operand((layout.count, heads, most, channels), (most * token, head, token, 1), side)


def _run(graph: _Graph, layout: _Layout, tensors: Sequence[Tensor]) -> None:
    import cudnn  # late: only GPUs need it

    device = tensors[0].device
    with torch.cuda.device(device), _LOCK:
        built, names, size = _built(graph)
        pack = list(tensors)
        if layout.lengths is not None:
            stream = torch.cuda.current_stream(device).cuda_stream
            pack += [_lengths(x, layout.count, device, stream) for x in layout.lengths]
            for operand in graph.operands:
                of_side = layout.lengths[operand.side or 0]
                pack.append(_offsets(of_side, layout.count, operand.strides[2], device, stream))
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        handle = _handle(device.index)
        cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
        built.execute(dict(zip(names, pack, strict=True)), workspace, handle=handle)


# One for each device, used under the lock.
@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    return cudnn.create_handle()


# The graph, its tensors in the order of `_run`, and the bytes of its workspace.
@functools.lru_cache(maxsize=512)
def _built(graph: _Graph) -> tuple[Any, list[Any], int]:
    import cudnn

    built = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(graph.device),
    )
    options: dict[str, Any] = {"attn_scale": graph.scale, "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT}
    if graph.is_causal:
        options["diagonal_band_right_bound"] = 0
    if graph.left is not None:
        options["diagonal_band_left_bound"] = graph.left
    if graph.is_backward:
        options["use_deterministic_algorithm"] = graph.deterministic
    lengths, offsets = [], [None] * len(graph.operands)
    is_packed = graph.operands[0].side is not None
    if is_packed:
        count = graph.operands[0].dims[0]
        lengths = [_integers(built, count, cudnn.data_type.INT32) for _ in range(2)]
        offsets = [_integers(built, count + 1, cudnn.data_type.INT64) for _ in graph.operands]
        options |= {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
        if graph.is_backward:
            options |= {"max_total_seq_len_q": graph.totals[0], "max_total_seq_len_kv": graph.totals[1]}

    def entry(index: int) -> Any:
        operand = graph.operands[index]
        dtype = cudnn.data_type.FLOAT if index == 4 else cudnn.data_type.BFLOAT16
        found = built.tensor(dim=list(operand.dims), stride=list(operand.strides), data_type=dtype)
        return found.set_ragged_offset(offsets[index]) if is_packed else found

    def result(found: Any, index: int) -> Any:
        operand = graph.operands[index]
        found.set_output(True).set_dim(list(operand.dims)).set_stride(list(operand.strides))
        if index == 4:
            found.set_data_type(cudnn.data_type.FLOAT)
        return found.set_ragged_offset(offsets[index]) if is_packed else found

    if graph.is_backward:
        entries = [entry(index) for index in range(6)]
        q, k, v, o, sums, do = entries
        grads = built.sdpa_backward(q=q, k=k, v=v, o=o, dO=do, stats=sums, **options)
        names = entries + [result(grad, 6 + index) for index, grad in enumerate(grads)]
    else:
        entries = [entry(index) for index in range(3)]
        q, k, v = entries
        found = built.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
        names = entries + [result(each, 3 + index) for index, each in enumerate(found)]
    built.validate()
    built.build_operation_graph()
    built.create_execution_plans([cudnn.heur_mode.A])
    built.check_support()
    built.build_plans()
    return built, [*names, *lengths, *(offsets if is_packed else [])], built.get_workspace_size()


def _integers(built: Any, count: int, dtype: Any) -> Any:
    return built.tensor(dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype)


# Copied once for all layers and passes, on the stream that reads them, which does not wait: see `flash._borders`.
@functools.lru_cache(maxsize=512)
def _lengths(lengths: tuple[int, ...], count: int, device: torch.device, stream: int) -> Tensor:
    padded = [*lengths, *[0] * (count - len(lengths))]
    return torch.tensor(padded, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


# [count + 1] int64: elements before each sequence, in a tensor with `token` elements from token to token.
@functools.lru_cache(maxsize=1024)
def _offsets(lengths: tuple[int, ...], count: int, token: int, device: torch.device, stream: int) -> Tensor:
    borders = [*itertools.accumulate(lengths, initial=0)]
    borders += borders[-1:] * (count - len(lengths))
    return (torch.tensor(borders, dtype=torch.int64) * token).pin_memory().to(device, non_blocking=True)
