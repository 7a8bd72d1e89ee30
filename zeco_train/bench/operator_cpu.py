"""The chunked operator against the naive recurrence on a CPU: correctness, then time, then memory.

    python -m zeco_train.bench.operator_cpu [--json FILE]

Baselines, of which only the first two do the same work as the chunked operator (outputs and all gradients):
- the naive recurrence as papers print it, indexing `q[:, t]`: autograd answers every index with zeros for all tokens;
- `naive_gla`, the oracle: the same loop tuned, which splits the tokens once and takes one product per output;
- an in-place loop without autograd, forward only: what Python costs where nothing is kept for a gradient.
Runs of all of them alternate, so that a machine that slows down slows all; medians are compared.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.bench.operator_cpu")

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zeco_train.errors import ZecoError
from zeco_train.ops.gla import chunked
from zeco_train.ops.gla.naive import naive_gla
from zeco_train.ops.transition import fold
from zeco_train.system.arguments import Parser, user_path
from zeco_train.system.environment import processor
from zeco_train.system.paths import check_output_file, warn_of_replacing

BATCH, HEADS, KEY_DIM, VALUE_DIM = 1, 4, 64, 128
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg")
MEMORY_TOKENS = (4096, 8192, 16384, 32768, 65536)
# fp64 errors are rounding (1e-15 as a rule); fp32 ones grow with the square root of the 4096 terms of a sum
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
WANTED_RATIO = 30.0
CHUNKED = "chunked, forward + backward"


def make_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v, g, do, with decays from none to e^-0.2 a token."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, num_tokens, HEADS)
    q, k = (torch.randn(*shape, KEY_DIM, dtype=dtype, generator=generator) for _ in range(2))
    v, do = (torch.randn(*shape, VALUE_DIM, dtype=dtype, generator=generator) for _ in range(2))
    g = torch.rand(*shape, KEY_DIM, dtype=dtype, generator=generator).mul_(-0.2)
    return q, k, v, g, do


@torch.no_grad()
def run_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """All phases on one rank, forward and backward, as training calls them: chunk states are made twice."""
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
    """The recurrence as papers print it, and its autograd."""
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
    """The recurrence with one state that is overwritten: outputs only, no gradient can be taken."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    decay, o = g.exp()[..., None], torch.empty_like(v)
    queries, keys, values = (q * q.shape[-1] ** -0.5)[..., None, :], k[..., None], v[..., None, :]
    for t in range(q.shape[1]):
        state.mul_(decay[:, t]).addcmul_(keys[:, t], values[:, t])
        torch.matmul(queries[:, t], state, out=o[:, t, :, None, :])
    return o, state


def relative_errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, float]:
    """Largest error of each result over its largest element."""
    pairs = zip(NAMES, found, expected, strict=False)
    return {name: float((x - y).abs().max() / y.abs().max()) for name, x, y in pairs}


def check_correctness() -> dict[str, dict[str, float]]:
    """Compare everything with `naive_gla`: fp64 on a sequence that no chunk divides, fp32 also against fp64.

    Raises:
        SystemExit: a result is wrong; nothing is timed then.
    """
    report = {}
    inputs = make_inputs(1000, torch.float64)
    expected = run_naive(*inputs)
    runs: list[tuple[str, Callable[..., tuple[Tensor, ...]], torch.dtype]] = [
        ("chunked fp64", run_chunked, torch.float64),
        ("chunked fp32", run_chunked, torch.float32),
        ("indexed fp64", run_indexed, torch.float64),
        ("in-place loop fp64 (forward)", run_in_place, torch.float64),
    ]
    for name, function, dtype in runs:
        errors = relative_errors(function(*[x.to(dtype) for x in inputs]), expected)
        print(f"  {name:30s}" + "  ".join(f"{key} {error:.1e}" for key, error in errors.items()), flush=True)
        if not max(errors.values()) <= TOLERANCE[dtype]:
            raise SystemExit(f"{name} differs from the oracle by more than {TOLERANCE[dtype]:.0e}: not timed")
        report[name] = errors
    return report


