"""The short convolution's Triton kernels, their launches and the passes on them, for inputs up to fp32.

Tokens are counted from the shard's first one; the received inputs are tokens −(W − 1) … −1, of piece 0.

The two kernels over all tokens have programs of BC channels and a run of tokens, a few channels a thread. They walk the
run in steps of ROWS tokens with the W − 1 rows around the step in registers. So each element is read once, except the
W − 1 rows between two runs; the loads of a step are issued together, which keeps enough bytes on their way; and sums
over a run's tokens need no other thread. The kernels of the few tokens at the shard's ends compute one tile.

Tensors over tokens [B, T, C] have strides, with channels side by side; states [B, 1, W − 1, C] are contiguous. Sums
are fp32.

The kernels also run on a CPU under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit, next_power_of_2
from zeco_train.ops.hgrn.kernels import append, run_of_program
from zeco_train.ops.kept import RunOptions
from zeco_train.ops.passes import Passes, check_state
from zeco_train.ops.short_conv.passes import PlainBackward, PlainForward


@jit
def outputs_kernel(
    x,  # [B, T, C]
    weight,  # [C, 1, W]
    bias,  # [C]
    incoming,  # [B, 1, W - 1, C] fp32, if RECEIVED
    doc_ids,  # [T] int32, if DOCUMENTS
    y,  # [B, T, C], contiguous, written
    x_batch,
    x_token,
    run,  # tokens of a program, a multiple of ROWS
    last,  # tokens to compute
    T,
    C,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    RECEIVED: tl.constexpr,
):
    """Compute y of the first `last` tokens, from zeros or, in a single run, from the received inputs."""
    channels, columns, first, batch = run_of_program(run, C, BC)
    x_of, y_of = x + batch * x_batch + channels, y + batch * T * C + channels
    shift = tl.load(bias + channels, mask=columns, other=0.0).to(tl.float32)
    # The W - 1 inputs before a step and their doc_ids, oldest first; each step adds its own.
    taps, inputs, marks = (), (), ()
    for tap in tl.static_range(W):
        taps = append(taps, tl.load(weight + channels * W + tap, mask=columns, other=0.0).to(tl.float32))
    for row in tl.static_range(W - 1):
        source = first + (row - (W - 1))
        if RECEIVED:
            before = tl.load(incoming + (batch * (W - 1) + row) * C + channels, mask=columns, other=0.0)
        else:
            before = tl.load(x_of + source * x_token, mask=columns & (source >= 0), other=0.0)
        inputs = append(inputs, before.to(tl.float32))
        if DOCUMENTS:
            marks = append(marks, tl.load(doc_ids + source, mask=source >= 0, other=0))
    for start in range(first, tl.minimum(first + run, last), ROWS):
        for row in tl.static_range(ROWS):
            token = start + row
            value = tl.load(x_of + token * x_token, mask=columns & (token < last), other=0.0)
            inputs = append(inputs, value.to(tl.float32))
            if DOCUMENTS:
                marks = append(marks, tl.load(doc_ids + token, mask=token < last, other=0))
        for row in tl.static_range(ROWS):
            total = shift
            for tap in tl.static_range(W):
                value = inputs[row + tap]
                if DOCUMENTS and tap < W - 1:
                    value = tl.where(marks[row + tap] == marks[row + W - 1], value, 0.0)
                total += value * taps[tap]
            token = start + row
            tl.store(y_of + token * C, total.to(y.dtype.element_ty), mask=columns & (token < last))
        inputs, marks = _next_rows(inputs, marks, W, ROWS, DOCUMENTS)


@jit
def _next_rows(rows, marks, W: tl.constexpr, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The last W - 1 rows of a step, with which the next one begins, and their doc_ids."""
    kept, kept_marks = (), ()
    for row in tl.static_range(W - 1):
        kept = append(kept, rows[ROWS + row])
        if DOCUMENTS:
            kept_marks = append(kept_marks, marks[ROWS + row])
    return kept, kept_marks


