"""The Triton kernels of the elementwise recurrence, their launches and the passes on them, for inputs up to fp32.

Forward                                                        Backward
  runs of tokens from zero → S_loc, G_tot                        runs of tokens from a zero end → D_loc
  | scan over ranks                                              | scan over ranks
  true states that runs start from; h                            true gradients that runs end with; dx, dg

The time is that of memory: x (do) and g are read twice, outputs are written once. Of the forward pass the true state
before every 16th token is saved, in fp32, in place of R: from it the backward pass computes h again, in registers. The
kernels also run on a CPU under Triton's interpreter.

A program has BC channels, a few of a thread, and walks over a run of tokens in steps of ROWS, whose loads are issued
together: that keeps enough bytes on their way, and no thread needs another. Programs of a later run begin with what
`starts_kernel` made of the summaries of the earlier ones, and with what came from other ranks.

Tensors over tokens are [B, T, C], over runs [B, runs, C], of the ends of a rank's tokens [B, C]; all are contiguous.
Sums are fp32. A restart is a log-decay of −inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit
from zeco_train.ops.kept import RunOptions
from zeco_train.ops.kernel_operands import dense
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state


@jit
def append(rows, row):
    """The tuple with one more member."""
    return rows + (row,)  # noqa: RUF005, Triton has no unpacking


@jit
def run_of_program(run, C, BC: tl.constexpr):
    """A program's channels, which of them there are, the first token of its run, and its sequence."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    return channels, channels < C, first, batch


@jit
def load_rows(x, start, T, C, columns, ROWS: tl.constexpr):
    """Rows of tokens from `start` on, in fp32; zeros after the last token."""
    rows = ()
    for row in tl.static_range(ROWS):
        token = start + row
        rows = append(rows, tl.load(x + token * C, mask=columns & (token < T), other=0.0).to(tl.float32))
    return rows


