"""`zeco-train COMMAND …`, or `python -m zeco_train COMMAND …`: entry point of all commands, from any folder.

On several ranks: `torchrun --nproc-per-node N -m zeco_train train KEY=VALUE …`.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from zeco_train.errors import ConfigError
from zeco_train.system.signals import remember_warning, run_command

# Module with the command's `main`, and its help line.
COMMANDS = {
    "train": ("zeco_train.cli", "train a model, or continue a run"),
    "prepare": ("data.prepare", "make a token store of texts or of a data set"),
    "inspect": ("data.inspect", "show and check a token store"),
    "plan": ("zeco_train.plan.__main__", "memory and time of a configuration, before it runs"),
    "verify": ("zeco_train.verify.__main__", "check every backend on this machine against fp64"),
    "bench": ("zeco_train.bench.__main__", "measure operators, backends and models"),
    "evaluate": ("zeco_train.evaluate.__main__", "losses at length, recall, needles and standard tasks"),
    "generate": ("zeco_train.generate.__main__", "continue prompts with a trained model"),
    "export": ("zeco_train.export", "write a run as a folder that Hugging Face's libraries read"),
    "compare": ("zeco_train.compare", "how far the curves of runs lie apart"),
    "report": ("zeco_train.report.__main__", "a page about runs and benchmarks"),
}


def describe() -> str:
    """The text of `zeco-train --help`."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    return f"usage: zeco-train COMMAND …\n\n{lines}\n\nzeco-train COMMAND --help has each one's settings."


def main() -> NoReturn:
    """Run the command named by the first argument with the remaining arguments."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(describe())
        sys.exit(0)
    if name not in COMMANDS:
        print(ConfigError("command", name, f"must be one of {', '.join(COMMANDS)}").line, file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    # The commands' parsers read it.
    sys.argv = [f"zeco-train {name}", *rest]
    if name == "train":
        # Slurm's SIGUSR1, as in train.py.
        remember_warning()
    run_command(COMMANDS[name][0])


if __name__ == "__main__":
    main()
