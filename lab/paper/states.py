"""Question: what do local states that are kept for the backward pass cost in bytes, and what do they save in time?
Command: python -m lab.paper.states [--tokens 16384] [--runs N] [--name NAME]
Date: 2026-11-27; bytes and times of PyTorch's passes on a CPU, bytes of the kernels from the shapes that they promise,
    and of launched kernels on an H200; 2026-11-28, in CUDA graphs
Answer: lab/results/paper_states_{cpu,1xh200_16384,graph_1xh200}.json, docs/papers.md. Their gradients are equal
    to 1e-13 in fp64 (`tests/ops/test_passes.py`, `tests/ops/test_kernels.py`).

The switch is `zeco_train.ops.passes.keeping_states`. One layer of gla, 16 heads of 64 × 128, a batch of one; bytes are
those that autograd keeps, by the hooks of saved tensors, each storage once. On a GPU times are of the kernels in bf16,
launched one by one and timed by the host: it bounds them where kernels take less time than it needs to launch them, as
those of 16,384 tokens on an H200 do. So the same passes are also replayed in a CUDA graph, both switches in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.paper import store
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import Target, assume
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import keeping_states
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.command import Parser, docstring, errors_in_a_line

HEADS, KEY_DIM, VALUE_DIM = 16, 64, 128
# Passes in a CUDA graph.
GRAPHED = 10
SWITCHES: dict[str, Callable[[], Any]] = {"computed again": contextlib.nullcontext, "kept": keeping_states}


def operands(tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and log-decays, which need gradients."""
    generator = torch.Generator().manual_seed(0)
    dims = (KEY_DIM, KEY_DIM, VALUE_DIM)
    found = [torch.randn(1, tokens, HEADS, dim, generator=generator).to(device, dtype) for dim in dims]
    found.append((-0.1 * torch.rand(1, tokens, HEADS, KEY_DIM, generator=generator)).to(device))
    return [x.requires_grad_() for x in found]


def saved_bytes(leaves: Sequence[Tensor], position: SequencePosition) -> int:
    """What autograd keeps of a forward pass."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o, _ = mix("gla", leaves, position)
    del o
    return sum(storages.values())


def seconds(leaves: Sequence[Tensor], position: SequencePosition, runs: int) -> tuple[float, float]:
    """Fastest and median of forward + backward, the first run left out."""
    times = []
    for _ in range(runs + 1):
        _settle()
        began = time.perf_counter()
        o, _ = mix("gla", leaves, position)
        torch.autograd.grad(o.sum(), leaves)
        _settle()
        times.append(time.perf_counter() - began)
    return min(times[1:]), statistics.median(times[1:])


def in_graphs(leaves: Sequence[Tensor], position: SequencePosition, runs: int) -> dict[str, list[float]]:
    """Milliseconds of forward + backward by switch, of ten in a CUDA graph, by the device's clock.

    Both switches take turns, so that a change of the GPU's clock affects both.
    """
    graphs = {}
    for name, switch in SWITCHES.items():
        graph = torch.cuda.CUDAGraph()
        with switch():
            gradients(leaves, position)
            _settle()
            with torch.cuda.graph(graph):
                for _ in range(GRAPHED):
                    o, _ = mix("gla", leaves, position)
                    torch.autograd.grad(o, leaves, torch.ones_like(o))
        graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(runs):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            _settle()
            times[name].append(began.elapsed_time(ended) / GRAPHED)
    return times


def gradients(leaves: Sequence[Tensor], position: SequencePosition) -> list[Tensor]:
    """Of the sum of the outputs, in fp64."""
    o, _ = mix("gla", leaves, position)
    return [grad.double() for grad in torch.autograd.grad(o.sum(), leaves)]


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def promised_bytes(tokens: int) -> int:
    """What the kernels of a Hopper GPU save beside their operands, in bf16, from shapes alone."""
    like = [torch.empty_like(x, device="meta") for x in operands(1, torch.bfloat16, "cpu")]
    like = [x.new_empty((1, tokens, *x.shape[2:])) for x in like]
    with assume(Target("cuda", (9, 0))):
        saved = OPERATORS["gla"].select(like).saved_like(like)
    return sum(x.nbytes for x in saved)


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = Parser(
        prog="python -m lab.paper.states",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--name", help="of the file in lab/results; default: by machine and tokens")
    parser.add_argument("--folder", type=Path, default=store.RESULTS)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = operands(options.tokens, dtype, device)
    position = SequencePosition((0, options.tokens), exchange=local_exchange())
    rows: list[dict[str, Any]] = []
    expected = gradients(leaves, position)
    for name, switch in SWITCHES.items():
        with switch():
            fastest, median = seconds(leaves, position, options.runs)
            row = {"states": name, "tokens": options.tokens, "fastest_ms": 1e3 * fastest, "median_ms": 1e3 * median}
            pairs = zip(gradients(leaves, position), expected, strict=True)
            row["difference"] = max(((found - one).norm() / one.norm()).item() for found, one in pairs)
            rows.append(row | {"saved_mb": saved_bytes(leaves, position) / 1e6})
            rows.append({"states": name, "kernel_tokens": 16_384, "kernel_saved_mb": promised_bytes(16_384) / 1e6})
    for name, found in (in_graphs(leaves, position, options.runs) if device == "cuda" else {}).items():
        row = {"states": name, "graph_tokens": options.tokens, "graph_median_ms": statistics.median(found)}
        rows.append(row | {"graph_fastest_ms": min(found), "graph_slowest_ms": max(found)})
    print("\n".join(json.dumps(row) for row in rows), flush=True)
    command = f"python -m lab.paper.states --tokens {options.tokens} --runs {options.runs}"
    machine = "a CPU core" if device == "cpu" else store.machine_of(1)
    of_machine = "cpu" if device == "cpu" else store.in_names(machine)
    of_tokens = "" if options.tokens == parser.get_default("tokens") else f"_{options.tokens}"
    name = options.name or f"paper_states_{of_machine}{of_tokens}"
    store.write(options.folder / f"{name}.json", command, machine, rows, dtype=str(dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
