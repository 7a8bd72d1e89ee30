"""Question: how much slower than kernels are PyTorch's passes, forward + backward in bf16?
Command: python -m lab.campaigns.slow_paths zeco_train/ops/slow_paths.json; --dry anywhere: tiny, PyTorch on both sides
Date: 2026-11-25, 951d1e4, one GPU
Answer: zeco_train/ops/slow_paths.json. What does not begin within `--seconds` is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from zeco_train.bench.operator import Attention, Inputs, Shape
from zeco_train.bench.variants import BENCHED
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.slow_paths import SlowDown, SlowDowns
from zeco_train.ops.softmax import attention, sdpa
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.environment import environment
from zeco_train.training.config import Dtype

SOFTMAX = "softmax"
# The largest head dims first: nearest to those without kernels. As many heads as fill a width of 2,048.
_DIMS, _WIDTH, _TOKENS, _RUNS = ((256, 256), (128, 128)), 2048, (4096, 16_384), 5
_BUSY_CYCLES = 20_000_000  # about 10 ms


def main(arguments: Sequence[str] | None = None) -> SlowDowns:
    """Measure, print a line each, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m lab.campaigns.slow_paths")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--dry", action="store_true")
    parsed = parser.parse_args(arguments)
    device = torch.device("cpu" if parsed.dry else "cuda")
    facts = environment(device)
    source = f"{facts['device_name']}, {datetime.now(UTC):%Y-%m-%d}, commit {facts['commit'][:7]}"
    shapes = _shapes(((16, 16),), 32, (70,)) if parsed.dry else _shapes(_DIMS, _WIDTH, _TOKENS)
    table = SlowDowns(source, tuple(_measure(shapes, device, time.monotonic() + parsed.seconds)))
    write(table, parsed.file)
    return table


def write(table: SlowDowns, path: Path) -> None:
    rows = ",\n    ".join(json.dumps(asdict(row)) for row in table.rows)
    path.write_text(f'{{\n  "source": {json.dumps(table.source)},\n  "rows": [\n    {rows}\n  ]\n}}\n')


def _shapes(dims: Sequence[tuple[int, int]], width: int, tokens: Sequence[int]) -> list[Shape]:
    names = (*BENCHED, SOFTMAX)
    return [
        Shape(width // key_dim, key_dim, value_dim, count, name, decay="retention" if name == "fixed_decay" else None)
        for (key_dim, value_dim), name, count in itertools.product(dims, names, tokens)
    ]


def _measure(shapes: Sequence[Shape], device: torch.device, deadline: float) -> Iterator[SlowDown]:
    for shape in shapes:
        if time.monotonic() > deadline:
            print(f"{shape}: not measured, out of time", flush=True)
            continue
        inputs = Inputs.random(shape, Dtype.bf16, 0, device)
        step = _operator(shape, device)
        kernels = _milliseconds(step, inputs, device)
        with _in_pytorch(shape.operator, inputs):
            pytorch = _milliseconds(step, inputs, device)
        print(f"{shape}: {pytorch:.3f} / {kernels:.3f} ms = {pytorch / kernels:.3g}", flush=True)
        ratio = float(f"{pytorch / kernels:.3g}")
        yield SlowDown(shape.operator, "bf16", shape.key_dim, shape.value_dim, shape.tokens, ratio)


def _operator(shape: Shape, device: torch.device) -> Attention:
    position = SequencePosition((0, shape.tokens), exchange=local_exchange())
    if shape.operator != SOFTMAX:
        return lambda *operands: mix(shape.operator, operands, position)[0]
    empty, scale = (StateInput(), StateInput()), shape.key_dim**-0.5
    return lambda q, k, v: attend_at(q, k, v, scale, position, empty)[0]


def _in_pytorch(name: str, inputs: Inputs) -> AbstractContextManager[object]:
    """While entered, PyTorch serves the operator."""
    if inputs.do.device.type == "cpu":
        return nullcontext()
    if name == SOFTMAX:
        return mock.patch.object(attention, "_kernels", return_value=sdpa)
    return mock.patch.dict(OPERATORS, {name: replace(OPERATORS[name], cuda=None)})


def _milliseconds(step: Attention, inputs: Inputs, device: torch.device) -> float:
    def run() -> None:
        inputs.forget_grads()
        step(*inputs.operands.values()).backward(inputs.do)

    run()
    return median(_timed(run, device) for _ in range(_RUNS))


def _timed(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is busy while the host launches, which a replayed step does not wait for.
    torch.cuda._sleep(_BUSY_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    main()
