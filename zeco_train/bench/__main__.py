"""`torchrun --nproc-per-node N -m zeco_train.bench CASE [KEY=VALUE …]`.

collectives, operator, attention, model and decode compare variants; operator_cpu, loader, documents and checkpoint
measure the operator on a CPU, data loading, and how long a checkpoint blocks training; delays, of two ranks, what late
states and late ranks cost.
`python -m zeco_train.bench plot results.json …` draws the results of several runs into the same figures;
`python -m zeco_train.bench paper out=FOLDER` the papers' figures, with a model's values and ours. Neither needs a GPU.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.bench.__main__")

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from zeco_train.bench import (
    attention,
    checkpoint,
    collectives,
    decode,
    delays,
    documents,
    figures,
    loader,
    model,
    operator,
    operator_cpu,
)
from zeco_train.bench.config import BenchConfig, CaseConfig, describe
from zeco_train.bench.delays_config import DelaysConfig
from zeco_train.bench.paper.command import paper
from zeco_train.bench.report import LogLines, Report
from zeco_train.bench.session import Session
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.job import Advice, Job, run_job
from zeco_train.system.arguments import docstring

_ADVICE = Advice(
    lost_peer="the results so far stand",
    memory="fewer tokens, heads or MiB need less, and so do segments=M and recompute=full; the results so far stand",
    timeout_key="timeout_seconds",
)
# Settings class, and (settings, Session) → `Report`.
_CASES: dict[str, tuple[type[CaseConfig], Callable[[Any, Session], Report]]] = {
    "collectives": (collectives.CollectivesConfig, collectives.run),
    "operator": (operator.OperatorConfig, operator.run),
    "attention": (attention.AttentionConfig, attention.run),
    "model": (model.ModelConfig, model.run),
    "decode": (decode.DecodeConfig, decode.run),
    "operator_cpu": (operator_cpu.OperatorCpuConfig, operator_cpu.run),
    "loader": (loader.LoaderConfig, loader.run),
    "documents": (documents.DocumentsConfig, documents.run),
    "checkpoint": (checkpoint.CheckpointConfig, checkpoint.run),
    "delays": (DelaysConfig, delays.run),
}


def main(arguments: list[str]) -> int:
    """Run a case; returns the process's exit code, 1 if a measurement fails its check."""
    return run_job(partial(_run, arguments), _ADVICE)


def _run(arguments: list[str], job: Job) -> int:
    case, *rest = arguments or ["--help"]
    if {"-h", "--help"} & {case, *rest}:
        if job.launch.rank == 0:
            cases = describe({name: schema for name, (schema, _) in _CASES.items()})
            print(f"{docstring(sys.modules[__name__])}\n\n{cases}")
        return 0
    if case == "plot":
        print("\n".join(str(path) for path in figures.plot_files(rest)))
        return 0
    if case == "paper":
        print("\n".join(str(path) for path in paper(rest)))
        return 0
    if case not in _CASES:
        raise ConfigError("case", case, f"must be {', '.join(_CASES)}, plot or paper")
    config = _CASES[case][0].load(rest)
    with job.joining(timedelta(seconds=config.timeout_seconds)):
        session = Session.open(config, job.launch, job)
    report = run_case(config, session)
    session.drain()
    if session.mesh.is_main:
        print(f"results are in {report.folder}", flush=True)
    return 1 if report.failures else 0


def run_case(config: CaseConfig, session: Session) -> Report:
    """Measure, and plot the results.

    Raises:
        ZecoError: a wrong result, an unwritable folder, or a lost rank.
    """
    lines = LogLines(session)
    # Training cases log every step.
    with lines if isinstance(config, BenchConfig) else nullcontext():
        report = dict(_CASES.values())[type(config)](config, session)
    report.notes += lines.texts
    report.finish()
    if session.mesh.is_main:
        figures.plot([report.as_json()], report.folder)
    return report
