"""`torchrun --nproc-per-node N -m zeco_train.bench CASE [KEY=VALUE …]`: collectives, operator, model or decode.

`python -m zeco_train.bench plot results.json …` draws the results of several runs into the same figures.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.bench.__main__")

from functools import partial

from zeco_train.bench import collectives, decode, figures, model, operator
from zeco_train.bench.config import (
    BenchConfig,
    CollectivesConfig,
    DecodeConfig,
    ModelConfig,
    OperatorConfig,
    describe,
)
from zeco_train.bench.report import LogLines, Report
from zeco_train.bench.session import Session
from zeco_train.config.overrides import load_settings
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.job import Advice, Job, run_job

_ADVICE = Advice(
    lost_peer="the results so far stand",
    memory="fewer tokens, heads or MiB need less, and so do segments=M and recompute=full; the results so far stand",
    timeout_key="timeout_seconds",
)


def main(arguments: list[str]) -> int:
    """Run a case; returns the process's exit code."""
    return run_job(partial(_run, arguments), _ADVICE)


def _run(arguments: list[str], job: Job) -> int:
    case, *rest = arguments or ["--help"]
    if {"-h", "--help"} & {case, *rest}:
        if job.launch.rank == 0:
            print(f"{__doc__}\n{describe()}")
    elif case == "plot":
        print("\n".join(str(path) for path in figures.plot_files(rest)))
    else:
        _measure(case, rest, job)
    return 0


def _measure(case: str, arguments: list[str], job: Job) -> None:
    config: BenchConfig
    if case == "collectives":
        config = load_settings(CollectivesConfig, arguments)
    elif case == "operator":
        config = load_settings(OperatorConfig, arguments)
    elif case == "model":
        config = ModelConfig.load(arguments)
    elif case == "decode":
        config = DecodeConfig.load(arguments)
    else:
        raise ConfigError("case", case, "must be collectives, operator, model, decode or plot")
    job.enter("joining the other ranks")
    session = Session.open(config, job.launch, job.enter)
    job.guard(session.mesh.timeout)
    report = run_case(config, session)
    session.drain()
    if session.mesh.is_main:
        print(f"results are in {report.folder}", flush=True)


def run_case(config: BenchConfig, session: Session) -> Report:
    """Measure, and draw what was measured.

    Raises:
        ZecoError: a wrong result, a folder that cannot be written, a rank that is gone.
    """
    with LogLines(session) as lines:
        if isinstance(config, CollectivesConfig):
            report = collectives.run(config, session)
        elif isinstance(config, OperatorConfig):
            report = operator.run(config, session)
        elif isinstance(config, DecodeConfig):
            report = decode.run(config, session)
        else:
            assert isinstance(config, ModelConfig)
            report = model.run(config, session)
    report.notes += lines.texts
    report.finish()
    if session.mesh.is_main:
        figures.plot([report.as_json()], report.folder)
    return report
