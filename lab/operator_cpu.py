"""Question: how much faster is the chunked operator than the recurrence on a CPU, and what memory does it take?
Command: python -m lab.operator_cpu
Date: 2026-11-21, 2 CPU cores, torch 2.13; by an earlier version, without warm-up
Answer: 60.7 ms forward + backward of 4,096 tokens, 337 times as fast as the recurrence as printed in papers and 22
    times as fast as the oracle's tuned loop; 116 → 1,540 MiB from 4k to 64k tokens.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tests.support.recurrence import naive_gla
from zeco_train.bench.case import Case
from zeco_train.bench.check import check_results
from zeco_train.bench.config import RunsConfig
from zeco_train.bench.report import Report, time_columns
from zeco_train.bench.runner import Runner, Subject
from zeco_train.bench.samples import Row
from zeco_train.bench.session import Session
from zeco_train.distributed.device import Device
from zeco_train.errors import ConfigError
from zeco_train.ops.gla import chunked
from zeco_train.ops.seam import fold
from zeco_train.system.environment import process_memory
from zeco_train.system.numbers import check_least
from zeco_train.system.signals import run_command

BATCH, HEADS, KEY_DIM, VALUE_DIM = 1, 4, 64, 128
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg")
CHECK_TOKENS = 1000
MEMORY_TOKENS = (4096, 8192, 16384, 32768, 65536)
# fp64 errors are rounding (typically 1e-15); fp32 ones grow with the square root of the 4096 terms of a sum
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
WANTED_RATIO = 30.0
CHUNKED = "chunked, forward + backward"
COLUMNS = {
    "variant": ("variant", "<54"),
    "tokens": ("tokens", ">6"),
    "relative_error": ("error", ">8:.1e"),
    **time_columns("ms", 1, ("median", "min", "max")),
    "ratio": ("/ chunked", ">9:.1f"),
    "peak_mib": ("peak MiB", ">9:.1f"),
}


@dataclass
class OperatorCpuConfig(RunsConfig):
    """Settings of case `operator_cpu`.

    Attributes:
        tokens: sequence length of the timings.
        threads: torch threads.
    """

    device: Device = Device.cpu
    warmup: int = 1
    runs: int = 5
    tokens: int = 4096
    threads: int = 2

    def validate(self) -> None:
        """See `CaseConfig.validate`."""
        super().validate()
        check_least(self, tokens=1, threads=1)
        if self.device is not Device.cpu:
            raise ConfigError("device", self.device.name, "must be cpu")


def run(config: OperatorCpuConfig, session: Session) -> Report:
    """Check, then measure, on one rank; results are in the report's folder.

    Raises:
        WrongResultError: before anything is timed.
    """
    if session.world_size > 1:
        raise ConfigError("ranks", session.world_size, "this case is of one; start it without torchrun")
    torch.set_num_threads(config.threads)
    report = Report("operator_cpu", config, session, COLUMNS)
    shape = f"B {BATCH}, H {HEADS}, K {KEY_DIM}, V {VALUE_DIM}"
    # Note the load: threads that share processors with other processes wait for each other at every operation.
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    report.note(f"{shape}; fp32; {torch.backends.cpu.get_cpu_capability()}, {load}; errors are relative to naive_gla")
    report.add(check_all())
    rows = time_all(config, session)
    report.add(rows)
    for row in rows[1:]:
        if "ONLY" not in row["variant"]:
            verdict = "at least" if row["ratio"] >= WANTED_RATIO else "NOT"
            report.note(f"{CHUNKED}: {verdict} {WANTED_RATIO:.0f} times as fast as {row['variant']}")
    report.add(measure_memory(config.threads))
    return report


def make_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v, g, do, with decays from none to e^-0.2 per token."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, num_tokens, HEADS)
    q, k = (torch.randn(*shape, KEY_DIM, dtype=dtype, generator=generator) for _ in range(2))
    v, do = (torch.randn(*shape, VALUE_DIM, dtype=dtype, generator=generator) for _ in range(2))
    g = torch.rand(*shape, KEY_DIM, dtype=dtype, generator=generator).mul_(-0.2)
    return q, k, v, g, do


@torch.no_grad()
def run_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """All phases on one rank, forward and backward, as in training: chunk states are computed twice."""
    operands, scale = (q, k, v, g), q.shape[-1] ** -0.5
    forward = chunked.CHUNKED.forward(operands, scale, None)
    zero = torch.zeros_like(forward.state)
    forward.overlap()
    o = forward.outputs(zero)
    final_state = fold(forward.state, forward.transition, zero)
    del forward
    backward = chunked.CHUNKED.backward(operands, do, (), zero, scale, None)
    backward.overlap()
    grads = backward.operand_grads(zero)
    return o, final_state, *grads


def run_naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """`naive_gla` and its autograd."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, g)]
    o, final_state = naive_gla(inputs[0], inputs[1], inputs[2], inputs[3])
    return o.detach(), final_state.detach(), *torch.autograd.grad(o, inputs, do)


