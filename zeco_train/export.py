"""`python -m zeco_train.export RUN OUT`: export a trained model as a folder for Hugging Face's libraries, on a CPU."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.export")

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from zeco_train.config.help import describe_settings
from zeco_train.config.overrides import load_settings
from zeco_train.errors import ConfigError
from zeco_train.hf.export import ExportSettings, export
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.terminal import visible

_USAGE = "python -m zeco_train.export RUN OUT [KEY=VALUE ...]"


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Export; returns the process's exit code."""
    if {"-h", "--help"} & set(arguments):
        print(f"usage: {_USAGE}\n\nRUN: a run's folder, or one of its checkpoints. OUT: a new folder.\n")
        print(describe_settings(ExportSettings))
        return 0
    # A name may have a =, but a forgotten OUT does not make a folder of a setting.
    settings_names = {entry.name for entry in fields(ExportSettings)}
    if len(arguments) < 2 or {name.partition("=")[0] for name in arguments[:2] if "=" in name} & settings_names:
        raise ConfigError("arguments", " ".join(arguments), f"must be: {_USAGE}")
    settings = load_settings(ExportSettings, arguments[2:])
    print(visible(export(arguments[0], Path(arguments[1]), settings)))
    print(visible(f"how to load it: {Path(arguments[1]) / 'README.md'}"))
    return 0
