"""The Triton kernels of the selective scan, their launches and the passes on them, for inputs up to fp32.

Forward                                                        Backward
  runs of tokens from zero → S_loc, G_tot                        runs of tokens from a zero end → D_loc
  | scan over ranks                                              | scan over ranks; states before each step of tokens
  true states that runs start from; h, o                         true gradients that runs end with; h again, dh, all

A program is one warp with a channel a thread, whose K states it keeps in registers while it walks over a run of tokens
in steps of `ROWS`: sums over K stay within a thread. Only states of runs are written, and saved for the backward pass;
which makes those between steps from them while gradients are on their way. dB and dC are sums over channels: a program
writes those of its own, and they are added up in the order of programs. The kernels also run under the interpreter.

An exponential of each token, channel and state limits each of the four walks, not memory. Tensors over tokens are [B,
T, H] or [B, T, K], over runs [B, runs, H, K]; all are contiguous. Sums are fp32. A restart is an infinite time step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit, next_power_of_2
from zeco_train.ops.hgrn.kernels import Summaries, append, joined_runs, load_rows, true_end
from zeco_train.ops.kept import RunOptions
from zeco_train.ops.kernel_operands import dense
from zeco_train.ops.mamba2.kernels import softplus
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes, check_state

_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@jit
def _load_rates(A_log, channels, columns, K: tl.constexpr):
    """A log₂ e of each state, below 0: times an infinite time step it is −∞."""
    rates = ()
    for k in tl.static_range(K):
        a_log = tl.load(A_log + channels * K + k, mask=columns, other=0.0)
        rates = append(rates, tl.minimum(-tl.exp(a_log), -1e-30) * _LOG2_E)
    return rates


@jit
def _time_steps(logits, start, T, ROWS: tl.constexpr):
    """Time steps of rows of logits; 0 after the last token."""
    steps = ()
    for row in tl.static_range(ROWS):
        steps = append(steps, tl.where(start + row < T, softplus(logits[row]), 0.0))
    return steps


@jit
def _load_logits(dt, bias, start, T, C, columns, ROWS: tl.constexpr):
    logits = load_rows(dt, start, T, C, columns, ROWS)
    shifted = ()
    for row in tl.static_range(ROWS):
        shifted = append(shifted, logits[row] + bias)
    return shifted


@jit
def _with_restarts(steps, doc_ids, start, T, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The time steps by which states decay, infinite at restarts."""
    if DOCUMENTS:
        marked = ()
        before = tl.load(doc_ids + start - 1, mask=start > 0, other=0)
        for row in tl.static_range(ROWS):
            piece = tl.load(doc_ids + start + row, mask=start + row < T, other=0)
            marked = append(marked, tl.where(piece > before, float("inf"), steps[row]))
            before = piece
        steps = marked
    return steps


@jit
def _of_state(x, token, k, T, K: tl.constexpr):
    """A number of B or C."""
    return tl.load(x + token * K + k, mask=token < T, other=0.0).to(tl.float32)


