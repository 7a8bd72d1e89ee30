"""Case `operator`: one forward, and one forward + backward, of an operator by backend, and by fla's function for it.

Every rank has `tokens` tokens. With a backend, and with `fla_cp`, they are its shard of one sequence over all ranks;
with `dp`, and with `fla`, its own sequence. A step is the public operator and autograd, with a given gradient of the
outputs and no gradients to add to; `forward` is without autograd. Exposed communication is the step with a scan less
the step in which the scan is a local copy (`variants.LocalCopyScan`), medians of the same run.

g are decays of each token; log_decay are constants: `retention` are RetNet's, `none` is no decay. If transitions are
matrices, keys have norm 1 and strengths β lie between 0 and 1. Softmax attention, of case `attention`, has neither; its
q has H heads, and its k and v have G.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from models.mixers.retnet import log_decays
from zeco_train.bench import trace
from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import OperatorConfig
from zeco_train.bench.session import Row, Session, WrongResultError, marked
from zeco_train.bench.timing import Runner, Subject, capture_all
from zeco_train.bench.variants import FLA_CP, LocalCopyScan, Variant, gather_all, over_all_ranks
from zeco_train.distributed.mesh import attention_group
from zeco_train.errors import ConfigError
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS
from zeco_train.ops.oracle import exact_results
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.ops.slow_paths import Call, find_slow_paths
from zeco_train.ops.softmax.attention import KERNELS as SOFTMAX_KERNELS
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

# (operands in the operator's order) → o.
Attention = Callable[..., Tensor]
# fla's gates: logsigmoid / 16.
_GATE_NORMALIZER = 16.0
# What fla raises where it refuses. Lack of memory, and errors of the device, are other subclasses of RuntimeError.
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, AssertionError)
# Operands that are neither cut by tokens nor differentiated.
_CONSTANTS = ("log_decay",)


@dataclass(frozen=True)
class Shape:
    """An operator's sizes.

    Attributes:
        heads, key_dim, value_dim: H, K, V.
        tokens: per rank.
        operator: one of `variants.BENCHED`, or softmax.
        groups: G, heads of q and k; of softmax, of k and v.
        decay: of an operator with constant decays, which of them (`Peer.decay`).
    """

    heads: int
    key_dim: int
    value_dim: int
    tokens: int
    operator: str = DEFAULT
    groups: int | None = None
    decay: str | None = None

    @property
    def num_groups(self) -> int:
        """G; as many as heads unless set."""
        return self.heads if self.groups is None else self.groups

    def sizes(self, dims: str) -> list[int]:
        """The shape of an operand of one sequence, of its dimensions, a letter each (`Operator.dims`)."""
        sizes = {"B": 1, "T": self.tokens, "G": self.num_groups, "H": self.heads}
        return [(sizes | {"K": self.key_dim, "V": self.value_dim})[dim] for dim in dims]

    @property
    def state_elements(self) -> int:
        operator = OPERATORS[self.operator]
        return math.prod(operator.state_shape([torch.empty(self.sizes(dims), device="meta") for dims in operator.dims]))

    def call(self, dtype: Dtype) -> Call:
        """What kernels on GPUs serve, or PyTorch."""
        rule = SOFTMAX_KERNELS if self.operator == "softmax" else OPERATORS[self.operator].kernels
        assert rule is not None, "no operator here is without kernels"
        return Call(self.operator, rule, dtype.compute, self.key_dim, self.value_dim)

    def __str__(self) -> str:
        decay = "" if self.decay is None else f" ({self.decay})"
        groups = "" if self.groups is None else f", G {self.groups}"
        dims = f"H {self.heads}{groups}, K {self.key_dim}, V {self.value_dim}"
        return f"{self.operator}{decay}: {self.tokens:,} tokens a rank, {dims}"


@dataclass
class Inputs:
    """An operator's operands, and the gradient of its outputs, of one rank or of a whole sequence.

    Attributes:
        operands: by name, in the operator's order; all but constants are leaves, such as q [1, T, G, K].
        do: [1, T, H, V].
    """

    operands: Mapping[str, Tensor]
    do: Tensor = field(repr=False)

    @classmethod
    def random(cls, shape: Shape, dtype: Dtype, seed: int, device: torch.device) -> Inputs:
        """Normal tokens and do, decays and strengths as fla's gates give them, and fixed decays by `Shape.decay`."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(kind: torch.dtype, *dims: int) -> Tensor:
            return torch.randn((1, shape.tokens, *dims), device=device, dtype=kind, generator=generator)

        if shape.operator == "softmax":
            q, do = (normal(dtype.compute, shape.heads, shape.key_dim) for _ in range(2))
            k, v = (normal(dtype.compute, shape.num_groups, shape.key_dim) for _ in range(2))
            return cls.of({"q": q, "k": k, "v": v}, do)
        operator = OPERATORS[shape.operator]
        dims = {"g": "BTH", "beta": "BTH"} | operator.dims_of
        plain = [name for name in operator.operands if name not in ("g", "beta", *_CONSTANTS)]
        known = {name: normal(dtype.compute, *shape.sizes(dims[name])[2:]) for name in plain}
        do = normal(dtype.compute, *shape.sizes(operator.dims[operator.output])[2:])
        # Strengths are drawn after log-decays, also where there are none.
        known["g"] = logsigmoid(normal(dtype.master, *shape.sizes(dims["g"])[2:])) / _GATE_NORMALIZER
        known["beta"] = normal(dtype.master, *shape.sizes(dims["beta"])[2:]).sigmoid()
        if operator.kind is Kind.matrix:
            known["k"] = normalize(known["k"], dim=-1)
        decays = log_decays(shape.heads) if shape.decay == "retention" else torch.zeros(shape.heads)
        known["log_decay"] = decays.to(device, dtype.master)
        return cls.of({name: known[name] for name in operator.operands}, do)

    @classmethod
    def of(cls, operands: Mapping[str, Tensor], do: Tensor) -> Inputs:
        """Inputs as new leaves that share memory."""
        leaves = {name: x.detach().requires_grad_(name not in _CONSTANTS) for name, x in operands.items()}
        return cls(leaves, do.detach())

    @property
    def tokens(self) -> int:
        """T."""
        return self.do.shape[1]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The operands whose gradients are measured."""
        return {name: x for name, x in self.operands.items() if name not in _CONSTANTS}

    def gathered(self) -> Inputs:
        """The whole sequence, all-gathered. Collective."""
        cut = {name: torch.cat(gather_all(x.detach()), 1) for name, x in self.leaves.items()}
        return Inputs.of({**self.operands, **cut}, torch.cat(gather_all(self.do), 1))

    def at(self, positions: Tensor) -> Inputs:
        """Only some tokens, as new leaves."""
        cut = {name: x.detach()[:, positions] for name, x in self.leaves.items()}
        return Inputs.of({**self.operands, **cut}, self.do[:, positions])

    def forget_grads(self) -> None:
        """Drop the gradients: a step must not add to those of the step before."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def results(self, attention: Attention, *, backward: bool = True) -> dict[str, Tensor]:
        """Compute `o` and, with `backward`, all gradients: `dq`, and so on."""
        self.forget_grads()
        with torch.set_grad_enabled(backward):
            o = attention(*self.operands.values())
        found = {"o": o.detach()}
        if backward:
            o.backward(self.do)
            for name, leaf in self.leaves.items():
                assert leaf.grad is not None, name
                found[f"d{name}"] = leaf.grad
        self.forget_grads()
        return found


