"""`torchrun --nproc-per-node N -m zeco_train.bench CASE [KEY=VALUE …]` compares variants of a case on N ranks.

`python -m zeco_train.bench plot results.json …` draws the results of several runs into the same figures, without a GPU.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.bench.__main__")

import sys
from functools import partial

from zeco_train.bench import attention, collectives, decode, figures, longest, model, operator
from zeco_train.bench.case import ADVICE
from zeco_train.bench.config import describe
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.end import Job, run_job
from zeco_train.system.command import docstring

CASES = {each.CASE.name: each.CASE for each in (collectives, operator, attention, model, decode, longest)}


def main(arguments: list[str]) -> int:
    """Run a case; returns the process's exit code, 1 if a measurement fails its check."""
    return run_job(partial(_run, arguments), ADVICE)


def _run(arguments: list[str], job: Job) -> int:
    name, *rest = arguments or ["--help"]
    if {"-h", "--help"} & {name, *rest}:
        if job.launch.rank == 0:
            chosen = {name, *rest} & CASES.keys() or CASES
            cases = describe({name: CASES[name].config for name in CASES if name in chosen})
            print(f"{docstring(sys.modules[__name__])}\n\n{cases}")
        return 0
    if name == "plot":
        print("\n".join(str(path) for path in figures.plot_files(rest)))
        return 0
    if name not in CASES:
        raise ConfigError("case", name, f"must be {', '.join(CASES)} or plot")
    return CASES[name].start(rest, job)
