"""The command `python -m zeco_train.verify`: settings in; failures, summary and, on request, the table out."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeco_train.config.overrides import load_settings
from zeco_train.config.schema import to_plain
from zeco_train.distributed.device import find_device
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.ops.operator import Target
from zeco_train.ops.operator_registry import DEFAULT
from zeco_train.ops.slow_paths import check_kernels, warn_of
from zeco_train.system.environment import environment
from zeco_train.system.files import write_json_result
from zeco_train.system.paths import warn_of_replacing
from zeco_train.system.terminal import report_to_launcher
from zeco_train.verify import report
from zeco_train.verify.cases import Verification
from zeco_train.verify.config import VerifyConfig, describe
from zeco_train.verify.coverage import not_covered
from zeco_train.verify.report import VerifyRow

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
        of = "" if config.operator in (None, DEFAULT) else f", operator {config.operator}"
        print(f"ranks {launch.world_size}, device {machine['device_name']}, {versions}{of}\n", flush=True)
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
