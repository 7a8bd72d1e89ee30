"""Question: how fast, and how exact, are the operators' kernels at shapes that others published?
Command: python -m lab.campaigns.published_shapes FOLDER [--only TEXT,TEXT] [--tokens 16384] [--peer fla]
    [--no-variations] [--bytes]
Date: 27 November 2026, H100; 28 November, the whole table on an H200
Answer: docs/benchmarks.md has the newest table. Each row: forward + backward in a CUDA graph (median, p10, p90),
    launched one by one, and by a peer's function (fla's are given q and k expanded in the call where heads share
    them; FlashQLA not installed, which fla would call); the largest error against fp64 (1,000 tokens, two documents;
    `operator_shapes.errors_of`); the time, relative to the first, of other decays (none; at most e^-50), of β up to 2,
    and per token of 8 sequences of 2,048 tokens, of 4,096 tokens, of 64 documents and of one sequence of 2,048; what a
    launched call moves to and from memory, by Nsight Compute's counters, relative to `least_bytes`. FOLDER gets them
    as JSON, and each kernel's registers, spills and shared memory. "OTHER BITS" in a row: repeated calls gave different
    results.

A process a row compiles the kernels and checks their results, several at a time; then all rows are timed in turn.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from lab.campaigns.operator_shapes import Case, errors_of, inputs
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import PeerFunction
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

_REPLAYS, _CALLS = 40, 20


@dataclass(frozen=True)
class Shape:
    """A published shape: G heads of keys, H of values, K and V channels."""

    name: str
    operator: str
    G: int
    H: int
    K: int
    V: int

    def __str__(self) -> str:
        heads = str(self.H) if self.G == self.H else f"{self.H} ({self.G})"
        return f"{self.name}: {self.operator} {heads} × {self.K} × {self.V}"


SHAPES = (
    Shape("Qwen3-Next", "gated_delta", 16, 32, 128, 128),
    Shape("16 heads", "gated_delta", 16, 16, 128, 128),
    Shape("gated_deltanet_1b", "gated_delta", 12, 12, 128, 256),
    Shape("GDN 1.3B", "gated_delta", 6, 6, 256, 512),
    Shape("OLMo Hybrid 7B", "gated_delta", 30, 30, 96, 192),
    Shape("Kimi Linear", "kda", 32, 32, 128, 128),
    Shape("DeltaNet 1.3B", "delta", 16, 16, 128, 128),
    Shape("RetNet 1.3B", "fixed_decay", 8, 8, 256, 512),
    Shape("Mamba-2 1.3B", "scalar_decay", 1, 64, 128, 64),
    Shape("Nemotron-H", "scalar_decay", 8, 128, 128, 64),
    Shape("Bamba, Falcon-H1", "scalar_decay", 1, 128, 256, 64),
    Shape("GLA 1.3B", "gla", 4, 4, 256, 512),
    Shape("HGRN2 1.3B", "gla", 16, 16, 128, 128),
    Shape("gla_1b", "gla", 16, 16, 64, 128),
    Shape("GSA 1.3B", "gsa", 4, 4, 64, 512),
    Shape("Based", "fixed_decay", 16, 16, 273, 64),
    Shape("Based, its features padded", "fixed_decay", 16, 16, 288, 64),  # as models of this package do
    Shape("retnet_1b", "fixed_decay", 16, 16, 128, 256),
)


def case_of(shape: Shape, B: int, T: int, decays: str = "initial", beta: float = 0.5, documents: int = 1) -> Case:
    """A call of a shape; `documents` of equal length."""
    borders = tuple(range(0, T + 1, T // documents)) if documents > 1 else ()
    return Case(
        shape.operator, B, T, shape.G, shape.H, shape.K, shape.V, "bf16", decays, "contiguous", borders, beta=beta
    )


def call_of(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """Its forward and backward pass, without carries: the outputs and all gradients."""
    values = inputs(case)
    names = OPERATORS[case.operator].operands
    leaves = [values[name].requires_grad_(name != "log_decay") for name in names]
    wanted = [x for x in leaves if x.requires_grad]
    documents = [list(case.documents)] if case.documents else None
    position = SequencePosition((0, case.T), documents=documents, exchange=local_exchange()).on(leaves[0])

    def call() -> tuple[Tensor, ...]:
        o, _ = mix(case.operator, leaves, position)
        return o.detach(), *torch.autograd.grad(o, wanted, values["do"])

    return call


def differs(case: Case, calls: int = 4) -> bool:
    """Whether any of several calls gives other bits than the first."""
    call = call_of(case)
    first = call()
    return not all(all(map(torch.equal, first, call())) for _ in range(calls))


def milliseconds(function: Callable[[], object], count: int) -> list[float]:
    """Of each of `count` calls, by events on the device."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    function()
    for event in events:
        event.record()
        function()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def replayed(call: Callable[[], object]) -> list[float]:
    """Milliseconds of replays of a call's graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return milliseconds(graph.replay, _REPLAYS)


def peer_milliseconds(case: Case, name: str) -> float | str:
    """In a graph, or launched where the call waits for the device; or why it does not run."""
    operator = OPERATORS[case.operator]
    peer = next((peer for peer in operator.peers if peer.decay in (None, "retention")), None)
    if name == "flash_qla" and case.operator == "gated_delta":
        peer = PeerFunction(name, "chunk_gated_delta_rule")
    if peer is None or not peer.module.startswith(name):
        return "–"
    function = getattr(importlib.import_module(peer.module), peer.function)
    values = inputs(case)
    names = [name for name in operator.operands if name != "log_decay"]
    leaves = [values[name].detach().requires_grad_() for name in names]
    repeats = case.H // case.G if peer.module.startswith("fla.") else 1

    def call() -> object:
        full = [x.repeat_interleave(repeats, 2) if name in "qk" else x for name, x in zip(names, leaves, strict=True)]
        operands = [x.flatten(2) for x in full] if peer.joins_heads else full
        o: Tensor = function(**dict(zip(names, operands, strict=True)), **dict(peer.options))[0]
        return torch.autograd.grad(o, leaves, values["do"].view(o.shape))

    try:
        call()
        try:
            return median(replayed(call))
        except torch.AcceleratorError:
            return median(milliseconds(call, _CALLS))
    except Exception as error:
        return f"refuses: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"


def registers(known: set[int]) -> Iterator[dict[str, Any]]:
    """Of each kernel that this process has launched and that is not known; it is afterwards."""
    import triton

    for name, module in list(sys.modules.items()):
        if name.startswith("zeco_train."):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction) and kernel.module == name:
                    for cache in kernel.device_caches.values():
                        for found in cache[0].values():
                            if id(found) in known or not hasattr(found, "n_regs"):  # compiled ahead, not launched
                                continue
                            known.add(id(found))
                            yield {
                                "kernel": kernel.__name__, "registers": found.n_regs, "spills": found.n_spills,
                                "shared": found.metadata.shared, "warps": found.metadata.num_warps,
                                "stages": found.metadata.num_stages,
                            }  # fmt: skip


def variations(shape: Shape, T: int, base: float) -> dict[str, float]:
    """Times relative to the shape's own, per token."""
    cases = {
        "no decay": case_of(shape, 1, T, "none"),
        "e^-50": case_of(shape, 1, T, "vanishing"),
        "β to 2": case_of(shape, 1, T, beta=1.0),
        "8 × 2k": case_of(shape, 8, 2048),
        "4k": case_of(shape, 1, 4096),
        "64 documents": case_of(shape, 1, T, documents=64),
        "2k": case_of(shape, 1, 2048),
    }
    has_decays = "g" in OPERATORS[shape.operator].operands
    is_delta = "beta" in OPERATORS[shape.operator].operands
    left_out = {*(() if has_decays else ("no decay", "e^-50")), *(() if is_delta else ("β to 2",))}
    return {
        name: median(replayed(call_of(case))) / base * T / (case.B * case.T)
        for name, case in cases.items()
        if name not in left_out
    }


