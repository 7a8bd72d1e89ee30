"""Make the throughput dashboard of a W&B project: backends × lengths × devices, losses, communication, memory, MFU.

python launch/wandb_dashboard.py --project zeco-train                   publishes it and prints its address
python launch/wandb_dashboard.py --offline dashboard.json               writes it to a file, without a network
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeco_train.errors import ConfigError
from zeco_train.report.dashboard import NAME, as_json, build, check_installed, publish
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import write_json_result
from zeco_train.system.terminal import show_any_text


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Publish or write; returns the process's exit code."""
    parser = Parser(prog="launch/wandb_dashboard.py", description=docstring(sys.modules[__name__]).partition("\n")[0])
    parser.add_argument("--project", default="zeco-train", help="default: zeco-train")
    parser.add_argument("--entity", help="a user or a team; default: the account's own")
    parser.add_argument("--name", default=NAME, help=f"of the saved view; default: {NAME}")
    parser.add_argument("--model", help="show the runs of this model only")
    parser.add_argument("--update", metavar="URL", help="a saved view that is to have these panels instead of its own")
    parser.add_argument("--offline", type=Path, metavar="OUT.json", help="write it there, publish nothing")
    given = parser.parse_args(arguments)
    if given.offline and given.update:
        raise ConfigError("--update", given.update, "has no effect with --offline")
    check_installed()
    if given.offline:
        view = build(given.entity or "entity", given.project, given.name, given.model)
        write_json_result(given.offline, as_json(view))
        print(given.offline)
    else:
        print(publish(given.project, given.entity, given.name, given.model, given.update))
    return 0


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
