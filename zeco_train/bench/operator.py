"""Case `operator`: one forward, and one forward + backward, of an operator (`zeco_train.bench.operands`) by backend.

Every rank has `tokens` tokens. With a backend, and with `fla_cp`, they are its shard of one sequence over all ranks;
with `dp`, and with `fla`, its own sequence. A step is the public operator and autograd, with a given gradient of the
outputs and no gradients to add to; `forward` is without autograd. Exposed communication is the step with a scan less
the step in which the scan is a local copy (`variants.LocalCopyScan`), medians of the same run.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench import trace
from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import OperatorConfig
from zeco_train.bench.operands import Attention, Inputs, Shape, context_parallel, peer_attention, peer_results
from zeco_train.bench.runner import Runner, Subject, capture_all
from zeco_train.bench.samples import Row, WrongResultError, marked
from zeco_train.bench.session import Session
from zeco_train.bench.variants import FLA_CP, LocalCopyScan, Variant, over_all_ranks
from zeco_train.errors import ConfigError
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import exact_results
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.ops.slow_paths import find_slow_paths
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.config import Dtype

# Rounding of the inputs' dtype, with fp32 accumulation; products of fp32 inputs may be in tf32 parts.
TOLERANCE = {Dtype.bf16: 1e-2, Dtype.fp32: 1e-3, Dtype.fp64: 1e-11}
# The tolerance must allow for fla's own rounding; a wrong computation is far beyond it.
PEER_TOLERANCE = 5e-2
COLUMNS = {
    "operator": ("operator", "<12"),
    "heads": ("H", ">3"),
    "key_dim": ("K", ">3"),
    "value_dim": ("V", ">3"),
    "tokens": ("tokens", ">7"),
    "pass": ("pass", "<16"),
    "variant": ("variant", "<22"),
    "mode": ("mode", "<6"),
    **time_columns("ms", 4),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ">12:.4g"),
    "ratio": ("/ dp", ">7:.3f"),
    "exposed_us": ("exposed µs", ">10:.1f"),
    "sent_mb": ("MB sent", ">7:.2f"),
    "peak_gb": ("peak GB", ">7:.2f"),
    "relative_error": ("error", ">8:.1e"),
    "choice": ("all-scan", "<"),
}


def run(config: OperatorConfig, session: Session) -> Report:
    """Measure all combinations; results are in the report's folder.

    Raises:
        WrongResultError: before anything of the same heads and dims is timed. A peer's is recorded instead.
    """
    report = Report("operator", config, session, COLUMNS)
    shapes = [Shape(1, key_dim, value_dim, 1, config.operator) for key_dim, value_dim in config.dims]
    session.check_kernels(config.kernels, [("bench operator", shape.call(config.dtype)) for shape in shapes])
    runner = Runner(config, session)
    if config.graph and not session.on_cuda:
        report.note("no CUDA graphs on a CPU: eager only")
    if config.trace and not session.on_cuda:
        report.note(trace.NONE_ON_CPU)
    checked: dict[Shape, dict[str, Row]] = {}
    shapes = [
        Shape(heads, key_dim, value_dim, tokens, config.operator, config.groups, config.decay)
        for heads, (key_dim, value_dim), tokens in itertools.product(config.heads, config.dims, config.tokens)
    ]
    default = 4096 if session.on_cuda else 256
    for shape in report.in_budget(shapes, str):
        dims = replace(shape, tokens=default if config.check_tokens == -1 else config.check_tokens)
        if dims not in checked:
            checked[dims] = _check(dims, config, session, report)
        _measure_shape(shape, config, session, runner, report, checked[dims])
    return report


CASE = Case(OperatorConfig, run)


def sharded_operator(variant: Variant, shape: Shape, session: Session, purpose: str = "eager") -> Attention:
    """The operator on a rank's tokens by a variant; `ConfigError` if this machine does not support it."""
    if variant.kind == "fla":
        return peer_attention(shape, session)
    if variant.kind == FLA_CP:
        return context_parallel(shape, session)
    if variant.is_dp:
        exchange = local_exchange()
    elif variant.kind == "copy":
        exchange = over_all_ranks(LocalCopyScan())
    else:
        exchange = session.exchange(variant, shape.state_elements, purpose)
    position = session.position(exchange, shape.tokens, alone=variant.is_dp)
    return lambda *operands: mix(shape.operator, operands, position)[0]


def _check(short: Shape, config: OperatorConfig, session: Session, report: Report) -> dict[str, Row]:
    # Fields of each variant's rows: its largest error, relative to exact results of the whole sequence, and the choice
    # of `auto`. What is not supported here, by fla itself too, is noted; a wrong peer is a failure of the report.
    own = Inputs.random(short, config.dtype, config.seed + 1 + session.rank, session.device)
    whole = own.gathered()
    expected = exact_results(OPERATORS[short.operator], whole.operands, whole.do)
    begin = session.rank * short.tokens
    checked: dict[str, Row] = {}
    backward = config.passes != ["forward"]
    for variant in config.chosen:
        if variant.kind == "copy":  # wrong by design
            continue
        # These do not communicate: each rank takes the whole sequence.
        name, alone = variant.name, variant.is_alone
        taken = whole if alone else own
        length = replace(short, tokens=whole.tokens) if alone else short
        try:
            attention = session.agree(partial(sharded_operator, variant, length, session))
            if variant.is_peer:
                found = session.agree(partial(peer_results, taken, attention, backward=backward, variant=name))
        except ConfigError as problem:
            report.note(f"{name} is not measured: {problem}")
            continue
        if not variant.is_peer:
            found = taken.results(attention)
        part = {n: x if alone else x[:, begin : begin + short.tokens] for n, x in expected.items()}
        pairs = {n: (found[n], part[n]) for n in found}
        try:
            error = session.check(name, pairs, PEER_TOLERANCE if variant.is_peer else TOLERANCE[config.dtype])
        except WrongResultError as wrong:
            if not variant.is_peer:
                raise
            report.fail(f"{name} is not measured, it is wrong: {wrong.reason}")
            continue
        checked[name] = {"relative_error": error, "choice": session.choice(variant, short.state_elements)}
    return checked