def time_all(num_tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each run: median, min, max and number of runs. A round is five chunked runs and one of each other."""
    inputs = make_inputs(num_tokens, torch.float32)
    plan: list[tuple[str, Callable[..., tuple[Tensor, ...]], int, int]] = [
        (CHUNKED, run_chunked, 5, rounds),
        ("naive recurrence under autograd, forward + backward", run_indexed, 1, 1),
        ("naive_gla, tuned, under autograd, forward + backward", run_naive, 1, rounds),
        ("in-place loop without autograd, FORWARD ONLY", run_in_place, 1, rounds),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, *_ in plan}
    run_chunked(*inputs), run_in_place(*inputs)
    for turn in range(rounds):
        for name, function, repeats, last in plan:
            for _ in range(repeats if turn < last else 0):
                start = time.perf_counter()
                function(*inputs)
                seconds[name].append(time.perf_counter() - start)
    report = {}
    for name, runs in seconds.items():
        report[name] = {"median": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": len(runs)}
        row = report[name]
        print(
            f"  {name:54s}{row['median'] * 1e3:10.1f} ms   (min {row['min'] * 1e3:.1f}, max {row['max'] * 1e3:.1f}, "
            f"{len(runs)} run{'s' if len(runs) > 1 else ''})",
            flush=True,
        )
    return report


def peak_memory(num_tokens: int) -> int:
    """Bytes that a forward + backward needs beyond its inputs, in this process, which must be fresh."""
    run_chunked(*make_inputs(64, torch.float32))  # what libraries allocate once
    inputs = make_inputs(num_tokens, torch.float32)
    before = _peak_kib()
    run_chunked(*inputs)
    return (_peak_kib() - before) * 1024


def _peak_kib() -> int:
    # ru_maxrss outlives exec: a child starts with the size of its parent. VmHWM is the process's own.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def measure_memory() -> dict[int, int]:
    """Peak bytes beyond the inputs at each length, each in a process of its own."""
    peaks: dict[int, int] = {}
    for num_tokens in MEMORY_TOKENS:
        command = [sys.executable, "-m", "zeco_train.bench.operator_cpu", "--peak-memory-of", str(num_tokens)]
        peaks[num_tokens] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        growth = f"   × {peaks[num_tokens] / peaks[num_tokens // 2]:.2f}" if num_tokens // 2 in peaks else ""
        per_token = peaks[num_tokens] / num_tokens / 1024
        print(
            f"  {num_tokens:6d} tokens {peaks[num_tokens] / 2**20:8.1f} MiB   {per_token:.1f} KiB a token{growth}",
            flush=True,
        )
    return peaks


def describe_machine() -> dict[str, str | int]:
    """Versions, threads, processor and what else runs on it."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        # two threads that share two processors with others wait for each other at every operation
        "load": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors",
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring. Returns the exit status."""
    try:
        return _run(_parse(arguments))
    except ZecoError as error:
        print(error.line, file=sys.stderr)
        return error.exit_code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description="The chunked operator against the naive recurrence on a CPU.")
    parser.add_argument("--json", type=user_path, metavar="FILE", help="write the results to FILE as well")
    parser.add_argument("--tokens", type=int, default=4096, help="sequence length of the timings")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-memory-of", type=int, metavar="TOKENS", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.json is not None:
        check_output_file("--json", parsed.json)
        warn_of_replacing([parsed.json])
    return parsed


def _run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    if arguments.peak_memory_of:
        print(peak_memory(arguments.peak_memory_of))
        return 0

    machine = describe_machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    shape = f"B {BATCH}, H {HEADS}, K {KEY_DIM}, V {VALUE_DIM}"
    print(f"Largest error relative to naive_gla in fp64, {shape}, T 1000:", flush=True)
    errors = check_correctness()
    print(f"Time, {shape}, T {arguments.tokens}, fp32:", flush=True)
    seconds = time_all(arguments.tokens, arguments.rounds)
    ratios = {name: seconds[name]["median"] / seconds[CHUNKED]["median"] for name in seconds if name != CHUNKED}
    for name, ratio in ratios.items():
        verdict = (
            "" if "ONLY" in name else f": {'at least' if ratio >= WANTED_RATIO else 'NOT'} {WANTED_RATIO:.0f} times"
        )
        print(f"  {CHUNKED}, is {ratio:6.1f} times as fast as {name}{verdict}")
    print(f"Peak memory of forward + backward beyond the inputs, chunked, {shape}, fp32:", flush=True)
    memory = measure_memory()
    if arguments.json:
        report = {"machine": machine, "errors": errors, "seconds": seconds, "ratios": ratios, "peak_bytes": memory}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0
