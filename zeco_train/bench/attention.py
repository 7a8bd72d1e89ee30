"""Case `attention`: softmax attention of one layer over ranks by each method, and linear attention beside it.

Every rank has `tokens` tokens. With a method, or a backend, they are its shard of one sequence over all ranks; with
`dp` its own sequence. Softmax attention does more work per token the longer the sequence is, so the methods' tokens per
second are not comparable with those of `dp`; their FLOPs per second are, and `ratio` compares them. A step is the
operator and autograd, from queries, keys and values as projected; `forward` is without autograd.

On GPUs each variant is profiled once, on all ranks, forward + backward:

exposed    time of communication kernels with no compute under it, waits for slower ranks included; of the slowest rank
slowest    compute time of the rank with the most, relative to the mean: 1 is a perfect balance

Variants:

dp                      each rank its own sequence, nothing crosses ranks
all_gather, ring, …     the methods of `sp.attention`
all_gather:contiguous   `all_gather` without pairs: each rank computes its own queries, and the last has the most work
all_gather:parts        `all_gather`, `ulysses` with the heads in parts, as between nodes: the messages of a part travel
ulysses:parts           while another is computed
megatron_sp             as Megatron-LM's sequence parallelism: the activations of all tokens are gathered, each rank has
                        some heads of them, and outputs are reduce-scattered. What is gathered here are queries, keys
                        and values, since projections are not part of the operator; there it is the layer's input.
torch                   PyTorch's own context parallelism (ring), a peer: causal, GPUs only. Its tokens lie in pairs of
                        pieces, one from the front and one from the back of the sequence.
dp:deterministic, …     `dp`, and each method, with `train.deterministic`: the backward pass is FlashAttention's, which
                        adds up in one order
gla:dp, gla:zeco, …     linear attention (gla) of as many heads, by backend
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zeco_train.bench import trace
from zeco_train.bench.case import Case, Report, time_columns
from zeco_train.bench.config import PASSES, RunsConfig
from zeco_train.bench.operator import (
    PEER_TOLERANCE,
    TOLERANCE,
    Attention,
    Inputs,
    Shape,
    operator_step,
    peak_gb,
    sharded_operator,
)
from zeco_train.bench.session import Row, Session, marked
from zeco_train.bench.timing import Runner, Subject
from zeco_train.bench.variants import Variant, parse_variants
from zeco_train.collectives.wire import Wire
from zeco_train.distributed.mesh import attention_group
from zeco_train.errors import ConfigError
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS
from zeco_train.ops.oracle import exact_results, exact_softmax
from zeco_train.ops.slow_paths import Kernels, find_slow_paths
from zeco_train.ops.softmax.attention import attend, attend_backward, kernel_name
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.all_gather import AllGather
from zeco_train.sp.attention.method import LocalAttention, ShardedAttention
from zeco_train.sp.attention.method_registry import METHODS, build_attention
from zeco_train.sp.attention.pipelined import LEAST_TOKENS, NUM_PARTS
from zeco_train.sp.attention.ulysses import Ulysses
from zeco_train.sp.backend_registry import SHARING
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.numbers import check_least
from zeco_train.training.config import Dtype

MEGATRON, TORCH, LINEAR = "megatron_sp", "torch", DEFAULT


@dataclass(frozen=True)
class AttentionVariant:
    """A way of attention over ranks.

    Attributes:
        name: as the user writes it, and as results have it.
        method: of `sp.attention`; `dp`, `megatron_sp` or `torch`; None for linear attention.
        backend: of linear attention.
        build: of the method with other settings than its own.
        deterministic: as `train.deterministic`.
    """

    name: str
    method: str | None = None
    backend: Variant | None = None
    build: Callable[[Wire], ShardedAttention] | None = None
    deterministic: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether each rank has its own sequence."""
        return self.method == "dp" if self.backend is None else self.backend.is_dp

    @property
    def reference(self) -> str:
        """The variant that does the same on one rank."""
        return "dp" if self.backend is None else f"{LINEAR}:dp"


# With default settings.
_PLAIN = tuple(AttentionVariant(name, name) for name in ("dp", *METHODS))
_BUILT = (
    AttentionVariant("all_gather:contiguous", "all_gather", build=partial(AllGather, paired=False)),
    AttentionVariant("all_gather:parts", "all_gather", build=partial(AllGather, num_parts=NUM_PARTS)),
    AttentionVariant("ulysses:parts", "ulysses", build=partial(Ulysses, num_parts=NUM_PARTS)),
    AttentionVariant(MEGATRON, MEGATRON),
    AttentionVariant(TORCH, TORCH),
)
_LINEAR = (
    AttentionVariant(f"{LINEAR}:{each.name}", backend=each) for each in parse_variants(["dp", *SHARING], "dp", *SHARING)
)
_ONE_ORDER = (replace(each, name=f"{each.name}:deterministic", deterministic=True) for each in _PLAIN)
DEFAULTS = {each.name: each for each in (*_PLAIN, *_BUILT, *_LINEAR)}
VARIANTS = DEFAULTS | {each.name: each for each in _ONE_ORDER}