def _measure_shape(
    shape: Shape, config: OperatorConfig, session: Session, runner: Runner, report: Report, checked: dict[str, Row]
) -> None:
    inputs = Inputs.random(shape, config.dtype, config.seed + 1 + session.rank, session.device)
    variants = {each.name: each for each in config.chosen if each.name in checked or each.kind == "copy"}
    attentions = {name: sharded_operator(variant, shape, session) for name, variant in variants.items()}
    backward = config.passes != ["forward"]
    for name in [name for name, variant in variants.items() if variant.is_peer]:
        # Refused at this length only: the other variants are still measured.
        try:
            session.agree(partial(peer_results, inputs, attentions[name], backward=backward, variant=name))
        except ConfigError as error:
            report.note(f"{name} is not measured, {shape}: {error}")
            del attentions[name]
    slow = find_slow_paths([("", shape.call(config.dtype))], session.target, shape.tokens)
    rows: list[Row] = []
    for kind in config.passes:
        peaks, sent, subjects = {}, {}, []
        for name, attention in attentions.items():
            subjects.append(operator_step(name, kind, attention, inputs))
            peaks[name] = peak_gb(subjects[-1], session)
            sent[name] = sent_mb(subjects[-1], session)
        failed: list[Row] = []
        if config.graph and session.on_cuda:
            graphed = ((name, sharded_operator(variants[name], shape, session, "graph")) for name in attentions)
            steps = (operator_step(name, kind, attention, inputs) for name, attention in graphed)
            graphs, failed = capture_all(steps, 1, session, TOLERANCE[config.dtype])
            subjects += graphs
        found = runner.rows(subjects)
        medians = {(row["variant"], row["mode"]): row["median_ms"] for row in found}
        for row in found:
            name = row["variant"]
            row |= {**_compared(variants[name], row, medians, shape), "peak_gb": peaks[name], "sent_mb": sent[name]}
            row |= checked.get(name, {})
        found = [row if variants[row["variant"]].is_peer else marked(row, slow) for row in found]
        rows += [{**vars(shape), "pass": kind, **row} for row in found + failed]
    report.add(rows)
    for name, attention in attentions.items() if config.trace and session.on_cuda else ():
        size = f"{shape.operator}_h{shape.heads}_k{shape.key_dim}_v{shape.value_dim}_t{shape.tokens}"
        path = report.folder / f"trace_{variants[name].file_name}_{size}.json"
        overlaps = trace.record(operator_step(name, "forward_backward", attention, inputs), path, session)
        if variants[name].has_scan or name == FLA_CP:
            report.note(f"trace of {name}, {shape}, rank 0: {overlaps[0]}")


def operator_step(name: str, kind: str, attention: Attention, inputs: Inputs) -> Subject:
    """One of `PASSES` of an operator, to be timed."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*inputs.operands.values())

    def forward_backward() -> Tensor | None:
        attention(*inputs.operands.values()).backward(inputs.do)
        # That of the decays, the last to be computed; of v if they are constants.
        return [*inputs.leaves.values()][-1].grad

    return Subject(name, forward if kind == "forward" else forward_backward, inputs.forget_grads)


def _compared(variant: Variant, row: Row, medians: dict[tuple[str, str], float], shape: Shape) -> Row:
    median = row["median_ms"]
    dp, copy = (medians.get((name, row["mode"])) for name in ("dp", "copy"))
    return {
        "tokens_per_second_per_gpu": 1e3 * shape.tokens / median,
        "ratio": median / dp if dp else None,
        "exposed_us": 1e3 * (median - copy) if variant.has_scan and copy is not None else None,
    }


def peak_gb(subject: Subject, session: Session) -> float | None:
    """Peak memory of a step beyond its inputs in GB, maximum over ranks; None on CPUs. The first call compiles."""
    subject.prepare()
    subject.run()  # one-time allocations of libraries
    subject.prepare()
    if not session.on_cuda:
        session.drain()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    subject.run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    subject.prepare()
    return max(session.gather(peak / 1e9))


def sent_mb(subject: Subject, session: Session) -> float | None:
    """MB that the busiest rank sends in scans and all-gathers of a run; None if that is nothing. Collective."""
    sent: list[float] = []
    launch, gather = ScanBackend.launch, dist.all_gather_into_tensor

    def counted_launch(scan: ScanBackend, request: ScanRequest) -> LaunchedScan:
        launched = launch(scan, request)
        sent.append(scan.bytes_sent(request))
        return launched

    def counted_gather(into: Tensor, part: Tensor, group: dist.ProcessGroup | None = None, **rest: Any) -> Any:
        sent.append(float(part.nbytes * (dist.get_world_size(group) - 1)))
        return gather(into, part, group=group, **rest)

    # The backward pass runs in another thread, so it is the functions themselves that are replaced.
    ScanBackend.launch = counted_launch  # type: ignore[assignment, method-assign]
    dist.all_gather_into_tensor = counted_gather  # type: ignore[assignment]
    try:
        subject.prepare()
        subject.run()
    finally:
        ScanBackend.launch, dist.all_gather_into_tensor = launch, gather  # type: ignore[method-assign]
    subject.prepare()
    session.settle()
    return max(session.gather(sum(sent) / 1e6)) or None
