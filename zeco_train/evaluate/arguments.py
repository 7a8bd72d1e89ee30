"""Parses the command line of `zeco_train.evaluate`: model, tasks and settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeco_train.config.overrides import describe_settings
from zeco_train.errors import ConfigError
from zeco_train.evaluate.registry import LM_EVAL, STANDARD, TASKS
from zeco_train.system.command import Parser, user_path


@dataclass(frozen=True)
class Request:
    """Parsed command line."""

    path: str  # of the trained model
    tasks: list[str]  # built-in ones
    standard: list[str]  # lm_eval's
    settings: list[str]  # TASK.KEY=VALUE
    overrides: list[str]  # KEY=VALUE, of the run's configuration
    out: Path | None  # None: a folder beside the model


def parse(arguments: Sequence[str]) -> Request:
    """Read a command line. Raises ConfigError if it is malformed, or names a task twice or none."""
    parser = Parser(prog="python -m zeco_train.evaluate", add_help=False)
    parser.add_argument("path", metavar="RUN")
    parser.add_argument("--tasks", default="validation")
    parser.add_argument("--out", type=user_path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    # `parse_args` would refuse KEY=VALUE behind an option.
    parsed = parser.parse_intermixed_args(list(arguments))
    names = [name.strip() for name in parsed.tasks.split(",")]
    for name in names:
        if not re.fullmatch(r"[\w.:+/-]+", name):
            allowed = "must be names with commas between them, as in validation,piqa"
            raise ConfigError("--tasks", ",".join(names), allowed)
        if names.count(name) > 1:
            raise ConfigError("--tasks", ",".join(names), f"names {name} twice")
    own = [name for name in names if name in TASKS]
    standard = [name for name in names if name not in TASKS]
    used = own + ([LM_EVAL] if standard else [])
    settings = [text for text in parsed.settings if _section(text) in (*TASKS, LM_EVAL)]
    for text in settings:
        if _section(text) not in used:
            key, _, value = text.partition("=")
            needed = f"one of lm_eval's tasks in --tasks, as --tasks={','.join([*own, 'piqa'])}"
            needed = needed if _section(text) == LM_EVAL else f"--tasks={','.join([*own, _section(text)])}"
            raise ConfigError(key, value, f"would be ignored; it needs {needed}")
    overrides = [text for text in parsed.settings if text not in settings]
    for text in overrides:
        _check_override(text)
    return Request(parsed.path, own, standard, settings, overrides, parsed.out)


def _section(text: str) -> str:
    return text.partition("=")[0].partition(".")[0]


def _check_override(text: str) -> None:
    # One without "=" is probably the path of a second model.
    if "=" not in text:
        raise ConfigError("argument", text, "is neither KEY=VALUE nor an option; one model at a time is evaluated")
    key, _, value = text.partition("=")
    close = difflib.get_close_matches(key.partition(".")[0], [*TASKS, LM_EVAL], n=1, cutoff=0.8)
    if "." in key and close:
        raise ConfigError(key, value, f"unknown key; did you mean {close[0]}.{key.partition('.')[2]}?")


def describe() -> str:
    """The text of `--help`."""
    tasks = "\n".join(f"  {name:<12} {kind.summary}" for name, kind in TASKS.items())
    kinds = {**TASKS, LM_EVAL: STANDARD}
    settings = [f"{name}.KEY=VALUE:\n{describe_settings(kind.load())}" for name, kind in kinds.items()]
    return (
        "usage: [torchrun --nproc-per-node N -m | python -m] zeco_train.evaluate RUN [--tasks NAME,…] [--out FOLDER]\n"
        "           [KEY=VALUE …]\n\n"
        "RUN is a run's folder, one of its checkpoints (step_…), or an export. Without --tasks: validation.\n"
        "--out is a new folder for results.json and the pictures; without, one beside the model.\n\n"
        f"Tasks; other names are lm_eval's (piqa, hellaswag, winogrande, arc_easy, openbookqa, …):\n{tasks}\n\n"
        "KEY=VALUE is as for train.py, on top of the run's own configuration: data, sp, parallel, data.seq_len,\n"
        "train.segments, train.dtype, train.device, train.kernels (data=… sets all of data but its seq_len);\n"
        "or a task's own:\n\n" + "\n\n".join(settings)
    )