@dataclass(frozen=True)
class OnRanks:
    """An operator over the ranks of a sequence.

    Attributes:
        attention: of a rank's operands.
        positions: [T] int64, of a rank's tokens in the sequence.
        within: a forward and its backward pass run inside of it.
    """

    attention: Attention
    positions: Tensor
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def build_variant(variant: AttentionVariant, shape: Shape, window: int | None, session: Session) -> OnRanks:
    """A variant for sequences of `shape.tokens` tokens per rank. Collective.

    Raises:
        ConfigError: these ranks do not support it.
    """
    tokens, rank, alone = shape.tokens, session.rank, variant.is_alone
    offset = 0 if alone else rank * tokens
    own = torch.arange(offset, offset + tokens, device=session.device)
    if variant.backend is not None:
        return OnRanks(sharded_operator(variant.backend, shape, session), own)
    if variant.method == TORCH:
        return _torch_rings(shape, window, session)
    scale, seq_len = shape.key_dim**-0.5, tokens * (1 if alone else session.world_size)
    if variant.method == MEGATRON:
        for heads in (shape.heads, shape.num_groups):
            if heads % session.world_size:
                problem = f"needs ranks that divide the {heads} heads, not {session.world_size}"
                raise ConfigError("variants", MEGATRON, problem)
        span = Span(0, seq_len, window=window)
        return OnRanks(lambda q, k, v: _MegatronSP.apply(q, k, v, span, scale), own)
    method = LocalAttention() if alone else _method(variant, shape, session)
    method.deterministic = variant.deterministic
    exchange = local_exchange().replaced(attention=method)
    position = session.position(exchange, tokens, alone=alone)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_at(q, k, v, scale, position, (StateInput(), StateInput()), window)[0]

    return OnRanks(attention, own)


def _method(variant: AttentionVariant, shape: Shape, session: Session) -> ShardedAttention | LocalAttention:
    assert variant.method is not None
    mesh, spec = session.mesh, METHODS[variant.method]
    if (problem := spec.heads_problem(shape.heads, shape.num_groups, session.world_size)) is not None:
        raise ConfigError("variants", variant.name, problem)
    spec = replace(spec, build=variant.build or spec.build)
    return build_attention(spec, attention_group(mesh), mesh.timeout, mesh.device, mesh.topology.nodes)


class _MegatronSP(torch.autograd.Function):
    # All ranks have the whole sequence of H / P heads, and keep it for the backward pass.
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Tensor:
        gathered = _all_gather(torch.cat([q, k, v], 2))
        heads = [x.shape[2] for x in (q, k, v)]
        q, k, v = (_own_heads(x) for x in gathered.split(heads, 2))
        found = attend(q, k, v, span, 0, scale)
        ctx.save_for_backward(q, k, v, *found)
        ctx.span, ctx.scale = span, scale
        return _reduce_scatter(_all_heads(found.o))

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        of_o = _own_heads(_all_gather(do))
        grads = attend_backward(of_o, q, k, v, Attended(o, lse), ctx.span, 0, ctx.scale)
        whole = [_all_heads(grad.to(q.dtype)) for grad in grads]
        heads = [x.shape[2] for x in whole]
        return *_reduce_scatter(torch.cat(whole, 2)).split(heads, 2), None, None


def _all_gather(x: Tensor) -> Tensor:
    into = x.new_empty(dist.get_world_size() * x.shape[1], *x.shape[2:])
    dist.all_gather_into_tensor(into, x[0].contiguous())
    return into[None]


