"""The command `python -m zeco_train.plan`. Connects no ranks; a dry run starts one."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.plan.__main__")

from dataclasses import asdict
from pathlib import Path

from zeco_train.plan.advice import evaluate, longest_sequences, more_ranks, options, shard_note
from zeco_train.plan.case import build_case
from zeco_train.plan.config import Request, describe, parse
from zeco_train.plan.report import Plan, as_json, as_text, longest_text
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.files import write_json_result
from zeco_train.system.paths import warn_of_replacing


@errors_in_a_line
def main(arguments: list[str]) -> int:
    """Print a plan; returns the process's exit code: 0, even if the run does not fit, since that is a valid answer."""
    if {"-h", "--help"} & set(arguments):
        print(describe())
        return 0
    request = parse(arguments)
    settings = request.settings
    warn_of_replacing([] if settings.json is None else [settings.json])
    plan = make_plan(request)
    text, values = as_text(plan), as_json(plan)
    if settings.longest:
        longest = longest_sequences(plan.planned.case, settings.headroom)
        text, values = f"{text}\n\n{longest_text(longest)}", values | {"longest": longest}
    if settings.dry_run:
        # Not at the top: the parts of a run take seconds to import, and a plan needs none of them.
        from zeco_train.plan.dry_run import dry_run

        found = dry_run(plan.planned.case, settings.rank)
        text, values = f"{text}\n\n{found.as_text(plan.planned)}", values | {"dry_run": asdict(found)}
    if settings.json is not None:
        write_json_result(Path(settings.json), values)
    print(text)
    return 0


def make_plan(request: Request) -> Plan:
    """Plan the requested case, and alternatives that fit.

    Raises:
        ConfigError: an invalid split of the ranks.
    """
    case, notes = build_case(request)
    headroom = request.settings.headroom
    planned, fitting = evaluate(case, headroom), options(case, headroom)
    elsewhere = None if fitting else more_ranks(case, headroom)
    if (note := shard_note(planned, headroom)) is not None:
        notes.append(note)
    return Plan(request.settings, planned, fitting, elsewhere, notes)