def least_bytes(shape: Shape, T: int) -> int:
    """What a forward and a backward pass have to move, and states by chunks of 64 tokens.

    The operands twice, the output, its gradient and all other gradients once; six times the states at chunks' borders
    in bf16, and for delta rules as often the chunks' 64 × 64 matrices.
    """
    case = case_of(shape, 1, T)
    leaves = [inputs(case)[name] for name in (*OPERATORS[shape.operator].operands, "do")]
    *operands, do = (x.numel() * x.element_size() for x in leaves)
    chunk_states = -(-T // 64) * shape.H * (shape.K * shape.V + ("beta" in OPERATORS[shape.operator].operands) * 64**2)
    return 3 * sum(operands) + 2 * do + 6 * 2 * chunk_states


def counted_bytes(command: Sequence[str]) -> list[dict[str, float]]:
    """Bytes to and from memory by kernel, by Nsight Compute, for each shape whose call `command` launches once."""
    metrics = "dram__bytes_read.sum,dram__bytes_write.sum"
    ncu = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off", "--target-processes", "all"]
    ncu += ["--clock-control", "none", "--cache-control", "none", "--metrics", metrics]
    done = subprocess.run([*ncu, *command], stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    found: list[dict[str, float]] = []
    begun = None
    for row in csv.DictReader(lines[header:]):
        name = row["Kernel Name"]
        if "spin" not in name:
            found[-1][name] = found[-1].get(name, 0.0) + float(row["Metric Value"].replace(",", ""))
        elif row["ID"] != begun:
            begun = row["ID"]
            found.append({})
    return found


def launch_once(shapes: Sequence[Shape], T: int) -> None:
    """A call of each shape for a profiler, which sees a kernel that waits before each."""
    for shape in shapes:
        call = call_of(case_of(shape, 1, T))
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def check(shape: Shape, T: int) -> dict[str, Any]:
    """Errors against fp64, and whether calls give other bits."""
    errors = errors_of(case_of(shape, 1, 1000, documents=2))
    return {"errors": errors, "differs": differs(case_of(shape, 1, T))}


def measure(shape: Shape, arguments: argparse.Namespace, known: set[int]) -> dict[str, Any]:
    T = arguments.tokens
    times = replayed(call_of(case_of(shape, 1, T)))
    p10, *_, p90 = quantiles(times, n=10)
    row: dict[str, Any] = {
        "shape": str(shape), **asdict(shape), "tokens": T, "ms": median(times), "p10": p10, "p90": p90,
        "launched": median(milliseconds(call_of(case_of(shape, 1, T)), _CALLS)),
    }  # fmt: skip
    if arguments.peer:
        row[arguments.peer] = peer_milliseconds(case_of(shape, 1, T), arguments.peer)
    if not arguments.no_variations:
        row["relative"] = variations(shape, T, row["ms"])
    row["kernels"] = list(registers(known))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="shapes with one of these, between commas, in their line")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--peer", choices=["fla", "flash_qla"], help="its functions, too, which tune for minutes")
    parser.add_argument("--no-variations", action="store_true")
    parser.add_argument("--processes", type=int, default=8, help="that compile and check (default: 8)")
    parser.add_argument("--bytes", action="store_true", help="that calls move, by ncu's counters")
    parser.add_argument("--check", type=int, metavar="N", help="compile and check the kernels of one shape, and end")
    parser.add_argument("--launch-once", action="store_true", help="each shape, for a profiler, and end")
    arguments = parser.parse_args()
    if arguments.tokens % 64:
        parser.error(f"--tokens={arguments.tokens}: a multiple of 64, for 64 documents of equal length")
    shapes = [shape for shape in SHAPES if any(text in str(shape) for text in arguments.only.split(","))]
    if arguments.check is not None:
        print(json.dumps(check(SHAPES[arguments.check], arguments.tokens)))
        return 0
    if arguments.launch_once:
        launch_once(shapes, arguments.tokens)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lab.campaigns.published_shapes", str(arguments.out)]
    command += ["--tokens", str(arguments.tokens)]

    def checked(shape: Shape) -> dict[str, Any]:
        done = subprocess.run([*command, "--check", str(SHAPES.index(shape))], stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        failed = {"errors": {"the check failed": float("inf")}, "differs": False}
        found: dict[str, Any] = json.loads(lines[-1]) if done.returncode == 0 else failed
        return found

    with ThreadPoolExecutor(arguments.processes) as pool:
        found = dict(zip(shapes, pool.map(checked, shapes), strict=True))
    state = "name,clocks.sm,power.draw,temperature.gpu"
    moved: list[dict[str, float]] = []
    if arguments.bytes:
        moved = counted_bytes([*command, "--only", arguments.only, "--launch-once"])
    rows: list[dict[str, Any]] = []
    known: set[int] = set()
    for shape, by_kernel in zip_longest(shapes, moved):
        row = measure(shape, arguments, known) | found[shape]
        if by_kernel is not None:
            row |= {"bytes": by_kernel, "least_bytes": least_bytes(shape, arguments.tokens)}
        query = ["nvidia-smi", f"--query-gpu={state}", "--format=csv,noheader", "-i", "0"]
        row["device"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        rows.append(row)
        (arguments.out / "published_shapes.json").write_text(json.dumps(rows, indent=1))
        relative = "  ".join(f"{name} {value:.2f}" for name, value in row.get("relative", {}).items())
        peer = row.get(arguments.peer, "")
        peer = f"  {arguments.peer} {peer:.3f}" if isinstance(peer, float) else f"  {peer}"
        moves = f"  bytes × {sum(row['bytes'].values()) / row['least_bytes']:.2f}" if "bytes" in row else ""
        spills = max((kernel["spills"] or 0 for kernel in row["kernels"]), default=0)
        print(
            f"{row['shape']:<52}{row['ms']:7.3f} ({row['p10']:.3f}–{row['p90']:.3f})  launched {row['launched']:.3f}"
            f"{peer}{moves}  error {max(row['errors'].values()):.1e}  spills ≤ {spills}"
            f"{'  OTHER BITS' * row['differs']}  {relative}", flush=True,
        )  # fmt: skip
    print(rows[-1]["device"] if rows else "no shape")
    return int(any(row["differs"] or max(row["errors"].values()) == float("inf") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
