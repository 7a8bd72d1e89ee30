"""Profile of one step: the overlap of communication and compute in it, its parts, and when nothing runs.

The parts of a step are told by the names of its kernels:

| part | kernels |
|---|---|
| products | matrix products: cuBLAS's and CUTLASS's |
| operator | of `zeco_train/kernels`, but for the packages below; attention |
| elementwise | compiled by Inductor, the loss and norms among them; `kernels/rows`, `ops/gated_norm`, `ops/mamba2` |
| optimizer | `kernels/adamw`; the norm of gradients, and other functions of lists |
| copies | `kernels/pack`, FSDP2's and others; copies of memory |
| communication | NCCL's, `kernels/all_scan` |
| other | the rest |

Kernels that run at the same time count in full, each in its part: parts may add up to more than the step.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeco_train
from zeco_train.bench.session import Session
from zeco_train.bench.timing import Subject

PARTS = ("products", "operator", "elementwise", "optimizer", "copies", "communication", "other")
# Of modules and packages of kernels; of any other it is the operator.
_PACKAGES = {
    "adamw": "optimizer",
    "pack": "copies",
    "all_scan": "communication",
    "rows": "elementwise",
    "gated_norm": "elementwise",
    "mamba2": "elementwise",
}
# In order: the first that is found in a name decides.
_OTHERS = (
    (r"nccl", "communication"),
    (r"gemm|nvjet|xmma|cutlass|splitk", "products"),
    (r"flash", "operator"),
    (r"^triton_", "elementwise"),
    (r"chunk_cat|catarray|split_with_sizes|copy", "copies"),
    (r"multi_tensor_apply", "optimizer"),
)
_KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


@functools.cache
def own_kernels() -> Mapping[str, str]:
    """The parts of this project's kernels, by name."""
    found: dict[str, str] = {}
    for folder in zeco_train.__path__:
        for file in sorted(Path(folder).glob("**/*.py")):
            inside = file.relative_to(folder).with_suffix("").parts
            if "kernels" not in inside:
                continue
            part = next((part for package, part in _PACKAGES.items() if package in inside), "operator")
            found |= dict.fromkeys(_KERNEL.findall(file.read_text(encoding="utf-8")), part)
    return found


def part_of(event: Mapping[str, Any]) -> str:
    """The part that an event of a Chrome trace belongs to: a kernel, or a copy or filling of memory."""
    if event["cat"] != "kernel":
        return "copies"
    name = event["name"]
    if name in own_kernels():
        return own_kernels()[name]
    return next((part for pattern, part in _OTHERS if re.search(pattern, name.lower())), "other")


