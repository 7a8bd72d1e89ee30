"""The command `python -m zeco_train.evaluate`: run all cheap checks, then one task after another."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from models.spec import spec_of
from zeco_train.config.schema import to_plain
from zeco_train.distributed.device import Device, find_device
from zeco_train.distributed.mesh import agree, join_alike, resolve_sp_size
from zeco_train.distributed.parallelize import count_shards
from zeco_train.errors import ConfigError
from zeco_train.evaluate.arguments import describe, parse
from zeco_train.evaluate.evaluation import Evaluation, check_read, replaced
from zeco_train.evaluate.registry import Task, build_tasks
from zeco_train.evaluate.results import RESULTS_FILE, ResultsFolder
from zeco_train.hf.trained import Trained, find_trained
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import check_kernels, warn_of
from zeco_train.system.environment import environment
from zeco_train.system.terminal import visible

_ADVICE = Advice(
    lost_peer="the results so far stand, the tasks after them are to be run again",
    memory="more train.segments or ranks for a sequence, a smaller data.micro_batch or lm_eval.batch_tokens need less",
    timeout_key="parallel.timeout_seconds",
)


def main(arguments: list[str]) -> int:
    """Evaluate; returns the process's exit code."""
    return run_job(partial(_evaluate, arguments), _ADVICE)


def _evaluate(arguments: list[str], job: Job) -> int:
    if {"-h", "--help"} & set(arguments):
        if job.launch.rank == 0:
            print(describe())
        return 0
    request = parse(arguments)
    check_read(request.overrides)
    tasks = build_tasks(request.tasks, request.standard, request.settings)
    trained = find_trained(request.path)
    _check_causal(trained, [*request.tasks, *request.standard])
    config = trained.configure([*request.overrides, *_fitting_batch(request.overrides)])
    # By default all ranks share a sequence, except for lm_eval's short texts.
    size = 1 if config.sp.size == -1 and not request.tasks else config.sp.size
    sp_size = resolve_sp_size(size, job.launch.world_size, config.sp.backend.value)
    count_shards(config.parallel.strategy, config.parallel.shard_size, job.launch.world_size, sp_size)
    device = find_device(config.train.device, job.launch, "train.device")
    calls = spec_of(trained.model).calls(config.train.dtype.compute)
    slow = check_kernels("train.kernels", config.train.kernels, calls, Target.of(device))
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    with job.joining(timeout):
        mesh = join_alike(to_plain(config), job.launch, sp_size, device, timeout)
    if mesh.is_main:
        warn_of(slow)
    config = replace(
        config, sp=replace(config.sp, size=sp_size), train=replace(config.train, device=Device(device.type))
    )
    evaluation = Evaluation(trained, config, mesh, job.enter, request.standard)
    for name, task in tasks.items():
        job.enter(f"preparing {name}")
        task.prepare(evaluation)
    # Before the tasks: an unusable --out should not cost their work.
    facts = _facts(evaluation, tasks) if mesh.is_main else {}
    folder = agree(mesh, lambda: ResultsFolder(request.out, trained, facts) if mesh.is_main else None)
    evaluation.note(_banner(evaluation))
    if trained.config is not None and (line := replaced(trained.config, config, request.overrides)) is not None:
        evaluation.note(line)
    _run(evaluation, tasks, folder)
    # Raises the error of a failed scan, and waits for its sends, before the groups are destroyed.
    evaluation.exchange.drain()
    if folder is not None and folder.path is not None:
        print(visible(f"results: {folder.path / RESULTS_FILE}"), flush=True)
    return 0


def _check_causal(trained: Trained, tasks: Sequence[str]) -> None:
    for task in tasks:
        if not trained.model.causal and task != "validation":
            problem = "asks for next tokens, which this model (model.causal=false) reads; only validation is possible"
            raise ConfigError("--tasks", task, problem)


def _fitting_batch(overrides: Sequence[str]) -> list[str]:
    """Override data.global_batch, which is unused here, to a multiple of the requested data.micro_batch."""
    pairs = [text.partition("=") for text in overrides]
    return [f"data.global_batch={value}" for key, _, value in pairs if key == "data.micro_batch"]


def _run(evaluation: Evaluation, tasks: Mapping[str, Task], folder: ResultsFolder | None) -> None:
    for name, task in tasks.items():
        evaluation.enter(f"task {name}")
        evaluation.note(f"\n{name}")
        started = time.monotonic()
        result = task.run(evaluation)
        for line in result.lines:
            evaluation.note(line)
        agree(evaluation.mesh, lambda: folder.add(name, result) if folder is not None else None)  # noqa: B023
        evaluation.note(f"({time.monotonic() - started:.1f} s)")


def _facts(evaluation: Evaluation, tasks: Mapping[str, Task]) -> dict[str, Any]:
    trained = evaluation.trained
    return {
        "model": str(trained.path.resolve()),
        "step": trained.step,
        "ranks": evaluation.mesh.world_size,
        "environment": environment(evaluation.mesh.device),
        "settings": {name: to_plain(task) for name, task in tasks.items()},
        "config": to_plain(evaluation.config),
    }


def _banner(evaluation: Evaluation) -> str:
    mesh, config = evaluation.mesh, evaluation.config
    return (
        f"{evaluation.title} ({evaluation.trained.path}): {config.model.name}, {config.train.dtype.value}, "
        f"sp={config.sp.backend.value}, {mesh.dp_size} × {mesh.sp_size} ranks (dp × sp) on {mesh.device.type}"
    )