def run_indexed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """The recurrence as printed in papers, under autograd."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, g)]
    q, k, v, g = inputs
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    o = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append((q[:, t, :, :, None] * state).sum(-2))
    output = torch.stack(o, dim=1) * q.shape[-1] ** -0.5
    return output.detach(), state.detach(), *torch.autograd.grad(output, inputs, do)


@torch.no_grad()
def run_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """The recurrence with a single state, overwritten in place: outputs only, no gradients."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    decay, o = g.exp()[..., None], torch.empty_like(v)
    queries, keys, values = (q * q.shape[-1] ** -0.5)[..., None, :], k[..., None], v[..., None, :]
    for t in range(q.shape[1]):
        state.mul_(decay[:, t]).addcmul_(keys[:, t], values[:, t])
        torch.matmul(queries[:, t], state, out=o[:, t, :, None, :])
    return o, state


def check_all() -> list[Row]:
    """Check all variants against `naive_gla` in fp64, at a length that is not a multiple of a chunk.

    Raises:
        WrongResultError: a result is wrong.
    """
    inputs = make_inputs(CHECK_TOKENS, torch.float64)
    expected = run_naive(*inputs)
    runs: list[tuple[str, Callable[..., tuple[Tensor, ...]], torch.dtype]] = [
        ("chunked fp64", run_chunked, torch.float64),
        ("chunked fp32", run_chunked, torch.float32),
        ("indexed fp64", run_indexed, torch.float64),
        ("in-place loop fp64 (forward)", run_in_place, torch.float64),
    ]
    rows = []
    for name, function, dtype in runs:
        found = function(*[x.to(dtype) for x in inputs])
        results = {result: (x, y) for result, x, y in zip(NAMES, found, expected, strict=False)}
        errors = check_results(name, 0, results, TOLERANCE[dtype])
        rows.append({"variant": name, "tokens": CHECK_TOKENS, "relative_error": max(errors.values()), "errors": errors})
    return rows


def time_all(config: OperatorCpuConfig, session: Session) -> list[Row]:
    """One row per variant, the chunked operator first; the loop that autograd makes quadratic runs once."""
    inputs = make_inputs(config.tokens, torch.float32)
    subjects = [
        Subject(CHUNKED, partial(run_chunked, *inputs)),
        Subject("naive_gla, tuned, under autograd, forward + backward", partial(run_naive, *inputs)),
        Subject("in-place loop without autograd, FORWARD ONLY", partial(run_in_place, *inputs)),
    ]
    once = Subject("naive recurrence under autograd, forward + backward", partial(run_indexed, *inputs))
    rows = Runner(config, session).rows(subjects)
    rows += Runner(replace(config, runs=1, warmup=1), session).rows([once])
    least = rows[0]["median_ms"]
    return [{**row, "tokens": config.tokens, "ratio": row["median_ms"] / least} for row in rows]


def measure_memory(threads: int) -> list[Row]:
    """Peak memory of forward + backward beyond the inputs at each length, each in its own process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, torch.set_num_threads, (threads,), maxtasksperchild=1) as pool:
        peaks = pool.map(peak_memory, MEMORY_TOKENS, chunksize=1)
    return [
        {
            "variant": CHUNKED,
            "tokens": tokens,
            "peak_mib": peak / 2**20,
            "note": f"{peak / tokens / 1024:.1f} KiB a token",
        }
        for tokens, peak in zip(MEMORY_TOKENS, peaks, strict=True)
    ]


def peak_memory(num_tokens: int) -> int:
    """Peak memory in bytes of a forward + backward beyond its inputs, in this process, which must be fresh."""
    run_chunked(*make_inputs(64, torch.float32))  # one-time allocations of libraries
    inputs = make_inputs(num_tokens, torch.float32)
    before = _peak()
    run_chunked(*inputs)
    return _peak() - before


def _peak() -> int:
    # ru_maxrss survives exec: a child starts with its parent's. VmHWM is the process's own.
    if (peak := process_memory("VmHWM")) is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


CASE = Case(OperatorCpuConfig, run)
main = CASE.main

if __name__ == "__main__":
    run_command("lab.operator_cpu")