def peer_attention(shape: Shape, session: Session) -> Attention:
    """The function of fla for the same operator, on a rank's tokens alone.

    Raises:
        ConfigError: fla, or a GPU, is missing; or fla's function does not take this shape.
    """
    if shape.num_groups != shape.heads:
        raise ConfigError("variants", "fla", f"has as many heads of q and k as of v; not groups={shape.groups}")
    operator = OPERATORS[shape.operator]
    if not operator.peers:
        raise ConfigError("variants", "fla", f"has no function for {shape.operator} alone")
    peer = next(peer for peer in operator.peers if peer.decay == shape.decay)
    function = partial(getattr(session.import_fla(peer.module), peer.function), **dict(peer.options))
    has_tokens = ["T" in dims for dims in operator.dims]

    def attention(*operands: Tensor) -> Tensor:
        tokens = itertools.compress(operands, has_tokens)
        if not peer.joins_heads:
            return function(*tokens)[0]
        o: Tensor = function(*(x.flatten(2) for x in tokens))[0]
        return o.view(operands[operator.output].shape)

    return attention


def context_parallel(shape: Shape, session: Session) -> Attention:
    """Variant `fla_cp`: fla's own context parallelism for the same operator, over all ranks' tokens. Collective.

    fla 0.6.0 all-gathers a summary of every rank's tokens, [S | M], fp32 [H, K, V + K], and folds those of the ranks
    before; the backward pass does the same with those after. A rank sends (P − 1) · H · K · (V + K) · 4 bytes a pass.

    Raises:
        ConfigError: fla, or a GPU, is missing; or fla has none for this operator or shape.
    """
    peers = {name: peer for name, operator in OPERATORS.items() for peer in operator.peers if peer.takes_context}
    if shape.operator not in peers:
        allowed = f"fla has context parallelism for {' and '.join(peers)}, not {shape.operator}"
        raise ConfigError("variants", FLA_CP, allowed)
    if shape.num_groups != shape.heads:
        raise ConfigError("variants", FLA_CP, f"is measured with as many heads of q and k as of v; not {shape.groups}")
    peer = peers[shape.operator]
    function = getattr(session.import_fla(peer.module, FLA_CP), peer.function)
    build_context = session.import_fla("fla.ops.cp", FLA_CP).build_cp_context
    # Of the whole sequence: fla cuts it at the ranks' borders.
    borders = torch.tensor([0, session.world_size * shape.tokens])
    # On the host too, so that nothing is read from the device in each call.
    context = build_context(
        cu_seqlens=borders.to(session.device), group=attention_group(session.mesh), cu_seqlens_cpu=borders
    )

    def attention(*operands: Tensor) -> Tensor:
        o: Tensor = function(*operands, cp_context=context)[0]
        return o

    return attention


def peer_results(inputs: Inputs, attention: Attention, *, backward: bool, variant: str = "fla") -> dict[str, Tensor]:
    """`Inputs.results` by fla's function; `ConfigError`, for `variant`, if fla refuses it.

    It does some gradients for some GPUs and versions of Triton.
    """
    try:
        return inputs.results(attention, backward=backward)
    except Exception as error:
        if type(error) not in _REFUSALS and not type(error).__module__.startswith("triton."):
            raise
        text = " ".join(str(error).split())
        forward = "; passes=[forward] may be measured" if backward else ""
        raise ConfigError("variants", variant, f"is refused by fla itself ({text}){forward}") from error


def run(config: OperatorConfig, session: Session, report: Report) -> None:
    """Measure all combinations into the report.

    Raises:
        WrongResultError: before anything of the same heads and dims is timed. A peer's is recorded instead.
    """
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


CASE = Case("operator", OperatorConfig, COLUMNS, run)


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