@jit
def grads_kernel(
    do,  # [B, T, C]
    weight,  # [C, 1, W]
    doc_ids,  # [T] int32, if DOCUMENTS
    x,  # [B, T, C]
    dx,  # [B, T, C], contiguous, written
    sums,  # [B, runs, W + 1, C] fp32, written: parts of dweight[:, 0, j] in row j, of dbias in row W
    do_batch,
    do_token,
    x_batch,
    x_token,
    run,  # tokens of a program, a multiple of ROWS
    T,
    C,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute dx with zeros after the shard, and the run's part of dweight and dbias, without the received inputs."""
    channels, columns, first, batch = run_of_program(run, C, BC)
    do_of, x_of, dx_of = do + batch * do_batch + channels, x + batch * x_batch + channels, dx + batch * T * C + channels
    # do of a step's first W - 1 tokens and their doc_ids; each step adds as many as it has tokens.
    taps, totals, grads, marks = (), (), (), ()
    for tap in tl.static_range(W):
        taps = append(taps, tl.load(weight + channels * W + tap, mask=columns, other=0.0).to(tl.float32))
    for _ in tl.static_range(W + 1):
        totals = append(totals, tl.zeros((BC,), tl.float32))
    for row in tl.static_range(W - 1):
        token = first + row
        grads = append(grads, tl.load(do_of + token * do_token, mask=columns & (token < T), other=0.0).to(tl.float32))
        if DOCUMENTS:
            marks = append(marks, tl.load(doc_ids + token, mask=token < T, other=0))
    for start in range(first, tl.minimum(first + run, T), ROWS):
        values = ()
        for row in tl.static_range(ROWS):
            token = start + row
            value = tl.load(x_of + token * x_token, mask=columns & (token < T), other=0.0)
            values = append(values, value.to(tl.float32))
            token = start + (row + W - 1)
            grad = tl.load(do_of + token * do_token, mask=columns & (token < T), other=0.0)
            grads = append(grads, grad.to(tl.float32))
            if DOCUMENTS:
                marks = append(marks, tl.load(doc_ids + token, mask=token < T, other=0))
        for row in tl.static_range(ROWS):
            total = tl.zeros((BC,), tl.float32)
            # Rows of tokens after the shard are zeros, and so are their parts of the sums.
            parts = ()
            for tap in tl.static_range(W):
                grad = grads[row + W - 1 - tap]
                if DOCUMENTS and tap < W - 1:
                    grad = tl.where(marks[row + W - 1 - tap] == marks[row], grad, 0.0)
                total += grad * taps[tap]
                parts = append(parts, totals[tap] + grad * values[row])
            totals = append(parts, totals[W] + grads[row])
            token = start + row
            tl.store(dx_of + token * C, total.to(dx.dtype.element_ty), mask=columns & (token < T))
        grads, marks = _next_rows(grads, marks, W, ROWS, DOCUMENTS)
    of_run = sums + (batch * tl.num_programs(1) + tl.program_id(1)) * (W + 1) * C + channels
    for row in tl.static_range(W + 1):
        tl.store(of_run + row * C, totals[row], mask=columns)


@jit
def _grads_of(
    do, weight, doc_ids, batch, tokens, channels, do_batch, do_token, T, C, W: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Gradients dx of a tile of tokens, in fp32, with zeros after the shard; tokens before the shard are of piece 0."""
    columns = channels < C
    total = tl.zeros((tokens.shape[0], channels.shape[0]), tl.float32)
    if DOCUMENTS:
        piece = tl.load(doc_ids + tokens, mask=(tokens >= 0) & (tokens < T), other=0)
    for lag in tl.static_range(W):
        target = tokens + lag
        seen = (target >= 0) & (target < T)
        if DOCUMENTS:
            seen = seen & (tl.load(doc_ids + target, mask=seen, other=-1) == piece)
        offsets = batch * do_batch + target[:, None] * do_token + channels[None, :]
        grad = tl.load(do + offsets, mask=seen[:, None] & columns[None, :], other=0.0).to(tl.float32)
        tap = tl.load(weight + channels * W + (W - 1 - lag), mask=columns, other=0.0).to(tl.float32)
        total += grad * tap[None, :]
    return total


@jit
def received_grads_kernel(
    do,  # [B, T, C]
    weight,  # [C, 1, W]
    doc_ids,  # [T] int32, if DOCUMENTS
    grads,  # [B, 1, W - 1, C] fp32, D_loc, written
    do_batch,
    do_token,
    T,
    C,
    W: tl.constexpr,
    ROWS: tl.constexpr,  # a power of 2 from W - 1 on
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute D_loc, dx of the received inputs."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    tokens = rows.to(tl.int64) - (W - 1)
    total = _grads_of(do, weight, doc_ids, batch, tokens, channels, do_batch, do_token, T, C, W, DOCUMENTS)
    offsets = (batch * (W - 1) + rows)[:, None] * C + channels[None, :]
    tl.store(grads + offsets, total, mask=(rows < W - 1)[:, None] & (channels < C)[None, :])


@jit
def last_grads_kernel(
    do,  # [B, T, C]
    weight,  # [C, 1, W]
    doc_ids,  # [T] int32, if DOCUMENTS
    incoming,  # [B, 1, W - 1, C] fp32, R
    incoming_grad,  # [B, 1, W - 1, C] fp32, D_in
    sums,  # [parts, W + 1, C] fp32, of grads_kernel
    dx,  # [B, T, C], contiguous, the last W - 1 tokens are written
    dweight,  # [C, 1, W], written
    dbias,  # [C], written
    do_batch,
    do_token,
    parts,
    B,
    T,
    C,
    W: tl.constexpr,
    ROWS: tl.constexpr,  # a power of 2 from W - 1 on
    PARTS: tl.constexpr,  # rows of `sums` in a tile
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Complete all gradients: W programs for dweight, one for dbias, then B for dx of the last tokens, by channels."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    columns = (channels < C)[None, :]
    tap = tl.program_id(1)
    if tap <= W:
        total = tl.zeros((PARTS, BC), tl.float32)
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)
            offsets = (part.to(tl.int64) * (W + 1) + tap)[:, None] * C + channels[None, :]
            total += tl.load(sums + offsets, mask=(part < parts)[:, None] & columns, other=0.0)
        # The received inputs: row r of R is token r - (W - 1), seen by the token W - 1 - tap after it.
        for start in range(0, B * (W - 1), PARTS):
            row = (start + tl.arange(0, PARTS)).to(tl.int64)
            target = row % (W - 1) - tap
            seen = (row < B * (W - 1)) & (target >= 0) & (target < T)
            if DOCUMENTS:
                seen = seen & (tl.load(doc_ids + target, mask=seen, other=-1) == 0)
            mask = seen[:, None] & columns
            offsets = (row // (W - 1) * do_batch + target * do_token)[:, None] + channels[None, :]
            value = tl.load(incoming + row[:, None] * C + channels[None, :], mask=mask, other=0.0)
            total += value * tl.load(do + offsets, mask=mask, other=0.0).to(tl.float32)
        result = tl.sum(total, axis=0)
        if tap < W:
            tl.store(dweight + channels * W + tap, result.to(dweight.dtype.element_ty), mask=channels < C)
        else:
            tl.store(dbias + channels, result.to(dbias.dtype.element_ty), mask=channels < C)
    else:
        batch = (tap - (W + 1)).to(tl.int64)
        rows = tl.arange(0, ROWS)
        tokens = rows.to(tl.int64) + (T - (W - 1))
        inside = (rows < W - 1) & (tokens >= 0)
        kept = inside
        if DOCUMENTS:
            kept = kept & (tl.load(doc_ids + tokens, mask=inside, other=-1) == tl.load(doc_ids + T - 1))
        offsets = (batch * (W - 1) + rows)[:, None] * C + channels[None, :]
        grads = tl.load(incoming_grad + offsets, mask=kept[:, None] & columns, other=0.0).to(tl.float32)
        grads += _grads_of(do, weight, doc_ids, batch, tokens, channels, do_batch, do_token, T, C, W, DOCUMENTS)
        offsets = (batch * T + tokens)[:, None] * C + channels[None, :]
        tl.store(dx + offsets, grads.to(dx.dtype.element_ty), mask=inside[:, None] & columns)


# Four channels a thread: a load is 8 bytes in bf16, 16 in fp32. A program reads w − 1 tokens more than its own.
OUTPUTS = RunOptions(rows=8, channels=128, programs=4096, shortest=64)
GRADS = RunOptions(rows=8, channels=128, programs=2048, shortest=64)

# The tiles of tokens at the ends of a shard, and of partial sums.
_CHANNELS = 32
_PARTS = 32


def _side_by_side(x: Tensor) -> Tensor:
    # A part of a projection's output has its channels side by side already.
    return x if x.stride(2) == 1 else x.contiguous()


class _ShortConvForward(PlainForward):
    def overlap(self) -> None:
        self._y = torch.empty_like(self._x, memory_format=torch.contiguous_format)
        self._convolve(None, OUTPUTS.run(*self._x.shape), self._x.shape[1])

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self.state.shape)
        last = min(self._x.shape[1], self._rows)
        # The received inputs precede the first run, so there is one.
        self._convolve(incoming_state.contiguous(), cdiv(last, OUTPUTS.rows) * OUTPUTS.rows, last)
        return self._y

    # y of the first `last` tokens, in runs of so many, with zeros or the received inputs before the shard.
    def _convolve(self, incoming: Tensor | None, run: int, last: int) -> None:
        x, doc_ids = _side_by_side(self._x), self.doc_ids
        (B, T, C), W = x.shape, self._rows + 1
        outputs_kernel[(cdiv(C, OUTPUTS.channels), cdiv(last, run), B)](
            x, self._weight.contiguous(), self._bias.contiguous(), incoming, doc_ids, self._y,
            x.stride(0), x.stride(1), run, last, T, C, W=W, ROWS=OUTPUTS.rows, BC=OUTPUTS.channels,
            DOCUMENTS=doc_ids is not None, RECEIVED=incoming is not None, num_warps=1,
        )  # fmt: skip


class _ShortConvBackward(PlainBackward):
    def _received_grads(self) -> Tensor:
        do, grads = _side_by_side(self.do), torch.empty_like(self.received, memory_format=torch.contiguous_format)
        B, T, C = do.shape
        received_grads_kernel[(cdiv(C, _CHANNELS), B)](
            do, self._weight.contiguous(), self.doc_ids, grads, do.stride(0), do.stride(1), T, C, W=self._rows + 1,
            ROWS=next_power_of_2(self._rows), BC=_CHANNELS, DOCUMENTS=self.doc_ids is not None, num_warps=1,
        )  # fmt: skip
        return grads

    def overlap(self) -> None:
        x, do, walk = _side_by_side(self._x), _side_by_side(self.do), GRADS
        (B, T, C), W, run = x.shape, self._rows + 1, walk.run(*x.shape)
        runs = cdiv(T, run)
        self._dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        # Parts of dweight[:, 0, j] in row j, of dbias in row w, without the received inputs.
        self._sums = torch.empty(B * runs, W + 1, C, dtype=torch.float32, device=x.device)
        grads_kernel[(cdiv(C, walk.channels), runs, B)](
            do, self._weight.contiguous(), self.doc_ids, x, self._dx, self._sums,
            do.stride(0), do.stride(1), x.stride(0), x.stride(1), run, T, C,
            W=W, ROWS=walk.rows, BC=walk.channels, DOCUMENTS=self.doc_ids is not None, num_warps=1,
        )  # fmt: skip

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        do, weight, W = _side_by_side(self.do), self._weight.contiguous(), self._rows + 1
        B, T, C = do.shape
        dweight, dbias = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self._weight, self._bias)
        )
        # One launch for the last tokens and the sums, always in the same order: a launch costs the host more than the
        # device.
        last_grads_kernel[(cdiv(C, _CHANNELS), W + 1 + B)](
            do, weight, self.doc_ids, self.received.contiguous(), incoming_grad.contiguous(), self._sums,
            self._dx, dweight, dbias, do.stride(0), do.stride(1), self._sums.shape[0], B, T, C, W=W,
            ROWS=next_power_of_2(W - 1), PARTS=_PARTS, BC=_CHANNELS, DOCUMENTS=self.doc_ids is not None,
            num_warps=4,
        )  # fmt: skip
        return self._dx, dweight, dbias


CUDA = Passes(_ShortConvForward, _ShortConvBackward)
