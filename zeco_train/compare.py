"""Compare the curves of several runs: `python -m zeco_train.compare RUN_DIR RUN_DIR … [--max-difference X]`.

Reads each run's metrics.jsonl and compares loss and gradient norm, step by step, with those of the first run. Prints a
table, and writes `compare.png` and `compare.json` beside the first run's folder, or to `--out`.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.compare")

import argparse
import sys
from collections.abc import Sequence

from zeco_train.errors import ConfigError
from zeco_train.report.comparison import PLOT_FILE, RESULTS_FILE, describe, draw, read_runs, table
from zeco_train.system.command import Parser, docstring, errors_in_a_line, user_path
from zeco_train.system.files import write_json_result
from zeco_train.system.paths import check_outputs
from zeco_train.system.terminal import visible


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m zeco_train.compare", description=docstring(sys.modules[__name__]))
    parser.add_argument(
        "runs", nargs="+", type=user_path, metavar="RUN_DIR", help="folders of runs; the first is the measure"
    )
    parser.add_argument("--max-difference", type=float, metavar="X", help="fail if a loss differs by more, relatively")
    parser.add_argument("--out", type=user_path, metavar="FOLDER", help="for compare.png and compare.json")
    parsed = parser.parse_args(arguments)
    if parsed.max_difference is not None and not parsed.max_difference >= 0:
        raise ConfigError("--max-difference", parsed.max_difference, "must be ≥ 0")
    return parsed


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Compare; returns the process's exit code: 1 if a loss differs by more than `--max-difference`."""
    options = _parse(arguments)
    runs = read_runs(options.runs)
    out = options.out or runs[0].path.parent
    results = out / RESULTS_FILE
    check_outputs("--out", out, (RESULTS_FILE, PLOT_FILE))
    rows = describe(runs)
    print(visible(table(rows)))
    write_json_result(results, {"measure": runs[0].name, "runs": rows})
    draw(runs, out / PLOT_FILE)
    worst = max(rows[1:], key=lambda row: row["difference"]["loss"]["relative"], default=None)
    if worst is None:
        print(visible(f"one run; {results}, {out / PLOT_FILE}"))
        return 0
    relative, step = (worst["difference"]["loss"][key] for key in ("relative", "relative_step"))
    limit = options.max_difference
    # Not `relative > limit`: a NaN must fail.
    failed = limit is not None and not relative <= limit
    verdict = "" if limit is None else f", {'MORE than' if failed else 'within'} {limit:g}"
    largest = f"largest relative difference of loss from {runs[0].name}: {relative:.2e}, {worst['name']} at step {step}"
    print(visible(f"{largest}{verdict}; {results}, {out / PLOT_FILE}"))
    return 1 if failed else 0