def milliseconds(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds by part that occurs, of events with durations in µs."""
    found = dict.fromkeys(PARTS, 0.0)
    for event in events:
        found[part_of(event)] += event["dur"] / 1e3
    return {part: spent for part, spent in found.items() if spent}


def described(parts: Mapping[str, float]) -> str:
    """For notes."""
    return ", ".join(f"{part} {spent:.1f}" for part, spent in parts.items())


NONE_ON_CPU = "no trace on a CPU: it is of what runs under what on a GPU"
_STEP = "bench_step"
# Categories of events on the device.
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Overlap of communication and compute in one step.

    Attributes:
        communication_us: time during which a communication kernel ran, waits for peers inside it included.
        hidden_us, compute_us: time in which compute ran, too, and in all: of the stream with most of it; of a replayed
            step kernels of any stream.
        kernels: names of the communication kernels.
        idle_us, longest_idle_us: time between the first kernel and the last in which none ran, and its longest part.
        num_kernels: of any kind.
        parts: ms of kernels and copies by part of the step.
    """

    communication_us: float
    hidden_us: float
    compute_us: float
    kernels: tuple[str, ...]
    idle_us: float = 0.0
    longest_idle_us: float = 0.0
    num_kernels: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def idle(self) -> str:
        text = f"{self.num_kernels} kernels, none of which runs for {self.idle_us / 1e3:.2f} ms"
        return f"{text}, for {self.longest_idle_us:.1f} µs at most at a time"

    def __str__(self) -> str:
        if not self.communication_us:
            return "no communication kernels"
        share = self.hidden_us / self.communication_us
        return (
            f"{self.communication_us:.1f} µs of communication kernels, {self.hidden_us:.1f} µs ({share:.0%}) of it "
            f"under {self.compute_us:.1f} µs of compute"
        )


def overlap_of(events: Iterable[dict[str, Any]], *, replayed: bool = False) -> Overlap:
    """The overlap in a Chrome trace's events, for kernels launched within the annotation of the step, if there is one.

    The compute stream is the one with most non-communication kernel time; folds on a scan's own stream count as
    neither. Kernels of a CUDA graph run on streams of the graph's own choice: if the step is `replayed`, all that do
    not communicate are compute.
    """
    events = list(events)
    steps = [e for e in events if e.get("cat") == "user_annotation" and e.get("name") == _STEP]
    work = [e for e in events if e.get("cat") in _WORK]
    if steps:
        start, stop = steps[0]["ts"], steps[0]["ts"] + steps[0]["dur"]
        # Kernels may run after the annotation has ended on the host: take those that were launched within it.
        calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        launched = {e["args"].get("correlation") for e in calls if start <= e["ts"] <= stop}
        work = [e for e in work if e["args"].get("correlation") in launched]
    kernels = [e for e in work if e["cat"] == "kernel"]
    communication = [e for e in kernels if part_of(e) == "communication"]
    by_stream: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in kernels:
        if part_of(event) != "communication":
            by_stream[None if replayed else event["args"].get("stream")].append(event)
    compute = max(map(_spans, by_stream.values()), key=length, default=[])
    spans = _spans(communication)
    idle = [start - stop for (_, stop), (start, _) in itertools.pairwise(_spans(kernels))]
    return Overlap(
        length(spans),
        length(spans) + length(compute) - length(union([*spans, *compute])),
        length(compute),
        tuple(sorted({e["name"] for e in communication})),
        idle_us=sum(idle),
        longest_idle_us=max(idle, default=0.0),
        num_kernels=len(kernels),
        parts=milliseconds(work),
    )


def _spans(events: Iterable[dict[str, Any]]) -> list[Interval]:
    return union([(e["ts"], e["ts"] + e["dur"]) for e in events])


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals with the same union, in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def record(subject: Subject, path: Path, session: Session, *, replayed: bool = False) -> list[Overlap]:
    """Profile one step of all ranks, each into a Chrome trace; returns the overlap of each rank.

    Collective; CUDA only. `path` is that of rank 0's trace, the others' are deleted; `replayed` as of `overlap_of`.
    """
    busy = torch.empty(256 << 20, dtype=torch.uint8, device=session.device)
    token = torch.zeros(1, device=session.device)
    own = path if session.mesh.is_main else path.with_name(f"{path.stem}_rank{session.rank}{path.suffix}")
    overlap = Overlap(0.0, 0.0, 0.0, ())
    # Twice: the profiler's first step includes its startup.
    for last in (False, True):
        subject.prepare()
        torch.cuda.synchronize()
        dist.barrier()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            _issue(subject, busy, token)
        if last:
            own.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(own))
            overlap = overlap_of(json.loads(own.read_text(encoding="utf-8"))["traceEvents"], replayed=replayed)
            if own != path:
                own.unlink()
    return session.gather(overlap)


def _issue(subject: Subject, busy: torch.Tensor, token: torch.Tensor) -> None:
    # As in the timed runs. Profiling slows launches several times: keep the device busy for some 20 ms to cover them.
    for _ in range(300):
        busy.fill_(1)
    # A barrier on the device, so that no rank's step begins with waiting for a late peer.
    dist.all_reduce(token)
    with torch.profiler.record_function(_STEP):
        subject.run()
    torch.cuda.synchronize()