@jit
def summaries_kernel(
    x,  # [B, T, H], x; do if REVERSE
    dt,  # [B, T, H]
    A_log,  # [H, K] fp32
    weights,  # [B, T, K], B; C if REVERSE
    dt_bias,  # [H] fp32
    doc_ids,  # [T] int32, if DOCUMENTS
    states,  # [B, runs, H, K] fp32, written
    log_decays,  # [B, runs, H, K] fp32, written
    run,  # tokens of a program, a multiple of ROWS
    T,
    H,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Compute each run's own state after its tokens, or the gradient for the state before them, and their decay."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    columns = channels < H
    offset = batch * T * H + channels
    rates = _load_rates(A_log, channels, columns, K)
    bias = tl.load(dt_bias + channels, mask=columns, other=0.0)
    state = ()
    for _ in tl.static_range(K):
        state = append(state, tl.zeros((BC,), tl.float32))
    total = tl.zeros((BC,), tl.float32)
    count = tl.cdiv(tl.minimum(first + run, T) - first, ROWS)
    for step in range(count):
        start = first + (count - 1 - step) * ROWS if REVERSE else first + step * ROWS
        values = load_rows(x + offset, start, T, H, columns, ROWS)
        steps = _time_steps(_load_logits(dt + offset, bias, start, T, H, columns, ROWS), start, T, ROWS)
        decaying = _with_restarts(steps, doc_ids, start, T, ROWS, DOCUMENTS)
        for index in tl.static_range(ROWS):
            row = ROWS - 1 - index if REVERSE else index
            after = ()
            for k in tl.static_range(K):
                weight = _of_state(weights + batch * T * K, start + row, k, T, K)
                decay = tl.exp2(rates[k] * decaying[row])
                if REVERSE:
                    after = append(after, decay * (state[k] + values[row] * weight))
                else:
                    after = append(after, decay * state[k] + steps[row] * values[row] * weight)
            state = after
            total += decaying[row]
    of_run = ((batch * tl.num_programs(1) + tl.program_id(1)) * H + channels) * K
    for k in tl.static_range(K):
        tl.store(states + of_run + k, state[k], mask=columns)
        tl.store(log_decays + of_run + k, rates[k] * _LN_2 * total, mask=columns)


@jit
def walk_kernel(
    x,  # [B, T, H]
    dt,  # [B, T, H]
    A_log,  # [H, K] fp32
    B,  # [B, T, K]
    C,  # [B, T, K]
    D,  # [H] fp32
    dt_bias,  # [H] fp32
    doc_ids,  # [T] int32, if DOCUMENTS
    starts,  # [B, runs, H, K] fp32, of `joined_runs`
    prefix,  # [B, runs, H, K] fp32, of `joined_runs`
    incoming,  # [B, H, K], R
    true_starts,  # [B, runs, H, K] fp32: the states that runs start from, written if OUTPUTS, else read
    o,  # [B, T, H], written if OUTPUTS
    states,  # [B, ⌈T / ROWS⌉, K, H] fp32, written unless OUTPUTS: those before each step of ROWS tokens
    run,  # tokens of a program, a multiple of ROWS
    T,
    H,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Compute h of all tokens, and their outputs, or keep some."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    columns = channels < H
    offset = batch * T * H + channels
    rates = _load_rates(A_log, channels, columns, K)
    bias = tl.load(dt_bias + channels, mask=columns, other=0.0)
    skip = tl.load(D + channels, mask=columns, other=0.0)
    of_run = ((batch * tl.num_programs(1) + tl.program_id(1)) * H + channels) * K
    state = ()
    for k in tl.static_range(K):
        if OUTPUTS:
            h = true_end(starts, prefix, incoming, batch, channels * K + k, columns, H * K)
            tl.store(true_starts + of_run + k, h, mask=columns)
        else:
            h = tl.load(true_starts + of_run + k, mask=columns, other=0.0)
        state = append(state, h)
    for start in range(first, tl.minimum(first + run, T), ROWS):
        if not OUTPUTS:
            of_step = (batch * tl.cdiv(T, ROWS) + start // ROWS) * K * H + channels
            for k in tl.static_range(K):
                tl.store(states + of_step + k * H, state[k], mask=columns)
        values = load_rows(x + offset, start, T, H, columns, ROWS)
        steps = _time_steps(_load_logits(dt + offset, bias, start, T, H, columns, ROWS), start, T, ROWS)
        decaying = _with_restarts(steps, doc_ids, start, T, ROWS, DOCUMENTS)
        for row in tl.static_range(ROWS):
            token = start + row
            y = skip * values[row]
            after = ()
            for k in tl.static_range(K):
                weight = _of_state(B + batch * T * K, token, k, T, K)
                h = tl.exp2(rates[k] * decaying[row]) * state[k] + steps[row] * values[row] * weight
                if OUTPUTS:
                    y += h * _of_state(C + batch * T * K, token, k, T, K)
                after = append(after, h)
            state = after
            if OUTPUTS:
                tl.store(o + offset + token * H, y.to(o.dtype.element_ty), mask=columns & (token < T))


@jit
def grads_kernel(
    x,  # [B, T, H]
    dt,  # [B, T, H]
    A_log,  # [H, K] fp32
    B,  # [B, T, K]
    C,  # [B, T, K]
    D,  # [H] fp32
    dt_bias,  # [H] fp32
    do,  # [B, T, H]
    doc_ids,  # [T] int32, if DOCUMENTS
    states,  # [B, ⌈T / ROWS⌉, K, H] fp32, of `walk_kernel`
    ends,  # [B, runs, H, K] fp32, of `joined_runs` in reverse
    suffix,  # [B, runs, H, K] fp32, of `joined_runs` in reverse
    incoming,  # [B, H, K], D_in
    dx,  # [B, T, H], written
    ddt,  # [B, T, H], written
    dB,  # [blocks, B, T, K] fp32, written: sums over a program's channels
    dC,  # [blocks, B, T, K] fp32, written, likewise
    of_channels,  # [B, runs, K + 2, H] fp32, written: of A_log by state, of dt_bias, of D
    run,  # tokens of a program, a multiple of ROWS
    T,
    H,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute all gradients: of each state h of a step of tokens forward, then dh backward."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    columns = channels < H
    offset = batch * T * H + channels
    of_block = (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + batch) * T * K
    rates = _load_rates(A_log, channels, columns, K)
    bias = tl.load(dt_bias + channels, mask=columns, other=0.0)
    skip = tl.load(D + channels, mask=columns, other=0.0)
    grads = ()
    rate_grads = ()
    for k in tl.static_range(K):
        grads = append(grads, true_end(ends, suffix, incoming, batch, channels * K + k, columns, H * K))
        rate_grads = append(rate_grads, tl.zeros((BC,), tl.float32))
    bias_grad = tl.zeros((BC,), tl.float32)
    skip_grad = tl.zeros((BC,), tl.float32)
    count = tl.cdiv(tl.minimum(first + run, T) - first, ROWS)
    for step in range(count):
        start = first + (count - 1 - step) * ROWS
        values = load_rows(x + offset, start, T, H, columns, ROWS)
        logits = _load_logits(dt + offset, bias, start, T, H, columns, ROWS)
        steps = _time_steps(logits, start, T, ROWS)
        decaying = _with_restarts(steps, doc_ids, start, T, ROWS, DOCUMENTS)
        output_grads = load_rows(do + offset, start, T, H, columns, ROWS)
        of_step = (batch * tl.cdiv(T, ROWS) + start // ROWS) * K * H + channels
        # Of each row, last one first: Σ_k B dh, and Σ_k of the gradients of log₂ decays times their rates.
        written_grads = ()
        decay_grads = ()
        for row in tl.static_range(ROWS):
            written_grads = append(written_grads, tl.zeros((BC,), tl.float32))
            decay_grads = append(decay_grads, tl.zeros((BC,), tl.float32))
        grads_before = ()
        rate_sums = ()
        for k in tl.static_range(K):
            h = tl.load(states + of_step + k * H, mask=columns, other=0.0)
            decays = ()
            decayed = ()
            for row in tl.static_range(ROWS):
                token = start + row
                decays = append(decays, tl.exp2(rates[k] * decaying[row]))
                decayed = append(decayed, decays[row] * h)
                h = decayed[row] + steps[row] * values[row] * _of_state(B + batch * T * K, token, k, T, K)
                of_token = of_block + token * K + k
                tl.store(dC + of_token, tl.sum(h * output_grads[row], 0), mask=token < T)
            grad = grads[k]
            rate_grad = rate_grads[k]
            more_written = ()
            more_decays = ()
            for index in tl.static_range(ROWS):
                row = ROWS - 1 - index
                token = start + row
                grad += output_grads[row] * _of_state(C + batch * T * K, token, k, T, K)
                of_token = of_block + token * K + k
                tl.store(dB + of_token, tl.sum(grad * steps[row] * values[row], 0), mask=token < T)
                of_decay = grad * decayed[row]
                rate_grad += of_decay * steps[row]
                weight = _of_state(B + batch * T * K, token, k, T, K)
                more_written = append(more_written, written_grads[index] + grad * weight)
                more_decays = append(more_decays, decay_grads[index] + of_decay * rates[k])
                grad *= decays[row]
            written_grads = more_written
            decay_grads = more_decays
            grads_before = append(grads_before, grad)
            rate_sums = append(rate_sums, rate_grad)
        grads = grads_before
        rate_grads = rate_sums
        for index in tl.static_range(ROWS):
            row = ROWS - 1 - index
            mask = columns & (start + row < T)
            place = offset + (start + row) * H
            of_x = skip * output_grads[row] + steps[row] * written_grads[index]
            tl.store(dx + place, of_x.to(dx.dtype.element_ty), mask=mask)
            of_logit = (values[row] * written_grads[index] + _LN_2 * decay_grads[index]) * tl.sigmoid(logits[row])
            of_logit = tl.where(mask, of_logit, 0.0)
            tl.store(ddt + place, of_logit.to(ddt.dtype.element_ty), mask=mask)
            bias_grad += of_logit
            skip_grad += values[row] * output_grads[row]
    of_run = (batch * tl.num_programs(1) + tl.program_id(1)) * (K + 2) * H + channels
    for k in tl.static_range(K):
        tl.store(of_channels + of_run + k * H, rate_grads[k] * rates[k] * _LN_2, mask=columns)
    tl.store(of_channels + of_run + K * H, bias_grad, mask=columns)
    tl.store(of_channels + of_run + (K + 1) * H, skip_grad, mask=columns)


# A channel a thread; as many programs as run at once on a large GPU with 128 registers a thread.
WALK = RunOptions(rows=16, channels=32, programs=2112, shortest=64)


# Of tokens whose loads are issued together, and of a program; with many states fewer, for code of a bounded size.
def _rows(K: int) -> int:
    return min(WALK.rows, max(1, 256 // next_power_of_2(K)))


def _run(x: Tensor, K: int) -> int:
    B, T, H = x.shape
    return WALK._replace(rows=_rows(K)).run(B, T, H)


class _Launch:
    """The operands as kernels take them, and their launches."""

    def __init__(self, operands: Sequence[Tensor], doc_ids: Tensor | None) -> None:
        x, dt, A_log, B, C, D, dt_bias = operands
        self.x, self.dt, self.B, self.C = map(dense, (x, dt, B, C))
        self.A_log, self.D, self.dt_bias = (dense(y.float()) for y in (A_log, D, dt_bias))
        self.doc_ids, K = doc_ids, A_log.shape[1]
        batch, T, H = x.shape
        self.run = _run(x, K)
        self.runs, self.sizes = cdiv(T, self.run), (self.run, T, H, K)
        self.options = {"ROWS": _rows(K), "BC": WALK.channels, "DOCUMENTS": doc_ids is not None, "num_warps": 1}
        self.grid = cdiv(H, WALK.channels), self.runs, batch

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)

    def summaries(self, x: Tensor, weights: Tensor, *, reverse: bool) -> Summaries:
        batch, (_, _, H, K) = self.x.shape[0], self.sizes
        states, log_decays = self.empty(2, batch, self.runs, H, K)
        summaries_kernel[self.grid](
            x, self.dt, self.A_log, weights, self.dt_bias, self.doc_ids, states, log_decays, *self.sizes,
            **self.options, REVERSE=reverse,
        )  # fmt: skip
        return joined_runs(states, log_decays, reverse=reverse)

    def operands(self) -> tuple[Tensor, ...]:
        return self.x, self.dt, self.A_log, self.B, self.C, self.D, self.dt_bias


class _KernelForward(ForwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._launch = _Launch(operands, self.doc_ids)
        self._summaries = self._launch.summaries(self._launch.x, self._launch.B, reverse=False)
        self.state, self.transition = self._summaries.state, self._summaries.log_decay

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self.state.shape)
        launch, (starts, prefix, *_) = self._launch, self._summaries
        o, true_starts = torch.empty_like(launch.x), torch.empty_like(starts)
        walk_kernel[launch.grid](
            *launch.operands(), self.doc_ids, starts, prefix, incoming_state.contiguous(), true_starts, o, None,
            *launch.sizes, **launch.options, OUTPUTS=True,
        )  # fmt: skip
        self.saved = (true_starts,)
        return o


class _KernelBackward(BackwardBase):
    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._operands, self._launch, self._do = operands, _Launch(operands, self.doc_ids), dense(self.do)
        self._summaries = self._launch.summaries(self._do, self._launch.C, reverse=True)
        self.state_grad = self._summaries.state

    def overlap(self) -> None:
        launch, (true_starts,) = self._launch, self.saved
        batch, (_, T, H, K) = self._do.shape[0], launch.sizes
        self._states = launch.empty(batch, cdiv(T, launch.options["ROWS"]), K, H)
        walk_kernel[launch.grid](
            *launch.operands(), self.doc_ids, None, None, None, true_starts, None, self._states, *launch.sizes,
            **launch.options, OUTPUTS=False,
        )  # fmt: skip

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        launch, (ends, suffix, *_) = self._launch, self._summaries
        batch, (_, T, H, K) = self._do.shape[0], launch.sizes
        dx, ddt = torch.empty_like(launch.x), torch.empty_like(launch.dt)
        dB, dC = launch.empty(2, launch.grid[0], batch, T, K)
        of_channels = launch.empty(batch, launch.runs, K + 2, H)
        grads_kernel[launch.grid](
            *launch.operands(), self._do, self.doc_ids, self._states, ends, suffix, incoming_grad.contiguous(),
            dx, ddt, dB, dC, of_channels, *launch.sizes, **launch.options,
        )  # fmt: skip
        of_A, dbias, dD = of_channels.sum((0, 1)).split((K, 1, 1))
        grads = dx, ddt, of_A.mT, dB.sum(0), dC.sum(0), dD[0], dbias[0]
        return tuple(grad.to(like.dtype) for grad, like in zip(grads, self._operands, strict=True))


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, _, A_log, *_ = operands
    runs = cdiv(x.shape[1], _run(x, A_log.shape[1]))
    return (x.new_empty((x.shape[0], runs, *A_log.shape), dtype=torch.float32),)


CUDA = Passes(_KernelForward, _KernelBackward, _saved_like, needs_incoming=False)
