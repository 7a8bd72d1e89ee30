"""The plan as text, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from models.spec import BlockSpec
from zeco_train.collectives.cost_model import Costs
from zeco_train.plan import calibration
from zeco_train.plan.advice import Option
from zeco_train.plan.attention_costs import (
    attention_blocks,
    attention_kernel,
    method_costs,
    method_of,
    plan_exchanges,
    problem_of,
)
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.config import PlanSettings
from zeco_train.plan.memory import KINDS
from zeco_train.plan.sharding import parameter_seconds, shard_group
from zeco_train.plan.step_time import plan_step
from zeco_train.plan.traffic import (
    costs_of,
    count_scans,
    load_of,
    parameter_traffic,
    plan_halos,
    scan_bytes,
    scan_choice,
    scanning_blocks,
    step_bytes,
)
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.terminal import format_heading, format_row, format_table

# By key of a row of `as_json`; `_UNITS`: of the columns, in bytes and seconds.
_BACKEND_COLUMNS = {
    "name": ("", "<19"),
    "bytes_per_scan": ("MB a scan", ">10:.4g"),
    "bytes_per_step": ("GB a step", ">11:.4g"),
    "scan_seconds": ("µs a scan", ">11:.4g"),
    "exposed_seconds": ("exposed ms", ">12:.4g"),
    "tokens_per_second_per_device": ("tokens/s/device", ">17:,.0f"),
}
_METHOD_COLUMNS = {
    "name": ("", "<19"),
    "bytes_forward": ("MB forward", ">10:.4g"),
    "bytes_backward": ("MB backward", ">12:.4g"),
    "bytes_per_step": ("GB a step", ">11:.4g"),
    "seconds": ("ms a step", ">11:.4g"),
    "held_bytes": ("GB held", ">10:.4g"),
    "tokens_per_second_per_device": ("tokens/s/device", ">17:,.0f"),
}
_UNITS = {
    **dict.fromkeys(("bytes_per_scan", "bytes_forward", "bytes_backward"), 1e6),
    **dict.fromkeys(("bytes_per_step", "held_bytes"), 1e9),
    **dict.fromkeys(("exposed_seconds", "seconds"), 1e-3),
    "scan_seconds": 1e-6,
    "tokens_per_second_per_device": 1.0,
}


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        planned: the requested case.
        options: alternatives that fit, fastest first.
        elsewhere: an option on more ranks, if nothing fits on these.
        notes: assumptions that were not requested.
    """

    settings: PlanSettings
    planned: Option
    options: list[Option]
    elsewhere: Option | None
    notes: list[str]


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, seconds and counts; keys are stable across versions."""
    case, memory = plan.planned.case, plan.planned.memory
    traffic, scans = parameter_traffic(case), count_scans(case)
    return {
        "case": _describe(case),
        "parameters": case.spec.num_parameters,
        "flops_per_token": case.spec.flops_per_token(case.config.data.seq_len).total,
        "memory": {
            "bytes": memory.kinds,
            "phases": memory.phases,
            "phase": memory.phase,
            **{
                f"{name}_bytes": getattr(memory, name)
                for name in ("peak", "usable", "available", "outside", "fragments")
            },
            "headroom": memory.headroom,
            "fits": memory.fits,
        },
        "time": _time(plan.planned, plan.settings),
        "wire": {
            "state_bytes": case.state_bytes,
            "scans": asdict(scans),
            "parameters": {name: getattr(traffic, name) for name in ("gathered", "scattered", "summed")},
            "parameter_seconds": asdict(parameter_seconds(case)),
            "halos": _halos(case),
            "attention": _attention(case),
            "backends": _backends(case),
        },
        "advice": {
            "options": [_option(option, plan.settings) for option in plan.options],
            "more_ranks": None if plan.elsewhere is None else _option(plan.elsewhere, plan.settings),
        },
        "assumptions": _assumptions(case),
        "notes": plan.notes,
    }


def as_text(plan: Plan) -> str:
    """The output of the command."""
    head = [*_head(plan.planned.case), *(f"note: {note}" for note in plan.notes)]
    parts = [head, _memory(plan), _time_lines(plan), _wire(plan.planned.case), _advice(plan)]
    assumed = ["assumed (calibration.py and devices.py; keys of the planner override, see --help)"]
    assumed += [f"  {name:<34}{value}" for name, value in _assumptions(plan.planned.case).items()]
    return "\n\n".join("\n".join(lines) for lines in (*parts, assumed) if lines)


def longest_text(found: Mapping[str, Mapping[str, int | str]]) -> str:
    """The table of `advice.longest_sequences`; below it, why a setting is refused."""
    lines = ["longest sequence that fits, tokens, by parallel= and train.recompute="]
    lines.append(f"  {'':<10}" + "".join(f"{recompute:>15}" for recompute in next(iter(found.values()))))
    for strategy, row in found.items():
        cells = ("refused" if isinstance(tokens, str) else f"{tokens:,}" for tokens in row.values())
        lines.append(f"  {strategy:<10}" + "".join(f"{cell:>15}" for cell in cells))
    reasons = [reason for row in found.values() for reason in row.values() if isinstance(reason, str)]
    return "\n".join([*lines, *(f"  refused: {reason}" for reason in dict.fromkeys(reasons))])


def _describe(case: PlannedCase) -> dict[str, Any]:
    config = case.config
    return {
        "model": config.model.name,
        "gpu": case.machine.name,
        "world_size": case.world_size,
        "sp": config.sp.backend.value,
        "sp_size": case.sp_size,
        "dp_size": case.dp_size,
        "strategy": config.parallel.strategy.value,
        "shards": case.shards,
        "dtype": config.train.dtype.value,
        "compiled": case.compiled,
        "recompute": case.recompute.value,
        "segments": case.segments,
        "seq_len": config.data.seq_len,
        "global_batch": config.data.global_batch,
        "micro_batch": config.data.micro_batch,
        "micro_steps": case.micro_steps,
        "tokens_per_rank_and_pass": case.tokens,
    }


def _head(case: PlannedCase) -> list[str]:
    config, model = case.config, case.config.model
    flops = case.spec.flops_per_token(config.data.seq_len).total
    segments = "" if case.segments == 1 else f" in {case.segments} segments"
    return [
        f"{model.name}: {case.spec.num_parameters:,} parameters, {flops / 1e9:.3g} GFLOP a token, "
        f"{config.train.dtype.value}{', compiled' if case.compiled else ''}",
        f"sp={config.sp.backend.value} on {case.dp_size} × {case.sp_size} ranks (dp × sp) of {case.machine.name}, "
        f"{config.parallel}, recompute={case.recompute.value}",
        f"{config.data.global_batch} × {config.data.seq_len:,} tokens a step{segments}: {case.tokens:,} tokens a rank "
        f"at a time, {case.passes} forward and backward passes",
    ]


def _memory(plan: Plan) -> list[str]:
    memory = plan.planned.memory
    lines = [f"memory of a rank, GB, at its peak: {memory.phase}"]
    lines += [f"  {kind:<14}{memory.kinds[kind] / 1e9:>9.2f}" for kind in KINDS]
    verdict = "fits" if memory.fits else f"does not fit, {(memory.peak - memory.usable) / 1e9:.3g} GB too much"
    lines.append(f"  {'in all':<14}{memory.peak / 1e9:>9.2f}    {verdict}")
    less = {"outside of torch": memory.outside, "for fragments of CUDA graphs' memory": memory.fragments}
    free = f"{memory.available / 1e9:.4g} less {memory.headroom:.0%} headroom"
    free += "".join(f" and {size / 1e9:.3g} {name}" for name, size in less.items() if size)
    lines.append(f"  {'usable':<14}{memory.usable / 1e9:>9.2f}    {free}")
    return lines


def _time(option: Option, settings: PlanSettings) -> dict[str, Any]:
    time, case = option.time, option.case
    budget = settings.token_budget or float(case.config.train.steps * case.tokens_per_step)
    return {
        "step_seconds": time.total,
        "seconds": time.seconds,
        "tokens_per_step": time.tokens,
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_device": time.per_device,
        "token_budget": budget,
        "hours": budget / time.tokens_per_second / 3600,
    }


def _time_lines(plan: Plan) -> list[str]:
    time, figures = plan.planned.time, _time(plan.planned, plan.settings)
    lines = ["time of a step, s"]
    lines += [f"  {kind:<14}{seconds:>9.4g}" for kind, seconds in time.seconds.items()]
    rate = f"{time.tokens_per_second:,.0f} tokens/s, {time.per_device:,.0f} a device"
    lines.append(f"  {'in all':<14}{time.total:>9.4g}    {rate}")
    named = "token_budget" if plan.settings.token_budget else "train.steps"
    lines.append(f"  {figures['hours']:.4g} hours for {figures['token_budget']:.4g} tokens ({named})")
    return lines


def _backends(case: PlannedCase) -> dict[str, dict[str, Any]]:
    # Predictions on the same ranks; without ranks to share a sequence, only for those that share none.
    rows: dict[str, dict[str, Any]] = {}
    configured = scan_choice(case)
    # A backend without algorithms trains separate sequences.
    ways = [(backend, scan) for backend in BACKENDS.values() for scan in backend.scans or (None,)]
    for backend, scan in ways:
        name = backend.name if len(backend.scans) < 2 or scan is None else f"{backend.name} ({scan.name})"
        other = case.by(backend, scan)
        choice = scan_choice(other)
        if choice is None and backend.scans:
            continue
        time = plan_step(other)
        rows[name] = {
            "link": None if choice is None else choice.link.value,
            "bytes_per_scan": scan_bytes(case, scan),
            "bytes_per_step": step_bytes(case, scan),
            "scan_seconds": 0.0 if choice is None else choice.seconds,
            "exposed_seconds": time.seconds["scans"],
            "step_seconds": time.total,
            "tokens_per_second_per_device": time.per_device,
            "planned": backend is case.config.sp.spec and scan is (None if configured is None else configured.scan),
        }
    return rows


def _halos(case: PlannedCase) -> dict[str, float] | None:
    return plan_halos(case)._asdict() if case.spec.needs_halo else None


def _attention(case: PlannedCase) -> list[dict[str, Any]]:
    return [
        {
            "layers": block.count,
            **attention._asdict(),
            "flops_per_token": block.operator_flops(case.config.data.seq_len).forward,
            "methods": {name: _method(case, block, method) for name, method in METHODS.items()},
        }
        for block, attention in attention_blocks(case)
    ]


def _method(case: PlannedCase, block: BlockSpec, method: MethodSpec) -> dict[str, Any]:
    if (problem := problem_of(case, method.name)) is not None:
        return {"problem": problem, "planned": False}
    other = case.by(method=method)
    costs, exchanges, time = method_costs(other, block), plan_exchanges(other), plan_step(other)
    return {
        "bytes_forward": costs.forward,
        "bytes_backward": costs.backward,
        "bytes_per_step": exchanges.sent,
        "seconds": exchanges.seconds,
        "held_bytes": costs.held,
        "tokens_per_second_per_device": time.per_device,
        "planned": case.sp_size > 1 and method is method_of(case),
    }


def _wire(case: PlannedCase) -> list[str]:
    traffic, scans, halos = parameter_traffic(case), count_scans(case), _halos(case)
    reduced = (traffic.scattered + traffic.summed) / 1e9
    lines = [
        "on the wire, sent by a rank",
        f"  parameters: gathered {traffic.gathered / 1e9:.4g}, gradients {reduced:.4g} GB a step",
    ]
    if case.world_size > 1:
        group, took = shard_group(case), parameter_seconds(case)
        where = f"{group.ranks} ranks, {group.nodes} {'node' if group.nodes == 1 else 'nodes'}"
        seconds = f"gathers {took.gathered * 1e3:.4g} ms, reductions {(took.scattered + took.summed) * 1e3:.4g} ms"
        lines.append(f"  parameters are sharded over {where}: {seconds} a step")
    if halos is not None:
        sent = f"{halos['bytes_per_step'] / 1e9:.4g} GB and {halos['seconds'] * 1e3:.4g} ms a step"
        lines.append(f"  halos of convolutions: {halos['messages']} messages to the next rank, {sent}")
    lines += _attention_lines(case)
    states = f"  states of {case.state_bytes / 1e6:.4g} MB, {scans.total} scans a step, by backend on the same ranks:"
    rows = [_cells(name, row) for name, row in _backends(case).items()]
    return [*lines, states, format_table(rows, _BACKEND_COLUMNS, gap="")]


def _cells(name: str, row: dict[str, Any]) -> dict[str, Any]:
    scaled = {key: row[key] / unit for key, unit in _UNITS.items() if key in row}
    return {"name": f"  {name}", **scaled, "note": "(as planned)" if row["planned"] else ""}


def _attention_lines(case: PlannedCase) -> list[str]:
    lines = []
    for row in _attention(case):
        window = "" if row["window"] is None else f", window {row['window']:,}"
        heads = f"{row['heads']} heads of {row['head_dim']}, {row['key_heads']} of keys{window}"
        flops = f"{row['layers'] * row['flops_per_token'] / 1e9:.3g} GFLOP a token"
        lines.append(f"  softmax attention at {row['layers']} layers ({heads}): {flops}, by method on the same ranks:")
        lines.append(format_heading(_METHOD_COLUMNS, gap=""))
        for name, found in row["methods"].items():
            if "problem" in found:
                lines.append(f"  {name:<17}{found['problem']}")
                continue
            lines.append(format_row(_cells(name, found), _METHOD_COLUMNS, gap=""))
    return lines


def _option(option: Option, settings: PlanSettings) -> dict[str, Any]:
    return {
        "recompute": option.case.recompute.value,
        "segments": option.case.segments,
        "world_size": option.case.world_size,
        "sp_size": option.case.sp_size,
        "peak_bytes": option.memory.peak,
        **{name: value for name, value in _time(option, settings).items() if name != "seconds"},
    }


def _advice(plan: Plan) -> list[str]:
    options, own = plan.options, plan.planned.setting
    lines = ["advice: the fewest segments with which each recompute setting fits, fastest first"]
    if not options:
        if plan.elsewhere is None:
            return ["advice: nothing fits, with any train.recompute and train.segments; a smaller model or micro-batch"]
        ranks, options, own = plan.elsewhere.case, [plan.elsewhere], ""
        lines = [f"advice: nothing fits on these ranks; with world_size={ranks.world_size} sp.size={ranks.sp_size}:"]
    for option in options:
        rate = f"{option.time.per_device:>9,.0f} tokens/s/device{'  (as planned)' if option.setting == own else ''}"
        lines.append(f"  {option.setting:<48}{option.memory.peak / 1e9:>8.1f} GB{rate}")
    return lines


def _assumptions(case: PlannedCase) -> dict[str, str]:
    machine, dtype, blocks = case.machine, case.config.train.dtype, scanning_blocks(case)
    costs = costs_of(case, case.config.sp.scans_over(case.topology), load_of(case))
    rows = {
        "matrix products": f"{machine.flops[dtype] / 1e12:.4g} TFLOP/s in {dtype.value}",
        "memory bandwidth": f"{machine.bandwidth / 1e9:.4g} GB/s",
        "between devices, between nodes": f"{machine.link / 1e9:.4g}, {machine.node_link / 1e9:.4g} GB/s",
    }
    if not machine.is_cpu:
        hops = [[f"{getattr(way, name) * 1e6:.3g}" for way in calibration.RINGS] for name in ("hop", "node_hop")]
        inside, between = map(" / ".join, hops)
        rows["hops of FSDP's rings"] = f"{inside} µs by protocol, {between} between nodes (NCCL's table)"
    rows["scans"] = f"{costs.link.value}: {_alpha_beta(costs)}"
    if costs.between is not None:
        rows["scans"] += f"; between nodes {_alpha_beta(costs.between)}"
    for block in blocks:
        operator = block.operators[-1]
        time = calibration.operator_time(operator, case.machine.is_cpu)
        row = (
            f"{time.seconds * 1e9:.3g} ns a token and head of K {time.key_dim}, V {time.value_dim}, forward + backward"
        )
        if operator != time.operator:
            row += f"; {operator} has no measurement, so {time.operator}'s is taken, scaled by K + V"
        if (slow_down := case.slow_down(block)) > 1:
            row += f"; {slow_down:.3g} times as long in PyTorch"
        rows["operator" if len(blocks) == 1 else f"operator {operator}"] = row
    for block, _ in attention_blocks(case):
        kernel = attention_kernel(case, block)
        rates = "{:.0%} of the matrix products' rate forward, {:.0%} backward".format(*calibration.ATTENTION[kernel])
        rows["softmax attention"] = f"{kernel}: {rates}"
    return rows


def _alpha_beta(costs: Costs) -> str:
    return f"α {costs.message * 1e6:.3g} µs, 1/β {1e-9 / costs.byte:.4g} GB/s"
