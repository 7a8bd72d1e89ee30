"""Softmax attention in a plan: FLOPs that grow with length; bytes on the wire and memory by method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from models.spec import AttentionSpec, BlockSpec
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.softmax.attention import kernel_name
from zeco_train.plan import calibration as known
from zeco_train.plan.case import PlannedCase
from zeco_train.sp.attention.method import AttentionLoad, MethodCosts, MethodSpec
from zeco_train.sp.attention.method_registry import METHODS, choose_method
from zeco_train.sp.exchange import softmax_load


class Exchanges(NamedTuple):
    """Bytes that the busiest rank sends for softmax layers in a step; seconds, less what is computed meanwhile."""

    sent: float
    seconds: float


def attention_blocks(case: PlannedCase) -> Iterator[tuple[BlockSpec, AttentionSpec]]:
    """The kinds of softmax layers, with their shape."""
    for block in case.spec.blocks.values():
        if block.attention is not None:
            yield block, block.attention


def method_of(case: PlannedCase) -> MethodSpec:
    """The method of softmax attention; `ConfigError` if it cannot spread the heads over these ranks."""
    if case.other_method is not None:
        return case.other_method
    config, train = case.config, case.config.train
    sizes = case.sp_size, config.data.seq_len, train.dtype.compute
    load = softmax_load(config.model, *sizes, train.recompute is Recompute.full)
    assert load is not None
    return choose_method(config.sp.attention, load)


def problem_of(case: PlannedCase, method: str) -> str | None:
    """Why a method, or `auto`, cannot spread the softmax layers' heads over the case's ranks; None: it can."""
    if method not in METHODS:
        return None
    spec = METHODS[method]
    problems = (spec.heads_problem(shape.heads, shape.key_heads, case.sp_size) for _, shape in attention_blocks(case))
    return next((problem for problem in problems if problem is not None), None)


def attention_kernel(case: PlannedCase, block: BlockSpec) -> str:
    """What computes the attention of a softmax layer."""
    train, target = case.config.train, case.machine.target
    is_served = all(call.problem(target) is None for call in block.calls(train.dtype.compute))
    return kernel_name(target, is_served, train.deterministic)


def method_costs(case: PlannedCase, block: BlockSpec) -> MethodCosts:
    """Bytes and memory of one softmax layer for a micro-batch."""
    attention = block.attention
    assert attention is not None
    if case.sp_size == 1:
        return MethodCosts(0.0, 0.0, (0, 0), 0.0)
    of_sequence = (case.tokens // case.batch, case.sp_size, attention.window)
    sizes = case.compute_bytes, case.wide_bytes, case.topology.nodes
    is_replayed = case.config.train.recompute is Recompute.full
    computed = case.compute_bytes if attention_kernel(case, block) == "cuDNN" else None
    load = AttentionLoad(*attention[:3], *of_sequence, *sizes, is_replayed, case.batch, computed)
    costs = method_of(case).costs(load)
    of_batch = "forward", "backward", "held", "kept"
    return costs._replace(**{name: case.batch * getattr(costs, name) for name in of_batch})


def plan_exchanges(case: PlannedCase) -> Exchanges:
    """The messages of a step; none where no rank shares a sequence, or in a replay."""
    sent = seconds = 0.0
    if case.backend.scans and case.sp_size > 1:
        link = case.machine.node_link if case.crosses_nodes else case.machine.link
        latency = case.machine.scans[case.link].farthest(case.topology.nodes).exchange
        for block, _ in attention_blocks(case):
            costs, passes = method_costs(case, block), block.count * case.passes
            sent += passes * costs.sent
            computing = _layer_seconds(case, block, case.config.data.seq_len)
            for moved, messages, busy in zip(costs[:2], costs.exchanges, computing, strict=True):
                travelling = moved / link + messages * latency
                hidden = 0.0 if case.machine.is_cpu else costs.hidden * min(busy, travelling)
                seconds += passes * (travelling - hidden)
    return Exchanges(sent, seconds)


def attention_seconds(case: PlannedCase) -> float:
    """Seconds of the softmax layers' scores and outputs in a step."""
    # Where no rank shares a sequence, each has one of its own of as many tokens.
    shared, total = bool(case.backend.scans) or case.sp_size == 1, 0.0
    seq_len = case.config.data.seq_len // (1 if shared else case.sp_size)
    for block, _ in attention_blocks(case):
        slowest = method_costs(case, block).slowest if shared else 1.0
        total += block.count * case.passes * slowest * sum(_layer_seconds(case, block, seq_len))
    return total


def _layer_seconds(case: PlannedCase, block: BlockSpec, seq_len: int) -> tuple[float, float]:
    # Forward and backward, of a pass on the average rank.
    flops, rate = block.operator_flops(seq_len), case.machine.flops[case.config.train.dtype]
    tokens = case.tokens * case.slow_down(block) / rate
    forward, backward = known.ATTENTION[attention_kernel(case, block)]
    return tokens * flops.forward / forward, tokens * (2 * flops.forward + flops.again) / backward
