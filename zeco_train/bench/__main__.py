"""`torchrun --nproc-per-node N -m zeco_train.bench CASE [KEY=VALUE …]`; cases are `collectives` and `operator`.

`python -m zeco_train.bench plot results.json …` draws the results of several runs into the same figures.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from zeco_train.bench import collectives, figures, operator
from zeco_train.bench.config import BenchConfig, CollectivesConfig, OperatorConfig, describe, parse
from zeco_train.bench.report import LogLines, Report
from zeco_train.bench.session import Session
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.mesh import Launch
from zeco_train.signals import die_with_launcher

# A launcher ends all ranks once one has: the others leave rank 0 the time to say what is wrong.
_SECONDS_TO_IMPORT, _SECONDS_AMONG_RANKS = 20.0, 2.0


def main(arguments: list[str]) -> int:
    """Run a case; returns the process's exit code."""
    launch = Launch.from_environment()
    if launch.world_size > 1:
        die_with_launcher()
    try:
        case, *rest = arguments or ["--help"]
        if case in ("-h", "--help"):
            if launch.rank == 0:
                print(f"{__doc__}\n{describe()}")
            return 0
        if case == "plot":
            print("\n".join(str(path) for path in figures.plot_files(rest)))
            return 0
        return _measure(case, rest, launch)
    except ZecoError as error:
        return _end(error, launch)


def _measure(case: str, arguments: list[str], launch: Launch) -> int:
    config: BenchConfig
    if case == "collectives":
        config = parse(CollectivesConfig, arguments)
    elif case == "operator":
        config = parse(OperatorConfig, arguments)
    else:
        raise ConfigError("case", case, "must be collectives, operator or plot")
    session = Session.open(config, launch)
    report = run_case(config, session)
    session.drain()
    if session.mesh.is_main:
        print(f"results are in {report.folder}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run_case(config: BenchConfig, session: Session) -> Report:
    """Measure, and draw what was measured.

    Raises:
        ZecoError: a wrong result, a folder that cannot be written, a rank that is gone.
    """
    with LogLines(session) as lines:
        if isinstance(config, CollectivesConfig):
            report = collectives.run(config, session)
        else:
            assert isinstance(config, OperatorConfig)
            report = operator.run(config, session)
    report.notes += lines.texts
    report.finish()
    if session.mesh.is_main:
        figures.plot([report.as_json()], report.folder)
    return report


def _end(error: ZecoError, launch: Launch) -> int:
    """Say what is wrong, once: mostly every rank has the error, and rank 0 speaks. One that is still there after its
    wait is alone with its error, and speaks itself."""
    joined = dist.is_initialized()
    if launch.rank != 0:
        time.sleep(_SECONDS_AMONG_RANKS if joined else _SECONDS_TO_IMPORT)
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    if joined:
        sys.stdout.flush()
        # Not sys.exit: shutting the process groups down would wait for whoever is lost.
        os._exit(error.exit_code)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
