"""Several runs, and benchmarks, on one page: `python -m zeco_train.report PATH … [--out FOLDER] [--title TEXT]`.

A PATH is the folder of a run, a folder of such folders, or the results.json of a benchmark. The report is a PNG and a
self-contained HTML page: throughput by backend, length and devices, loss curves and their differences, and the step
time lost to communication and data loading.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.report.__main__")

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zeco_train.bench.figures import plot
from zeco_train.report.measurements import Comparison, read
from zeco_train.report.page import page
from zeco_train.report.panels import panels, whole_figure
from zeco_train.system.command import Parser, docstring, errors_in_a_line, user_path
from zeco_train.system.figures import save_figure
from zeco_train.system.files import write_json_result, write_result
from zeco_train.system.paths import check_output_folder, check_outputs
from zeco_train.system.terminal import visible

PAGE_FILE, PICTURE_FILE, RESULTS_FILE = "report.html", "report.png", "report.json"


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Write the report; returns the process's exit code."""
    parsed = _parse(arguments)
    print(visible(write_report(parsed.paths, parsed.out, parsed.title)))
    return 0


def write_report(paths: Sequence[Path], out: Path, title: str) -> str:
    """Read runs and benchmarks, and write page, picture and figures; returns a one-line summary.

    Raises:
        ZecoError: a path is neither a run nor a benchmark, or a file cannot be written.
    """
    check_output_folder("--out", out)
    comparison = read(paths)
    # After all that may be refused, since it warns of files that it replaces.
    check_outputs("--out", out, (PAGE_FILE, PICTURE_FILE, RESULTS_FILE))
    drawn = panels(comparison)
    files = [out / PAGE_FILE]
    if drawn:
        files.append(save_figure(whole_figure(drawn, title), out / PICTURE_FILE))
    files.append(out / RESULTS_FILE)
    rows = [measurement.as_dict() for measurement in comparison.measurements]
    write_json_result(out / RESULTS_FILE, {"title": title, "measurements": rows, "notes": comparison.notes})
    write_result(out / PAGE_FILE, page(title, comparison, drawn, _benchmark_pictures(comparison)))
    for note in comparison.notes:
        print(visible(note), file=sys.stderr)
    runs = sum(len(family) for family in comparison.families)
    counts = [(runs, "run"), (len(comparison.benchmarks), "benchmark")]
    found = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
    return f"{found}: {', '.join(map(str, files))}"


def _benchmark_pictures(comparison: Comparison) -> dict[str, bytes]:
    pictures = {}
    with tempfile.TemporaryDirectory() as folder:
        # Numbers as names: a file may be called `...json`.
        for number, (name, results) in enumerate(comparison.benchmarks.items()):
            for path in plot([results], Path(folder, str(number))):
                pictures[f"{name}: {path.stem} (the dashed lines are the ZeCO paper's own figures)"] = path.read_bytes()
    return pictures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m zeco_train.report", description=docstring(sys.modules[__name__]))
    parser.add_argument("paths", nargs="+", type=user_path, metavar="PATH", help="runs, folders of runs, results.json")
    parser.add_argument(
        "--out", type=user_path, default=Path("runs/report"), metavar="FOLDER", help="default: runs/report"
    )
    parser.add_argument("--title", default="ZeCO-Train: comparison of runs", help="of the page")
    return parser.parse_args(arguments)