def _reduce_scatter(x: Tensor) -> Tensor:
    into = x.new_empty(x.shape[1] // dist.get_world_size(), *x.shape[2:])
    dist.reduce_scatter_tensor(into, x[0].contiguous())
    return into[None]


def _own_heads(x: Tensor) -> Tensor:
    return x.tensor_split(dist.get_world_size(), 2)[dist.get_rank()]


def _all_heads(x: Tensor) -> Tensor:
    # Other ranks' heads are 0: they are absent from the product of a rank's part of the output projection.
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return F.pad(x, (0, 0, rank * x.shape[2], (ranks - 1 - rank) * x.shape[2]))


def _torch_rings(shape: Shape, window: int | None, session: Session) -> OnRanks:
    if not session.on_cuda:
        raise ConfigError("variants", TORCH, "its rings of attention need CUDA")
    if window is not None or shape.num_groups != shape.heads:
        raise ConfigError("variants", TORCH, "is measured without window, and with key_heads=null")
    ranks, rank, half = session.world_size, session.rank, shape.tokens // 2
    first, last = (piece * half + torch.arange(half, device=session.device) for piece in (rank, 2 * ranks - 1 - rank))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    @contextmanager
    def within() -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        # It wants a tensor to shard; what attention reads is sharded already.
        buffer = torch.zeros(2 * ranks, device=session.device)
        sharded = context_parallel(
            session.mesh.devices["sp"], buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharded:
            yield

    return OnRanks(attention, torch.cat([first, last]), within)


COLUMNS = {
    "heads": ("H", ">3"),
    "key_heads": ("G", ">3"),
    "head_dim": ("D", ">3"),
    "window": ("window", ">6"),
    "tokens": ("tokens", ">7"),
    "pass": ("pass", "<16"),
    "variant": ("variant", "<24"),
    **time_columns("ms", 4),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ">12:.4g"),
    "tflops_per_gpu": ("TFLOP/s/GPU", ">11:.4g"),
    "ratio": ("of dp", ">6:.3f"),
    "exposed_us": ("exposed µs", ">10:.1f"),
    "slowest": ("slowest", ">7:.3f"),
    "peak_gb": ("peak GB", ">7:.2f"),
    "relative_error": ("error", ">8:.1e"),
}


@dataclass
class AttentionConfig(RunsConfig):
    """Settings of case `attention`.

    Attributes:
        heads: H, heads of queries. Linear attention has as many, with K = V = D.
        key_heads: G, heads of keys and values; null: H.
        head_dim: D, width of a head.
        window: keys that a query reads at most, itself among them; null: all before it.
        tokens: per rank, one after the other.
        dtype: of q, k, v.
        passes: `forward`, `forward_backward`.
        kernels: of heads that kernels on GPUs do not serve, as `train.kernels`.
        check_tokens: tokens per rank in the correctness check; −1 is 8,192 on GPUs, where methods between nodes cut the
            heads into parts as in long runs, and 256 on CPUs.
    """

    variants: list[str] = field(default_factory=lambda: list(DEFAULTS))
    heads: int = 16
    key_heads: int | None = None
    head_dim: int = 128
    window: int | None = None
    tokens: list[int] = field(default_factory=lambda: [16_384, 65_536])
    dtype: Dtype = Dtype.bf16
    passes: list[str] = field(default_factory=lambda: list(PASSES))
    kernels: Kernels = Kernels.auto
    check_tokens: int = -1

    def validate(self) -> None:
        super().validate()
        self._check_different("variants", VARIANTS)
        check_least(self, heads=1, head_dim=1)
        self._check_lists(tokens=2)
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            raise ConfigError("key_heads", self.key_heads, f"must be ≥ 1 and divide heads={self.heads}")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", self.window, "must be ≥ 1, or null")
        if self.graph:
            raise ConfigError("graph", self.graph, "a method's messages are not captured; take graph=false")
        self._check_operation(self.passes, self.check_tokens, least=2)

    @property
    def num_key_heads(self) -> int:
        """G."""
        return self.heads if self.key_heads is None else self.key_heads

    def shape(self, variant: AttentionVariant, tokens: int) -> Shape:
        operator, groups = ("softmax", self.num_key_heads) if variant.backend is None else (LINEAR, None)
        return Shape(self.heads, self.head_dim, self.head_dim, tokens, operator, groups)


def run(config: AttentionConfig, session: Session, report: Report) -> None:
    """Measure all combinations into the report.

    Raises:
        WrongResultError: before anything is timed.
        ConfigError: these ranks support none of the variants.
    """
    served = config.shape(VARIANTS["dp"], 1).call(config.dtype).problem(session.target) is None
    report.note(f"softmax attention on a rank: {kernel_name(session.target, served)}")
    ours = [VARIANTS[name] for name in config.variants if VARIANTS[name].method != TORCH]
    calls = [("bench attention", config.shape(each, 1).call(config.dtype)) for each in ours]
    session.check_kernels(config.kernels, calls)
    session.enter("checks")
    checked = _check_all(config, session, report)
    runner = Runner(config, session)
    for tokens in report.in_budget(config.tokens, "{:,} tokens a rank".format):
        report.add(_measure(tokens, config, session, runner, report.folder, checked))


CASE = Case("attention", AttentionConfig, COLUMNS, run)


def _check_all(config: AttentionConfig, session: Session, report: Report) -> dict[AttentionVariant, float]:
    # Each supported variant's largest error of o and all gradients, relative to exact results of the whole sequence.
    checked: dict[AttentionVariant, float] = {}
    problem: ConfigError | None = None
    default = LEAST_TOKENS if session.on_cuda else 256
    tokens = default if config.check_tokens == -1 else config.check_tokens
    for variant in (VARIANTS[name] for name in config.variants):
        name, shape = variant.name, config.shape(variant, tokens)
        try:
            # A rank alone takes the whole sequence.
            length = replace(shape, tokens=session.world_size * tokens) if variant.is_alone else shape
            built = session.agree(partial(build_variant, variant, length, config.window, session))
        except ConfigError as error:
            problem = error
            report.note(f"{name} is not measured: {error}")
            continue
        own = Inputs.random(shape, config.dtype, config.seed + 1 + session.rank, session.device)
        whole = own.gathered()
        if variant.backend is not None:
            expected = exact_results(OPERATORS[shape.operator], whole.operands, whole.do)
        else:
            q, k, v = whole.operands.values()
            expected = exact_softmax(q, k, v, whole.do, window=config.window)
        with built.within():
            found = whole.at(built.positions).results(built.attention)
        pairs = {key: (value, expected[key][:, built.positions]) for key, value in found.items()}
        tolerance = PEER_TOLERANCE if variant.method == TORCH else TOLERANCE[config.dtype]
        checked[variant] = session.check(name, pairs, tolerance)
    if problem is not None and not checked:
        raise problem
    return checked


def _measure(
    tokens: int,
    config: AttentionConfig,
    session: Session,
    runner: Runner,
    folder: Path,
    checked: dict[AttentionVariant, float],
) -> list[Row]:
    variants = {variant.name: variant for variant in checked}
    built = {each: build_variant(each, config.shape(each, tokens), config.window, session) for each in checked}
    seed = config.seed + 1 + session.rank
    inputs = {
        name: Inputs.random(config.shape(VARIANTS[name], tokens), config.dtype, seed, session.device)
        for name in {variant.reference for variant in checked}
    }
    rows: list[Row] = []
    for kind in config.passes:
        subjects = {}
        for variant, on_ranks in built.items():
            step = operator_step(variant.name, kind, on_ranks.attention, inputs[variant.reference])
            subjects[variant.name] = replace(step, run=partial(_within, on_ranks, step))
        peaks = {name: peak_gb(subject, session) for name, subject in subjects.items()}
        profiles: dict[str, Row] = {name: {} for name in subjects}
        found = runner.rows([*subjects.values()])
        if kind == "forward_backward" and session.on_cuda:
            profiles = {name: _profiled(subject, tokens, folder, session) for name, subject in subjects.items()}
        flops = {name: _flops(config, each, tokens, kind, session.world_size) for name, each in variants.items()}
        rates = {row["variant"]: flops[row["variant"]] / row["median_ms"] for row in found}
        for row in found:
            variant = variants[name := row["variant"]]
            rest = {"pass": kind, "tokens": tokens, "peak_gb": peaks[name], "relative_error": checked[variant]}
            call = config.shape(variant, tokens).call(config.dtype)
            slow = find_slow_paths([("", call)] if variant.method != TORCH else [], session.target, tokens)
            row |= _compared(variant, row["median_ms"], tokens, rates) | profiles[name] | rest
            rows.append(marked(row, slow))
    shape = {"heads": config.heads, "key_heads": config.num_key_heads, "head_dim": config.head_dim}
    return [{**shape, "window": config.window, **row} for row in rows]


def _within(on_ranks: OnRanks, step: Subject) -> object:
    with on_ranks.within():
        return step.run()


def _flops(config: AttentionConfig, variant: AttentionVariant, tokens: int, kind: str, ranks: int) -> float:
    # Of a rank: two products forward, five backward, of each pair of a query and a key that it reads. Those of linear
    # attention depend on the chunks.
    if variant.backend is not None:
        return math.nan
    ranks = 1 if variant.is_alone else ranks
    length = tokens * ranks
    window = min(length, config.window or length)
    # The first `window` queries read 1, 2, … keys, the others `window`.
    pairs = window * (window + 1) / 2 + (length - window) * window
    products = 2 if kind == "forward" else 7
    return 2 * products * config.heads * config.head_dim * pairs / ranks


def _compared(variant: AttentionVariant, median_ms: float, tokens: int, rates: dict[str, float]) -> Row:
    rate, dp = rates[variant.name], rates.get(variant.reference)
    row: Row = {"tokens_per_second_per_gpu": 1e3 * tokens / median_ms}
    if not math.isnan(rate):
        row |= {"tflops_per_gpu": rate * 1e-9, "ratio": rate / dp if dp else None}
    return row


def _profiled(step: Subject, tokens: int, folder: Path, session: Session) -> Row:
    overlaps = trace.record(step, folder / f"trace_{step.name.replace(':', '-')}_t{tokens}.json", session)
    compute = [each.compute_us for each in overlaps]
    mean = sum(compute) / len(compute)
    return {
        "exposed_us": max(each.communication_us - each.hidden_us for each in overlaps),
        "slowest": max(compute) / mean if mean else None,
        "compute_us_by_rank": compute,
    }
