"""Case `collectives`: time to pass a state to the next ranks, by algorithm and size.

Inputs are states [1, H, K, V] in fp32, and log-decays [1, H, K] or matrices [1, H, K, K]. The timed operation is
`launch` → `wait` → `finish` on the current stream, singly and inside CUDA graphs of several. The baselines, all-gather
(of states, and of matrices) and all-reduce (of states), are timed alike; ratios are to the all-gather in the same mode.
Consecutive scans in a graph overlap if their algorithm lets ranks run ahead of each other, as a chain's does; one at a
time they cannot.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import CollectivesConfig
from zeco_train.bench.session import Row, Session
from zeco_train.bench.timing import Runner, Subject, capture_all
from zeco_train.bench.variants import Variant, gather_all
from zeco_train.collectives.wire import all_gather_single
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import ScanRequest, StateScan, adjoint, fold

# By name, (found, expected).
Results = dict[str, tuple[Tensor, Tensor]]
# fp32 folds of a few ranks against fp64: about 2^-24 each.
TOLERANCE = 1e-5
COLUMNS = {
    "size_mb": ("MiB", ">7:g"),
    "variant": ("variant", "<28"),
    "mode": ("mode", "<6"),
    **time_columns("us", 1),
    "ratio": ("/ all-gather", ">12:.3f"),
    "relative_error": ("error", ">8:.1e"),
    "choice": ("all-scan", "<"),
}


def run(config: CollectivesConfig, session: Session, report: Report) -> None:
    """Measure all sizes into the report.

    Raises:
        WrongResultError: before anything of its size is timed.
    """
    runner = Runner(config, session)
    if config.graph and not session.on_cuda:
        report.note("no CUDA graphs on a CPU: eager only")
    for size in report.in_budget(config.sizes_mb, "a state of {:g} MiB".format):
        report.add(_measure_size(size, config, session, runner))


CASE = Case("collectives", CollectivesConfig, COLUMNS, run)


def _measure_size(size: float, config: CollectivesConfig, session: Session, runner: Runner) -> list[Row]:
    inputs = _Inputs(config, config.heads(size), session)
    subjects, checked, skipped = [], {}, []
    for variant in config.chosen:
        try:
            subject, results = session.agree(partial(inputs.started, variant))
        except ConfigError as missing:
            skipped.append({"variant": variant.name, "mode": "eager", "note": f"not here: {missing}"})
            continue
        subjects.append(subject)
        checked[variant.name] = {
            "relative_error": session.check(variant.name, results, TOLERANCE),
            "choice": session.choice(variant, inputs.state.numel()),
        }
    if config.graph and session.on_cuda:
        scans = {variant.name: variant for variant in config.chosen if variant.has_scan}
        eager = (inputs.subject(scans[each.name], "graph") if each.name in scans else each for each in subjects)
        graphs, failed = capture_all(eager, config.graph_operations, session, TOLERANCE)
        subjects, skipped = subjects + graphs, skipped + failed
    rows = runner.rows(subjects) if subjects else []
    shape = {"size_mb": size, "heads": inputs.heads, "key_dim": config.key_dim, "value_dim": config.value_dim}
    anchors = {row["mode"]: row["median_ms"] for row in rows if row["variant"] == "all_gather"}
    for row in rows:
        anchor = anchors.get(row["mode"])
        row |= {f"{name}_us": 1e3 * row[f"{name}_ms"] for name in ("median", "p10", "p90", "min", "max")}
        row |= {"ratio": row["median_ms"] / anchor if anchor else None, **checked[row["variant"]]}
    return [{**shape, **row} for row in rows + skipped]


class _Inputs:
    # A rank's state and transition, and the expected result of every scan over all ranks' inputs.

    def __init__(self, config: CollectivesConfig, heads: int, session: Session) -> None:
        self.heads, self._session = heads, session
        device = session.device
        generator = torch.Generator(device).manual_seed(config.seed * session.world_size + session.rank)
        shape = (1, heads, config.key_dim, config.value_dim)
        self.state = torch.randn(shape, device=device, generator=generator)
        self.transition, self._gathered = -torch.rand(shape[:3], device=device, generator=generator), self.state
        if config.matrices:
            # Contractions, as the delta rules'.
            random = torch.randn(*shape[:3], config.key_dim, device=device, generator=generator)
            self.transition = random / torch.linalg.matrix_norm(random, ord=2, keepdim=True)
            self._gathered = torch.cat((self.state, self.transition), dim=-1)
        self._states = gather_all(self.state)
        self._pairs = list(zip(self._states, gather_all(self.transition), strict=True))

    def started(self, variant: Variant) -> tuple[Subject, Results]:
        # What is timed, and results of it to check.
        if variant.kind == "all_gather":
            return self._all_gather()
        if variant.kind == "all_reduce":
            return self._all_reduce()
        return self._scan(variant)

    def _all_gather(self) -> tuple[Subject, Results]:
        gathered = self.state.new_empty((len(self._states), *self._gathered.shape))

        def gather() -> Tensor:
            # Flat: gloo and NCCL accept different shapes.
            all_gather_single(gathered.view(-1), self._gathered.view(-1))
            return gathered

        results = {"result": (gather()[..., : self.state.shape[3]].clone(), torch.stack(self._states))}
        return Subject("all_gather", gather, lambda: gathered.zero_()), results

    def _all_reduce(self) -> tuple[Subject, Results]:
        total = self.state.clone()

        def reset() -> None:
            total.copy_(self.state)  # reset, or the sums would overflow

        def reduce() -> Tensor:
            dist.all_reduce(total)
            return total

        expected = sum((state.double() for state in self._states), torch.zeros_like(total, dtype=torch.float64))
        results = {"result": (reduce().clone(), expected)}
        return Subject("all_reduce", reduce, reset, repeatable=False), results

    def _scan(self, variant: Variant) -> tuple[Subject, Results]:
        scan = self._session.exchange(variant, self.state.numel()).states
        # Run both directions before checking either: a rank that raises would leave the others waiting.
        directions = {"forward": False, "reverse": True}
        results = {name: (self._once(scan, way).clone(), self._expected(way)) for name, way in directions.items()}
        return self.subject(variant), results

    def subject(self, variant: Variant, purpose: str = "eager") -> Subject:
        scan = self._session.exchange(variant, self.state.numel(), purpose).states
        return Subject(variant.name, lambda: self._once(scan, False))

    def _once(self, scan: StateScan, reverse: bool) -> Tensor:
        transition = adjoint(self.transition) if reverse else self.transition
        pending = scan.launch(ScanRequest(self.state, transition, reverse))
        incoming = pending.wait()
        pending.finish()
        return incoming

    def _expected(self, reverse: bool) -> Tensor:
        rank = self._session.rank
        # In the order in which the scan folds them: towards this rank.
        before = self._pairs[:rank:-1] if reverse else self._pairs[:rank]
        running = torch.zeros_like(self.state, dtype=torch.float64)
        for state, transition in before:
            running = fold(state.double(), (adjoint(transition) if reverse else transition).double(), running)
        return running
