"""Our own series: what was measured (`../results`), and what the planner predicts for more GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeco_train.bench.stored import load_results
from zeco_train.collectives.cost_model import assumed_costs
from zeco_train.plan.advice import fastest_shards
from zeco_train.plan.case import PlannedCase, build_case
from zeco_train.plan.config import parse
from zeco_train.plan.sharding import parameter_seconds
from zeco_train.plan.step_time import plan_step
from zeco_train.plan.traffic import scan_choice
from zeco_train.sp.backend_registry import BACKENDS

RESULTS = Path(__file__).resolve().parents[1] / "results"
GPUS = tuple(8 << n for n in range(10))
DEVICES = ("h100", "h200")
TOKENS = (16_384, 32_768)
# Latency between nodes in µs: InfiniBand's good case, the middle, and NCCL's measured inside a node with a network's.
ALPHAS = (8.0, 12.0, 25.0)
ALPHA = 12.0
GBPS = 45.0
ASSUMED = (
    f"assumed: nodes of 8; between them {ALPHA:g} µs a message and {GBPS:g} GB/s a GPU, inside them NCCL's messages as "
    "measured on H200s; no noise;\nFSDP within the fastest number of GPUs, by NCCL's table of hops and at 35 GB/s a "
    "network card, mostly behind compute; efficiency is relative to dp by the same planner"
)


@dataclass(frozen=True)
class Measured:
    """A measured value: ms of a scan or an operator, or tokens/s of a GPU."""

    table: str
    method: str
    gpus: int
    tokens: int
    value: float
    device: str


@dataclass(frozen=True)
class Predicted:
    """The planner's values for gla_1b.

    Attributes:
        device: h100 or h200.
        gpus: all share one sequence.
        tokens: a GPU.
        alpha: µs of a message between nodes.
        backend: of the row; `zeco` takes the fastest scan, and `dp:all` shards over all GPUs.
        shards: GPUs over which FSDP shards.
        scan: the algorithm; empty for dp.
        microseconds: of one scan.
        rate: tokens/s of a GPU.
        efficiency: rate over that of dp.
    """

    device: str
    gpus: int
    tokens: int
    alpha: float
    backend: str
    shards: int
    scan: str
    microseconds: float
    rate: float
    efficiency: float


def measured() -> list[Measured]:
    """The rows of our results that the papers' tables have, too; none in an installation without the results."""
    rows: list[Measured] = []
    if not RESULTS.is_dir():
        return rows
    result, device = _load("collectives_4xh200")
    # The state of the paper's Table 2 has 2 MiB, see `machine.py`.
    names = {"all_gather": "all_gather", "zeco:two_shot:symmetric": "all_scan"}
    for row in result["rows"]:
        if row["mode"] == "eager" and row["size_mb"] == 2 and row["variant"] in names:
            name = names[row["variant"]]
            rows.append(Measured("ZeCO 2", name, result["world_size"], 0, row["median_ms"], device))
    result, device = _load("operator_4xh200")
    for row in result["rows"]:
        if row["mode"] == "eager" and row["heads"] == 16 and row["variant"] in BACKENDS:
            table = f"ZeCO {3 if row['tokens'] == TOKENS[0] else 4}"
            values = row["tokens"], row["median_ms"], device
            rows.append(Measured(table, row["variant"], result["world_size"], *values))
    for name in ("model_4xh200_16k", "model_4xh200_32k"):
        result, device = _load(name)
        for row in result["rows"]:
            if row["variant"] in BACKENDS:
                table = f"ZeCO {5 if row['tokens'] == TOKENS[0] else 6}"
                values = row["tokens"], row["tokens_per_second_per_gpu"], device
                rows.append(Measured(table, row["variant"], result["world_size"], *values))
    return rows


def _load(name: str) -> tuple[dict[str, Any], str]:
    result = load_results(RESULTS / f"{name}.json")
    return result, str(result["environment"].get("device_name", "")).removeprefix("NVIDIA ")


def predicted() -> list[Predicted]:
    """Predictions for 8 to 4,096 GPUs: of all backends and scans at `ALPHA`, of zeco at the other latencies."""
    return [
        row
        for device in DEVICES
        for tokens in TOKENS
        for alpha in ALPHAS
        for gpus in GPUS
        for row in _rows(device, gpus, tokens, alpha)
    ]


def _rows(device: str, gpus: int, tokens: int, alpha: float) -> Iterator[Predicted]:
    case = gla_1b(device, gpus, tokens, alpha)
    of_dp = plan_step(case.by(BACKENDS["dp"])).per_device
    if alpha == ALPHA:
        rate = plan_step(gla_1b(device, gpus, tokens, alpha, gpus).by(BACKENDS["dp"])).per_device
        yield Predicted(device, gpus, tokens, alpha, "dp:all", gpus, "", 0.0, rate, rate / of_dp)
    for backend in BACKENDS.values():
        if alpha != ALPHA and backend.name != "zeco":
            continue
        for scan in (None, *(backend.scans if backend.name == "zeco" and alpha == ALPHA else ())):
            choice = scan_choice(case.by(backend, scan))
            if choice is None and backend.scans:
                continue
            rate = plan_step(case.by(backend, scan)).per_device
            name = "" if choice is None else choice.scan.name
            microseconds = 0.0 if choice is None else choice.seconds * 1e6
            label = backend.name if scan is None else f"zeco:{name}"
            scaled = rate, rate / of_dp
            yield Predicted(device, gpus, tokens, alpha, label, case.shards, name, microseconds, *scaled)


_CASES: dict[str, PlannedCase] = {}
_SHARDS: dict[tuple[str, int, int], int] = {}


def gla_1b(device: str, gpus: int, tokens: int, alpha: float, shards: int | None = None) -> PlannedCase:
    """gla_1b on GPUs that share one sequence, with FSDP within `shards` of them; None: within the fastest number.

    Composed once per device: a case is a few numbers of it.
    """
    if device not in _CASES:
        arguments = ["+experiment=gla_1b_16k", f"gpu={device}", "world_size=8", "sp.size=8", "data.seq_len=131072"]
        _CASES[device] = build_case(parse(arguments))[0]
    case = _CASES[device]
    config = dataclasses.replace(
        case.config,
        sp=dataclasses.replace(case.config.sp, size=gpus),
        data=dataclasses.replace(case.config.data, seq_len=tokens * gpus),
    )
    costs = assumed_costs(node_message=alpha * 1e-6, node_byte=1e-9 / GBPS)
    machine = dataclasses.replace(case.machine, scans=costs)
    case = dataclasses.replace(case, config=config, world_size=gpus, sp_size=gpus, machine=machine)
    if shards is None:
        # Independent of the latency of scans.
        key = device, gpus, tokens
        if key not in _SHARDS:
            fastest = fastest_shards(case.by(BACKENDS["dp"]), 0.05)
            assert fastest is not None, "gla_1b fits"
            _SHARDS[key] = fastest.case.shards
        shards = _SHARDS[key]
    return case.with_changes(shard_size=shards)


def ring_seconds(gpus: int) -> float:
    """FSDP's collectives in a step of gla_1b over H100s, one after the other; its tokens do not matter."""
    return parameter_seconds(gla_1b("h100", gpus, TOKENS[0], ALPHA, gpus)).total
