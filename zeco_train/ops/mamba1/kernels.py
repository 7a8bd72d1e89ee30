"""The Triton kernels of the selective scan, their launches and the passes on them, for inputs up to fp32.

Forward                                                        Backward
  runs of tokens from zero → S_loc, G_tot                        runs of tokens from a zero end → D_loc
  | scan over ranks                                              | scan over ranks; states before each step of tokens
  true states that runs start from; h, o                         true gradients that runs end with; h again, dh, all

A program has a few channels and keeps their states, [BC, BK] of K numbers each, in registers while it walks over a run
of tokens, whose loads are issued `ROWS` at a time. Only states of runs are written, and saved for the backward pass,
which makes those before every step of `STEP` tokens from them while gradients are on their way. dB and dC are sums over
channels: a program writes those of its own, and they are added up in the order of programs. The kernels also run on a
CPU under Triton's interpreter.

Exponentials, one of each token, channel and state in each of the four walks, take as long as memory. Tensors over
tokens are [B, T, H] or [B, T, K], over runs [B, runs, H, K]; all are contiguous. Sums are fp32. At a restart the state
decays by an infinite time step.
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
def _load_rates(A_log, place, inside):
    """A log₂ e, below 0: times an infinite time step it is −∞."""
    return tl.minimum(-tl.exp(tl.load(A_log + place, mask=inside, other=0.0)), -1e-30) * _LOG2_E


@jit
def _load_steps(dt, bias, doc_ids, start, T, H, columns, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Rows of the time steps' logits, of time steps, 0 after the last token, and of those by which states decay."""
    rows = load_rows(dt, start, T, H, columns, ROWS)
    logits, steps, decaying = (), (), ()
    if DOCUMENTS:
        before = tl.load(doc_ids + start - 1, mask=(start > 0) & (start < T), other=0)
    for row in tl.static_range(ROWS):
        logits = append(logits, rows[row] + bias)
        steps = append(steps, tl.where(start + row < T, softplus(logits[row]), 0.0))
        if DOCUMENTS:
            piece = tl.load(doc_ids + start + row, mask=start + row < T, other=0)
            decaying = append(decaying, tl.where(piece > before, float("inf"), steps[row]))
            before = piece
        else:
            decaying = append(decaying, steps[row])
    return logits, steps, decaying


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
    K,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Compute each run's own state after its tokens, or the gradient for the state before them, and their decay."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    keys = tl.arange(0, BK)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    columns = channels < H
    place, inside = channels[:, None] * K + keys, columns[:, None] & (keys < K)
    offset = batch * T * H + channels
    rates = _load_rates(A_log, place, inside)
    bias = tl.load(dt_bias + channels, mask=columns, other=0.0)
    state = tl.zeros((BC, BK), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    count = tl.cdiv(tl.minimum(first + run, T) - first, ROWS)
    for step in range(count):
        start = first + (count - 1 - step) * ROWS if REVERSE else first + step * ROWS
        values = load_rows(x + offset, start, T, H, columns, ROWS)
        factors = load_rows(weights + batch * T * K + keys, start, T, K, keys < K, ROWS)
        _, steps, decaying = _load_steps(dt + offset, bias, doc_ids, start, T, H, columns, ROWS, DOCUMENTS)
        for row in tl.static_range(ROWS):
            if REVERSE:
                value, factor, by = values[ROWS - 1 - row], factors[ROWS - 1 - row], decaying[ROWS - 1 - row]
                state = tl.exp2(rates * by[:, None]) * (state + value[:, None] * factor)
            else:
                value, factor, by = steps[row] * values[row], factors[row], decaying[row]
                state = tl.exp2(rates * by[:, None]) * state + value[:, None] * factor
            total += by
    of_run = (batch * tl.num_programs(1) + tl.program_id(1)) * H * K + place
    tl.store(states + of_run, state, mask=inside)
    tl.store(log_decays + of_run, rates * _LN_2 * total[:, None], mask=inside)


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
    states,  # [B, ⌈T / STEP⌉, H, K] fp32, written unless OUTPUTS: those before each step of STEP tokens
    run,  # tokens of a program, a multiple of ROWS
    T,
    H,
    K,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Compute h of all tokens, and their outputs, or keep some."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    keys = tl.arange(0, BK)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    columns = channels < H
    place, inside = channels[:, None] * K + keys, columns[:, None] & (keys < K)
    offset, of_keys = batch * T * H + channels, batch * T * K + keys
    rates = _load_rates(A_log, place, inside)
    bias = tl.load(dt_bias + channels, mask=columns, other=0.0)
    skip = tl.load(D + channels, mask=columns, other=0.0)
    of_run = (batch * tl.num_programs(1) + tl.program_id(1)) * H * K + place
    if OUTPUTS:
        state = true_end(starts, prefix, incoming, batch, place, inside, H * K)
        tl.store(true_starts + of_run, state, mask=inside)
    else:
        state = tl.load(true_starts + of_run, mask=inside, other=0.0)
    for start in range(first, tl.minimum(first + run, T), ROWS):
        if not OUTPUTS:
            of_step = (batch * tl.cdiv(T, STEP) + start // STEP) * H * K + place
            tl.store(states + of_step, state, mask=inside & (start % STEP == 0))
        values = load_rows(x + offset, start, T, H, columns, ROWS)
        writes = load_rows(B + of_keys, start, T, K, keys < K, ROWS)
        _, steps, decaying = _load_steps(dt + offset, bias, doc_ids, start, T, H, columns, ROWS, DOCUMENTS)
        if OUTPUTS:
            reads = load_rows(C + of_keys, start, T, K, keys < K, ROWS)
        for row in tl.static_range(ROWS):
            written = steps[row] * values[row]
            state = tl.exp2(rates * decaying[row][:, None]) * state + written[:, None] * writes[row]
            if OUTPUTS:
                y = tl.sum(state * reads[row], 1) + skip * values[row]
                mask = columns & (start + row < T)
                tl.store(o + offset + (start + row) * H, y.to(o.dtype.element_ty), mask=mask)


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
    states,  # [B, ⌈T / STEP⌉, H, K] fp32, of `walk_kernel`
    kept,  # [B, runs, STEP / ROWS, H, K] fp32, for the states before each ROWS tokens of a step
    ends,  # [B, runs, H, K] fp32, of `joined_runs` in reverse
    suffix,  # [B, runs, H, K] fp32, of `joined_runs` in reverse
    incoming,  # [B, H, K], D_in
    dx,  # [B, T, H], written
    ddt,  # [B, T, H], written
    dB,  # [blocks, B, T, K] fp32, written: sums over a program's channels
    dC,  # [blocks, B, T, K] fp32, written, likewise
    dA_log,  # [B, runs, H, K] fp32, written: sums over a run's tokens
    of_channels,  # [B, runs, 2, H] fp32, written, likewise: of D and dt_bias
    run,  # tokens of a program, a multiple of STEP
    T,
    H,
    K,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute all gradients: h of a step of tokens forward, then dh backward."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    keys = tl.arange(0, BK)
    first = tl.program_id(1).to(tl.int64) * run
    batch = tl.program_id(2).to(tl.int64)
    columns = channels < H
    place, inside = channels[:, None] * K + keys, columns[:, None] & (keys < K)
    offset, of_keys = batch * T * H + channels, batch * T * K + keys
    of_block = tl.program_id(0).to(tl.int64) * tl.num_programs(2) * T * K + of_keys
    rates = _load_rates(A_log, place, inside)
    bias = tl.load(dt_bias + channels, mask=columns, other=0.0)
    skip = tl.load(D + channels, mask=columns, other=0.0)
    grad = true_end(ends, suffix, incoming, batch, place, inside, H * K)
    rate_grad = tl.zeros((BC, BK), tl.float32)
    bias_grad = tl.zeros((BC,), tl.float32)
    skip_grad = tl.zeros((BC,), tl.float32)
    of_run = batch * tl.num_programs(1) + tl.program_id(1)
    own = kept + of_run * (STEP // ROWS) * H * K + place
    count = tl.cdiv(tl.minimum(first + run, T) - first, STEP)
    for step in range(count):
        begin = first + (count - 1 - step) * STEP
        h = tl.load(states + (batch * tl.cdiv(T, STEP) + begin // STEP) * H * K + place, mask=inside, other=0.0)
        for part in range(STEP // ROWS - 1):
            start = begin + part * ROWS
            tl.store(own + part * H * K, h, mask=inside)
            values = load_rows(x + offset, start, T, H, columns, ROWS)
            writes = load_rows(B + of_keys, start, T, K, keys < K, ROWS)
            _, steps, decaying = _load_steps(dt + offset, bias, doc_ids, start, T, H, columns, ROWS, DOCUMENTS)
            for row in tl.static_range(ROWS):
                written = steps[row] * values[row]
                h = tl.exp2(rates * decaying[row][:, None]) * h + written[:, None] * writes[row]
        tl.store(own + (STEP // ROWS - 1) * H * K, h, mask=inside)
        tl.debug_barrier()
        for part in range(STEP // ROWS):
            start = begin + STEP - ROWS - part * ROWS
            h = tl.load(own + (STEP // ROWS - 1 - part) * H * K, mask=inside, other=0.0)
            values = load_rows(x + offset, start, T, H, columns, ROWS)
            output_grads = load_rows(do + offset, start, T, H, columns, ROWS)
            writes = load_rows(B + of_keys, start, T, K, keys < K, ROWS)
            reads = load_rows(C + of_keys, start, T, K, keys < K, ROWS)
            logits, steps, decaying = _load_steps(dt + offset, bias, doc_ids, start, T, H, columns, ROWS, DOCUMENTS)
            decays, decayed = (), ()
            for row in tl.static_range(ROWS):
                decays = append(decays, tl.exp2(rates * decaying[row][:, None]))
                decayed = append(decayed, decays[row] * h)
                written = steps[row] * values[row]
                h = decayed[row] + written[:, None] * writes[row]
                mask = (keys < K) & (start + row < T)
                tl.store(dC + of_block + (start + row) * K, tl.sum(h * output_grads[row][:, None], 0), mask=mask)
            for row in tl.static_range(ROWS):
                token = start + (ROWS - 1 - row)
                value, by = values[ROWS - 1 - row], steps[ROWS - 1 - row]
                output_grad = output_grads[ROWS - 1 - row]
                grad += output_grad[:, None] * reads[ROWS - 1 - row]
                written = by * value
                mask = (keys < K) & (token < T)
                tl.store(dB + of_block + token * K, tl.sum(grad * written[:, None], 0), mask=mask)
                of_written = tl.sum(grad * writes[ROWS - 1 - row], 1)
                of_decay = grad * decayed[ROWS - 1 - row]
                rate_grad += of_decay * by[:, None]
                of_step = value * of_written + _LN_2 * tl.sum(of_decay * rates, 1)
                of_logit = tl.where(token < T, of_step * tl.sigmoid(logits[ROWS - 1 - row]), 0.0)
                bias_grad += of_logit
                skip_grad += value * output_grad
                mask = columns & (token < T)
                of_x = skip * output_grad + by * of_written
                tl.store(dx + offset + token * H, of_x.to(dx.dtype.element_ty), mask=mask)
                tl.store(ddt + offset + token * H, of_logit.to(ddt.dtype.element_ty), mask=mask)
                grad *= decays[ROWS - 1 - row]
        tl.debug_barrier()
    tl.store(dA_log + of_run * H * K + place, rate_grad * rates * _LN_2, mask=inside)
    tl.store(of_channels + of_run * 2 * H + channels, skip_grad, mask=columns)
    tl.store(of_channels + (of_run * 2 + 1) * H + channels, bias_grad, mask=columns)


# Tokens of a step, between which states are made again; runs are whole steps.
WALK = RunOptions(rows=16, channels=32, programs=2112, shortest=64)
# Tokens whose loads are issued together, and which are unrolled: as many as registers hold.
_ROWS, _GRAD_ROWS = 4, 2


def _walk(K: int) -> RunOptions:
    # With more states fewer channels, so that a program has as many numbers.
    return WALK._replace(channels=max(1, min(WALK.channels, 16 * WALK.channels // next_power_of_2(K))))


class _Launch:
    """The operands as kernels take them, and their launches."""

    def __init__(self, operands: Sequence[Tensor], doc_ids: Tensor | None) -> None:
        x, dt, A_log, B, C, D, dt_bias = operands
        self.x, self.dt, self.B, self.C = map(dense, (x, dt, B, C))
        self.A_log, self.D, self.dt_bias = (dense(y.float()) for y in (A_log, D, dt_bias))
        self.doc_ids, (batch, T, H), K = doc_ids, x.shape, A_log.shape[1]
        walk = _walk(K)
        run = walk.run(batch, T, H)
        self.sizes, self.grid = (run, T, H, K), (cdiv(H, walk.channels), cdiv(T, run), batch)
        tile = {"BC": walk.channels, "BK": next_power_of_2(K), "num_warps": 1}
        self.options = {**tile, "ROWS": _ROWS, "DOCUMENTS": doc_ids is not None}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)

    def of_runs(self) -> tuple[int, ...]:
        """[B, runs, H, K]."""
        return *self.grid[:0:-1], *self.sizes[2:]

    def summaries(self, x: Tensor, weights: Tensor, *, reverse: bool) -> Summaries:
        states, log_decays = self.empty(2, *self.of_runs())
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
            *launch.sizes, STEP=WALK.rows, **launch.options, OUTPUTS=True,
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
        batch, T, H = self._do.shape
        self._states = launch.empty(batch, cdiv(T, WALK.rows), H, launch.sizes[3])
        walk_kernel[launch.grid](
            *launch.operands(), self.doc_ids, None, None, None, true_starts, None, self._states, *launch.sizes,
            STEP=WALK.rows, **launch.options, OUTPUTS=False,
        )  # fmt: skip

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self.state_grad.shape)
        launch, (ends, suffix, *_) = self._launch, self._summaries
        batch, _, H = self._do.shape
        dx, ddt = torch.empty_like(launch.x), torch.empty_like(launch.dt)
        dB, dC = launch.empty(2, launch.grid[0], *launch.B.shape)
        dA_log, of_channels = launch.empty(*launch.of_runs()), launch.empty(batch, launch.grid[1], 2, H)
        kept = launch.empty(batch, launch.grid[1], WALK.rows // _GRAD_ROWS, *launch.sizes[2:])
        grads_kernel[launch.grid](
            *launch.operands(), self._do, self.doc_ids, self._states, kept, ends, suffix, incoming_grad.contiguous(),
            dx, ddt, dB, dC, dA_log, of_channels, *launch.sizes,
            STEP=WALK.rows, **(launch.options | {"ROWS": _GRAD_ROWS}),
        )  # fmt: skip
        grads = dx, ddt, dA_log.sum((0, 1)), dB.sum(0), dC.sum(0), *of_channels.sum((0, 1))
        return tuple(grad.to(like.dtype) for grad, like in zip(grads, self._operands, strict=True))


def _saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, _, A_log, *_ = operands
    batch, T, H = x.shape
    return (x.new_empty((batch, cdiv(T, _walk(A_log.shape[1]).run(batch, T, H)), *A_log.shape), dtype=torch.float32),)


CUDA = Passes(_KernelForward, _KernelBackward, _saved_like, needs_incoming=False)
