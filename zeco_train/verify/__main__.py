"""The command `python -m zeco_train.verify`: settings in; failures, summary and, on request, the table out."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.verify.__main__")

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.mixer_registry import MIXERS
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.config.overrides import load_settings
from zeco_train.config.schema import to_plain
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import find_device
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.operator import Target
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import check_kernels, warn_of
from zeco_train.ops.softmax.attention import kernel_name
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.environment import environment
from zeco_train.system.files import write_json_result
from zeco_train.system.paths import warn_of_replacing
from zeco_train.system.terminal import report_to_launcher
from zeco_train.training.optim.optimizer_registry import OPTIMIZERS
from zeco_train.verify import report
from zeco_train.verify.cases import Verification
from zeco_train.verify.config import VerifyConfig, describe
from zeco_train.verify.report import VerifyRow

# By kind, as in `VerifyRow.uses`.
_KNOWN = {
    "operator": [*OPERATORS],
    "scan": [*BACKENDS, *(scan.name for scan in ALL_SCANS)],
    "method": [*METHODS],
    "mixer": [*MIXERS],
    "strategy": [each.value for each in Strategy],
    "recompute": [each.value for each in Recompute],
    "optimizer": [*OPTIMIZERS],
}
_NEVER = (
    "shards of unequal lengths, which evaluation and generation have",
    "train.matmul=fp8, train.compile=always and bf16 training, whose results are rounded differently",
    "data preparation, checkpoints, evaluation, generation and exports, which have tests of their own",
)
_PROGRESS_SECONDS = 10
_ADVICE = Advice(
    lost_peer="the rows so far stand, the others are unknown",
    memory="fewer tokens or heads need less",
    timeout_key="timeout",
)


def main(arguments: list[str]) -> int:
    """Verify; returns the process's exit code: 0, 1 if a result is off, others for errors."""
    return run_job(partial(_verify, arguments), _ADVICE)


def _verify(arguments: list[str], job: Job) -> int:
    launch = job.launch
    if {"-h", "--help"} & set(arguments):
        if launch.rank == 0:
            print(describe())
        return 0
    config = load_settings(VerifyConfig, arguments)
    device = find_device(config.device, launch)
    everything = config.selects_nothing
    config = config.resolve(device, launch.world_size)
    slow = check_kernels("kernels", config.kernels, config.calls, Target.of(device))
    if launch.rank == 0:
        warn_of(slow)
    # The result on one device is a reference, too, so fp32 products must not use tf32.
    torch.set_float32_matmul_precision("highest")
    started = time.monotonic()
    with job.joining(timedelta(seconds=config.timeout)):
        verification = Verification(config, launch, device, job.enter, everything)
    machine: dict[str, Any] = {}
    if launch.rank == 0:
        warn_of_replacing([] if config.out is None else [config.out])
        machine = {"ranks": str(launch.world_size), **environment(device)}
        versions = f"torch {machine['packages']['torch']}, python {machine['python']}"
        if device.type == "cuda":
            versions += f", softmax attention in bf16 by {kernel_name(Target.of(device), is_served=True)}"
        print(f"ranks {launch.world_size}, device {machine['device_name']}, {versions}\n", flush=True)
    rows: list[VerifyRow] = []
    shown = started
    for row in verification.rows():
        if launch.rank == 0 and not config.table and (now := time.monotonic()) - shown >= _PROGRESS_SECONDS:
            shown = now
            what = f"{row.dtype}, {row.sp_size} × {row.tokens:,} tokens, {row.backend}"
            print(
                f"… {len(rows) + 1} comparisons in {now - started:.0f} s, the last: {what}", file=sys.stderr, flush=True
            )
        if launch.rank == 0:
            _show(row, is_first=not rows or row.on_own_ranks != rows[-1].on_own_ranks, has_table=config.table)
        rows.append(row)
    verification.drain()
    failed = any(row.failures for row in rows)
    if failed:
        report_to_launcher(report.summary(rows))
    if launch.rank == 0:
        if everything:
            print("\nnot covered here:", *not_covered(rows, device, launch), sep="\n- ", flush=True)
        else:
            print("\nnot covered here: what these settings leave out; without settings all runs", flush=True)
        print(f"\n{report.summary(rows)}, {time.monotonic() - started:.0f} s", flush=True)
        if config.out is not None:
            results = {"machine": machine, "config": to_plain(config), "rows": [row.as_dict() for row in rows]}
            write_json_result(Path(config.out), results)
    return 1 if failed else 0


def _show(row: VerifyRow, *, is_first: bool, has_table: bool) -> None:
    if has_table:
        if is_first:
            print(f"{chr(10) * row.on_own_ranks}{report.header(own_ranks=row.on_own_ranks)}", flush=True)
        print(report.line(row), flush=True)
        return
    if is_first:
        where = "ranks of its own, on the CPU" if row.on_own_ranks else "the launched ranks"
        print(f"comparing on {where} (table=true shows each comparison) …", flush=True)
    if row.failures:
        print(report.failure(row), flush=True)


def not_covered(rows: Sequence[VerifyRow], device: torch.device, launch: Launch) -> list[str]:
    """One line each; the first ones are of this machine."""
    found = ["training steps and more ranks than launched ran on the CPU, without kernels and NCCL"]
    if device.type != "cuda":
        found = ["no GPU: Triton kernels, NCCL, symmetric memory, CUDA graphs, bf16"]
    if launch.world_size <= launch.local_world_size or launch.world_size == 1:
        found.append("one machine: lane and the other scans between machines ran between groups of ranks of this one")
    largest = max((row.sp_size for row in rows), default=1)
    longest = max((row.sp_size * row.tokens for row in rows), default=0)
    found.append(f"more than {largest} ranks that share a sequence, sequences of more than {longest:,} tokens")
    used = {use for row in rows if not row.problem for use in row.uses}
    for kind, names in _KNOWN.items():
        if missing := [name for name in names if f"{kind} {name}" not in used]:
            found.append(f"{kind}: {', '.join(missing)}")
    reasons = dict.fromkeys(f"{row.backend}: {row.reason}" for row in rows if row.reason)
    return [*found, *_NEVER, *(f"skipped: {reason}" for reason in reasons)]