@jit
def _load_log_decays(g, doc_ids, start, T, C, columns, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Rows of log-decays, −inf at restarts; zeros after the last token."""
    rows = load_rows(g, start, T, C, columns, ROWS)
    if DOCUMENTS:
        marked = ()
        before = tl.load(doc_ids + start - 1, mask=start > 0, other=0)
        for row in tl.static_range(ROWS):
            piece = tl.load(doc_ids + start + row, mask=start + row < T, other=0)
            # There is none after the last token, where doc_ids count as 0.
            marked = append(marked, tl.where(piece > before, float("-inf"), rows[row]))
            before = piece
        rows = marked
    return rows


@jit
def summaries_kernel(
    x,  # [B, T, C], x; do if REVERSE
    g,  # [B, T, C] fp32
    doc_ids,  # [T] int32, if DOCUMENTS
    states,  # [B, runs, C] fp32, written
    log_decays,  # [B, runs, C] fp32, written
    run,  # tokens of a program, a multiple of ROWS
    T,
    C,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Compute each run's own state after its tokens, or the gradient for the state before them, and their decay."""
    channels, columns, first, batch = run_of_program(run, C, BC)
    offset = batch * T * C + channels
    state = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    steps = tl.cdiv(tl.minimum(first + run, T) - first, ROWS)
    for step in range(steps):
        start = first + (steps - 1 - step) * ROWS if REVERSE else first + step * ROWS
        values = load_rows(x + offset, start, T, C, columns, ROWS)
        logs = _load_log_decays(g + offset, doc_ids, start, T, C, columns, ROWS, DOCUMENTS)
        for row in tl.static_range(ROWS):
            if REVERSE:
                value, log = values[ROWS - 1 - row], logs[ROWS - 1 - row]
                state = tl.exp(log) * (state + value)
            else:
                value, log = values[row], logs[row]
                state = tl.exp(log) * state + value
            total += log
    of_run = (batch * tl.num_programs(1) + tl.program_id(1)) * C + channels
    tl.store(states + of_run, state, mask=columns)
    tl.store(log_decays + of_run, total, mask=columns)


@jit
def starts_kernel(
    states,  # [B, runs, C] fp32, of the runs; overwritten by what each starts from, or ends with, from zero
    log_decays,  # [B, runs, C] fp32, of the runs; overwritten by those of all runs before it, or after it
    state,  # [B, C] fp32, written
    log_decay,  # [B, C] fp32, written
    runs,
    C,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Join the runs' summaries."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    batch = tl.program_id(1).to(tl.int64)
    columns = channels < C
    offset = batch * runs * C + channels
    carried = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    steps = tl.cdiv(runs, ROWS)
    for step in range(steps):
        start = (steps - 1 - step) * ROWS if REVERSE else step * ROWS
        own = load_rows(states + offset, start, runs, C, columns, ROWS)
        logs = load_rows(log_decays + offset, start, runs, C, columns, ROWS)
        for row in tl.static_range(ROWS):
            if REVERSE:
                at, x, log = start + (ROWS - 1 - row), own[ROWS - 1 - row], logs[ROWS - 1 - row]
            else:
                at, x, log = start + row, own[row], logs[row]
            tl.store(states + offset + at * C, carried, mask=columns & (at < runs))
            tl.store(log_decays + offset + at * C, total, mask=columns & (at < runs))
            carried = tl.exp(log) * carried + x
            total += log
    tl.store(state + batch * C + channels, carried, mask=columns)
    tl.store(log_decay + batch * C + channels, total, mask=columns)


@jit
def true_end(states, log_decays, other, batch, channels, columns, C):
    """What a run starts from, or ends with: from this rank's other runs and from the other ranks."""
    of_run = (batch * tl.num_programs(1) + tl.program_id(1)) * C + channels
    own = tl.load(states + of_run, mask=columns, other=0.0)
    decay = tl.exp(tl.load(log_decays + of_run, mask=columns, other=0.0))
    return own + decay * tl.load(other + batch * C + channels, mask=columns, other=0.0).to(tl.float32)


@jit
def outputs_kernel(
    x,  # [B, T, C]
    g,  # [B, T, C] fp32
    doc_ids,  # [T] int32, if DOCUMENTS
    starts,  # [B, runs, C] fp32, of `starts_kernel`
    prefix,  # [B, runs, C] fp32, of `starts_kernel`
    incoming,  # [B, C], R
    o,  # [B, T, C], written
    states,  # [B, ⌈T / ROWS⌉, C] fp32, written: those before each step of ROWS tokens
    run,  # tokens of a program, a multiple of ROWS
    T,
    C,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute h of all tokens."""
    channels, columns, first, batch = run_of_program(run, C, BC)
    offset = batch * T * C + channels
    state = true_end(starts, prefix, incoming, batch, channels, columns, C)
    for start in range(first, tl.minimum(first + run, T), ROWS):
        tl.store(states + (batch * tl.cdiv(T, ROWS) + start // ROWS) * C + channels, state, mask=columns)
        values = load_rows(x + offset, start, T, C, columns, ROWS)
        logs = _load_log_decays(g + offset, doc_ids, start, T, C, columns, ROWS, DOCUMENTS)
        for row in tl.static_range(ROWS):
            state = tl.exp(logs[row]) * state + values[row]
            mask = columns & (start + row < T)
            tl.store(o + offset + (start + row) * C, state.to(o.dtype.element_ty), mask=mask)


@jit
def grads_kernel(
    x,  # [B, T, C]
    g,  # [B, T, C] fp32
    do,  # [B, T, C]
    doc_ids,  # [T] int32, if DOCUMENTS
    states,  # [B, ⌈T / ROWS⌉, C] fp32, of `outputs_kernel`
    ends,  # [B, runs, C] fp32, of `starts_kernel` in reverse
    suffix,  # [B, runs, C] fp32, of `starts_kernel` in reverse
    incoming,  # [B, C], D_in
    dx,  # [B, T, C], written
    dg,  # [B, T, C] fp32, written
    run,  # tokens of a program, a multiple of ROWS
    T,
    C,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute dx and dg: h of a step of tokens forward, then dh backward."""
    channels, columns, first, batch = run_of_program(run, C, BC)
    offset = batch * T * C + channels
    grad = true_end(ends, suffix, incoming, batch, channels, columns, C)
    steps = tl.cdiv(tl.minimum(first + run, T) - first, ROWS)
    for step in range(steps):
        start = first + (steps - 1 - step) * ROWS
        values = load_rows(x + offset, start, T, C, columns, ROWS)
        logs = _load_log_decays(g + offset, doc_ids, start, T, C, columns, ROWS, DOCUMENTS)
        output_grads = load_rows(do + offset, start, T, C, columns, ROWS)
        of_step = (batch * tl.cdiv(T, ROWS) + start // ROWS) * C + channels
        state = tl.load(states + of_step, mask=columns, other=0.0)
        decays, decayed = (), ()
        for row in tl.static_range(ROWS):
            decays = append(decays, tl.exp(logs[row]))
            decayed = append(decayed, decays[row] * state)
            state = decayed[row] + values[row]
        for row in tl.static_range(ROWS):
            token = start + (ROWS - 1 - row)
            mask = columns & (token < T)
            grad += output_grads[ROWS - 1 - row]
            tl.store(dx + offset + token * C, grad.to(dx.dtype.element_ty), mask=mask)
            tl.store(dg + offset + token * C, grad * decayed[ROWS - 1 - row], mask=mask)
            grad *= decays[ROWS - 1 - row]


# Two channels a thread: a load is 4 bytes in bf16, 8 in fp32. States are saved between the steps of `rows` tokens.
WALK = RunOptions(rows=16, channels=64, programs=4096, shortest=64)
# Runs whose loads are issued together, and channels of a program, one of a thread, where runs are joined.
_JOINED, _CHANNELS = 32, 32


class Summaries(NamedTuple):
    """Runs of a rank's tokens joined from a zero start, or in reverse from a zero end; fp32."""

    starts: Tensor  # [B, runs, H, K], what each starts from, or ends with
    log_decays: Tensor  # [B, runs, H, K], of all runs before it, or after it
    state: Tensor  # [B, H, K, 1], S_loc or D_loc
    log_decay: Tensor  # [B, H, K], of all tokens


# [B, ⌈T / rows⌉, C], of the states that are saved, for x [B, T, H, K].
def _states_shape(x: Tensor) -> tuple[int, int, int]:
    batch, tokens, heads, key_dim = x.shape
    return batch, -(-tokens // WALK.rows), heads * key_dim


# Of the runs of x, in reverse of do, joined; all tensors are contiguous here, g is fp32.
def _summaries(x: Tensor, g: Tensor, doc_ids: Tensor | None, *, reverse: bool) -> Summaries:
    B, T, H, K = x.shape
    C, run = H * K, WALK.run(B, T, H * K)
    runs = cdiv(T, run)
    starts, log_decays = torch.empty(2, B, runs, H, K, dtype=torch.float32, device=x.device)
    summaries_kernel[(cdiv(C, WALK.channels), runs, B)](
        x, g, doc_ids, starts, log_decays, run, T, C,
        ROWS=WALK.rows, BC=WALK.channels, DOCUMENTS=doc_ids is not None, REVERSE=reverse, num_warps=1,
    )  # fmt: skip
    return joined_runs(starts, log_decays, reverse=reverse)


def joined_runs(states: Tensor, log_decays: Tensor, *, reverse: bool) -> Summaries:
    """Join the runs' own states, or gradients, and log-decays [B, runs, H, K], which are overwritten."""
    B, runs, H, K = states.shape
    state, log_decay = torch.empty(2, B, H, K, dtype=torch.float32, device=states.device)
    starts_kernel[(cdiv(H * K, _CHANNELS), B)](
        states, log_decays, state, log_decay, runs, H * K,
        ROWS=_JOINED, BC=_CHANNELS, REVERSE=reverse, num_warps=1,
    )  # fmt: skip
    return Summaries(states, log_decays, state.unsqueeze(-1), log_decay)


# All before the scan is needed for it: nothing overlaps it.
class _HgrnKernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, self._g = map(dense, operands)
        self._summaries = _summaries(self._x, self._g, self.doc_ids, reverse=False)
        self.state, self.transition = self._summaries.state, self._summaries.log_decay

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self.state.shape)
        x, (starts, log_decays, *_) = self._x, self._summaries
        B, T, H, K = x.shape
        o, states = torch.empty_like(x), torch.empty(_states_shape(x), dtype=torch.float32, device=x.device)
        outputs_kernel[(cdiv(H * K, WALK.channels), starts.shape[1], B)](
            x, self._g, self.doc_ids, starts, log_decays, incoming_state.contiguous(), o, states,
            WALK.run(B, T, H * K), T, H * K,
            ROWS=WALK.rows, BC=WALK.channels, DOCUMENTS=self.doc_ids is not None, num_warps=1,
        )  # fmt: skip
        self.saved = (states,)
        return o


class _HgrnKernelBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._x, self._g, self._do = map(dense, (*operands, self.do))
        self._summaries = _summaries(self._do, self._g, self.doc_ids, reverse=True)
        self.state_grad = self._summaries.state

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        (states,), (ends, log_decays, *_) = self.saved, self._summaries
        B, T, H, K = self._x.shape
        dx, dg = torch.empty_like(self._x), torch.empty_like(self._g)
        grads_kernel[(cdiv(H * K, WALK.channels), ends.shape[1], B)](
            self._x, self._g, self._do, self.doc_ids, states, ends, log_decays, incoming_grad.contiguous(), dx, dg,
            WALK.run(B, T, H * K), T, H * K,
            ROWS=WALK.rows, BC=WALK.channels, DOCUMENTS=self.doc_ids is not None, num_warps=1,
        )  # fmt: skip
        return dx, dg


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (operands[0].new_empty(_states_shape(operands[0]), dtype=torch.float32),)


CUDA = Passes(_HgrnKernelForward, _HgrnKernelBackward, _saved_like, needs_incoming=False)
