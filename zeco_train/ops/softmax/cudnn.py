"""The attention of a span to consecutive keys by cuDNN, for bf16 on GPUs from Hopper on.

cuDNN computes a graph of operations, which NVIDIA's package `cudnn` (nvidia-cudnn-frontend) describes; torch brings the
library itself. A graph is built once for each layout, in about 0.1 s. So few layouts are used: sequences of one length
that is a multiple of 128 are a batch. All others lie one behind the other, and their number and the longest length are
rounded up to powers of 2, with empty sequences at the end.

Backward passes are fast only with the first query of a sequence aligned with its first key: aligned as a `KernelCall`,
they take twice as long on an H100, with a window ten times. So a span's own keys and those before it are two calls.

What it is not used for: gradients that are added up in one order, for which it keeps all scores, 9 GB for 16 heads and
16,384 tokens; and tensors of 2^31 elements, where its gradients are wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
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
_MOST = 2**31 - 1
_LOCK = threading.Lock()


def serves(target: Target) -> bool:
    """Whether a GPU takes cuDNN, or FlashAttention 2."""
    return target.architecture >= _LEAST_ARCHITECTURE and missing(target) is None


@functools.cache
def missing(target: Target) -> str | None:
    """What a GPU lacks for cuDNN that others of its kind have; None: nothing."""
    if target.architecture < _LEAST_ARCHITECTURE or importlib.util.find_spec("cudnn") is not None:
        return None
    return f"FlashAttention 2, 0.6 times as fast as cuDNN, since the package {PACKAGE} is not installed"


def is_countable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the elements of each tensor, and what lies between them, and those of o are fewer than 2^31."""
    spans = (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in (q, k, v))
    return max(*spans, q.shape[:3].numel() * v.shape[3]) < _MOST


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
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, key_start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, as `zeco_train.ops.softmax.attention.attend_backward`."""
    grads: list[Tensor] | None = None
    for call in _calls(span, key_start, k.shape[1]):
        parts = call.queries, call.keys, call.keys
        of_call = Attended(attended.o[:, call.queries], attended.lse[:, :, call.queries])
        operands = q[:, call.queries], k[:, call.keys], v[:, call.keys]
        found = _backward(do[:, call.queries], of_call, operands, call, scale)
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
    for first, stop in ((max(span.start, key_start), key_stop), (key_start, min(span.start, key_stop))):
        call = span.call(first, stop) if first < stop else None
        if call is not None:
            moved = first - key_start
            yield call._replace(keys=slice(call.keys.start + moved, call.keys.stop + moved))


class _Operand(NamedTuple):
    # [sequences, heads, tokens, channels] of a graph.
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    side: int | None  # tokens are 0: queries, 1: keys, one sequence behind the other; None: they are a batch


class _Graph(NamedTuple):
    # What a graph is built for.
    device: int
    operands: tuple[_Operand, ...]  # q, k, v, o, log-sum-exp; of a backward pass also do, dq, dk, dv
    is_causal: bool
    left: int | None  # a query reads keys from this many before the one aligned with it on, itself counted
    scale: float
    totals: tuple[int, ...] = ()  # most tokens of queries and keys, of a backward pass where they lie so

    @property
    def is_backward(self) -> bool:
        return len(self.operands) > 5


class _Plan(NamedTuple):
    graph: _Graph
    lengths: tuple[tuple[int, ...], ...] = ()  # of the sequences of queries and of keys that lie one behind the other
    tokens: tuple[int, ...] = ()  # then of each operand: elements from token to token


# Of `_Graph.operands`, whose tokens are queries (0) or keys (1).
_SIDES = 0, 1, 1, 0, 0, 0, 0, 1, 1
_SUMS = 4


def _forward(q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float) -> Attended:
    batch, num_queries, heads, _ = q.shape
    o = q.new_empty(batch, num_queries, heads, v.shape[3])
    count = _count_of_batch(call, batch)
    shape = (batch, num_queries, heads) if count is None else (count, heads, batch * num_queries // count)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    _execute((q, k, v, o, sums), call, scale)
    lse = sums.mT if count is None else sums.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2)
    return Attended(o, lse)


def _backward(
    do: Tensor, attended: Attended, operands: tuple[Tensor, Tensor, Tensor], call: KernelCall, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    (o, lse), (q, k, v) = attended, operands
    count = _count_of_batch(call, q.shape[0])
    if count is None:
        sums = lse.mT.contiguous()
    else:
        sums = lse.unflatten(2, (count // q.shape[0], -1)).transpose(1, 2).flatten(0, 1).contiguous()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _execute((q, k, v, o, sums, do, dq, dk, dv), call, scale)
    return dq, dk, dv


# How many sequences are a batch, with log-sum-exps [sequences, H, length]; None: they lie one behind the other, with
# log-sum-exps [B, N, H].
@functools.lru_cache(maxsize=1024)
def _count_of(query_borders: tuple[int, ...], key_borders: tuple[int, ...], batch: int) -> int | None:
    lengths = [{b - a for a, b in itertools.pairwise(borders)} for borders in (query_borders, key_borders)]
    is_even = all(len(each) == 1 and next(iter(each)) % _STEP == 0 for each in lengths)
    documents = len(query_borders) - 1
    return batch * documents if is_even and 1 in (batch, documents) else None


def _count_of_batch(call: KernelCall, batch: int) -> int | None:
    return _count_of(call.query_borders, call.key_borders, batch)


def _execute(tensors: Sequence[Tensor], call: KernelCall, scale: float) -> None:
    is_batch = _count_of_batch(call, tensors[0].shape[0]) is not None
    # The gradients of sequences one behind the other are wrong, or end the process, where operands are not packed.
    is_packed = not is_batch and len(tensors) > 5
    # Log-sum-exps of one sequence of a batch may lie anywhere.
    is_sums = [x.dim() == 3 and x.data_ptr() % _ALIGNMENT == 0 for x in tensors]
    tensors = [x if sums else _readable(x, is_batch, is_packed) for x, sums in zip(tensors, is_sums, strict=True)]
    layouts = tuple((x.shape, x.stride()) for x in tensors)
    plan = _plan(layouts, tensors[0].device.index, call.query_borders, call.key_borders, call.causal, call.left, scale)
    _run(plan, tensors)


# Channels side by side; tokens, heads and the tensor itself at multiples of 16 bytes; rows of the batch one behind the
# other, if sequences are. With `is_packed`, tokens and heads, too.
def _readable(x: Tensor, is_batch: bool, is_packed: bool) -> Tensor:
    steps = x.stride()[:-1]
    is_aligned = not any(number % _ALIGNMENT for number in (x.data_ptr(), *(step * x.itemsize for step in steps)))
    is_joined = is_batch or 1 in x.shape[:2] or steps[0] == x.shape[1] * steps[1]
    serves = x.stride(-1) == 1 and is_aligned and is_joined and (x.is_contiguous() or not is_packed)
    return x if serves else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _plan(
    layouts: tuple[tuple[Sequence[int], Sequence[int]], ...],
    device: int,
    query_borders: tuple[int, ...],
    key_borders: tuple[int, ...],
    causal: bool,
    left: int,
    scale: float,
) -> _Plan:
    batch, borders = layouts[0][0][0], (query_borders, key_borders)
    # Counted from the last query and key; from the first ones on it is as much less as keys are more.
    moved = 0 if causal else key_borders[-1] - query_borders[-1]
    mask = causal, None if left < 0 else left + 1 - moved, scale
    lengths = tuple(tuple(b - a for a, b in itertools.pairwise(each)) * batch for each in borders)
    if _count_of(*borders, batch) is not None:
        batched = (_of_batch(*layout, lengths[side][0]) for layout, side in zip(layouts, _SIDES, strict=False))
        return _Plan(_Graph(device, tuple(batched), *mask))
    longest = [_power_of_2(max(_STEP, *each)) for each in lengths]
    count = _power_of_2(len(lengths[0]))
    operands = tuple(
        _of_tokens(*layout, side, count, longest[side]) for layout, side in zip(layouts, _SIDES, strict=False)
    )
    totals = tuple(_rounded(sum(each)) for each in lengths) if len(layouts) > 5 else ()
    tokens = tuple(operand.strides[2] for operand in operands)
    return _Plan(_Graph(device, operands, *mask, totals), lengths, tokens)


# [B, T, H, D], or the sums [sequences, H, length], as sequences of one length.
def _of_batch(shape: Sequence[int], strides: Sequence[int], length: int) -> _Operand:
    if len(shape) == 3:
        return _Operand((*shape, 1), (*strides, 1), None)
    batch, tokens, heads, channels = shape
    sequence = strides[0] if tokens == length else length * strides[1]
    return _Operand((batch * tokens // length, heads, length, channels), (sequence, strides[2], strides[1], 1), None)


# [B, T, H, D], or the sums [B, T, H], as tokens of sequences one behind the other.
def _of_tokens(shape: Sequence[int], strides: Sequence[int], side: int, count: int, longest: int) -> _Operand:
    # A step over a dimension of size 1 may be any number.
    token = strides[1] if shape[1] > 1 else strides[0] if shape[0] > 1 else math.prod(shape[2:])
    dims = count, shape[2], longest, shape[3] if len(shape) == 4 else 1
    return _Operand(dims, (longest * token, strides[2], token, 1), side)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


# Up by an eighth at most.
def _rounded(tokens: int) -> int:
    step = max(_STEP, _power_of_2(tokens) // 16)
    return -(-tokens // step) * step


def _run(plan: _Plan, tensors: Sequence[Tensor]) -> None:
    import cudnn  # late: only GPUs need it

    device = tensors[0].device
    with _LOCK, torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        built, names, size = _built(plan.graph)
        pack = list(tensors)
        if plan.lengths:
            count = plan.graph.operands[0].dims[0]
            pack += [_lengths(each, count, device, stream) for each in plan.lengths]
            pack += [
                _offsets(plan.lengths[side], count, token, device, stream)
                for side, token in zip(_SIDES, plan.tokens, strict=False)
            ]
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        handle = _handle(device.index)
        cudnn.set_stream(handle, stream)
        built.execute(
            {name: x.data_ptr() for name, x in zip(names, pack, strict=True)}, workspace.data_ptr(), handle=handle
        )


# One for each device, used under the lock.
@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    return cudnn.create_handle()


# The graph, the numbers of its tensors in the order of `_run`, and the bytes of its workspace.
@functools.lru_cache(maxsize=512)
def _built(graph: _Graph) -> tuple[Any, list[int], int]:
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
    extra: list[Any] = []
    offsets: list[Any] = [None] * len(graph.operands)
    if graph.operands[0].side is not None:
        count = graph.operands[0].dims[0]
        lengths = [_integers(built, count, cudnn.data_type.INT32) for _ in range(2)]
        offsets = [_integers(built, count + 1, cudnn.data_type.INT64) for _ in graph.operands]
        options |= {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
        extra = [*lengths, *offsets]
    if graph.totals:
        options |= {"max_total_seq_len_q": graph.totals[0], "max_total_seq_len_kv": graph.totals[1]}

    def laid_out(tensor: Any, index: int) -> Any:
        operand = graph.operands[index]
        tensor.set_dim(list(operand.dims)).set_stride(list(operand.strides))
        tensor.set_data_type(cudnn.data_type.FLOAT if index == _SUMS else cudnn.data_type.BFLOAT16)
        return tensor if offsets[index] is None else tensor.set_ragged_offset(offsets[index])

    num_inputs = 6 if graph.is_backward else 3
    inputs = [built.tensor(dim=list(x.dims), stride=list(x.strides)) for x in graph.operands[:num_inputs]]
    inputs = [laid_out(tensor, index) for index, tensor in enumerate(inputs)]
    if graph.is_backward:
        q, k, v, o, sums, do = inputs
        outputs = built.sdpa_backward(q=q, k=k, v=v, o=o, dO=do, stats=sums, **options)
    else:
        q, k, v = inputs
        outputs = built.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    outputs = [laid_out(tensor.set_output(True), num_inputs + index) for index, tensor in enumerate(outputs)]
    built.validate()
    built.build_operation_graph()
    built.create_execution_plans([cudnn.heur_mode.A])
    built.check_support()
    built.build_plans()
    return built, [tensor.get_uid() for tensor in (*inputs, *outputs, *extra)], built.get_workspace_size()


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
