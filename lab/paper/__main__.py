"""Question: do models with few parameters explain the papers' tables, and what do they predict for more GPUs?
Command: python -m lab.paper out=FOLDER
Date: 2026-11-23; no GPU: the papers' values are in zeco_train/bench/reference, ours in lab/results
Answer: ZeCO's 40 rows of dp, All-Scan and ZeCO within 6.5 %; its rows of LASP-1 and LASP-2 are off by up to 112 %.
    Predictions: lab/README.md, "The papers' tables and figures".

figure_1.png, figure_3.png, figure_4.png     of the ZeCO paper
lasp2_figure_4.png                           LASP-2's Figure 4 and Table 6
scaling.png, predictions.csv                 our predictions for 8 to 4,096 GPUs, by algorithm and latency
noise.csv                                    the same with kernels that are late by chance
tables.csv                                   every row of the papers with the model's value and its error
errors.txt                                   the model's parameters, and its errors by table and method
"""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.paper import pictures
from lab.paper.machine import FITTED, NODE, Machine, Row, fit, fit_lasp2, tables
from lab.paper.noise import Noisy, noisy
from lab.paper.ours import ASSUMED, TOKENS, Predicted, measured, predicted, ring_seconds
from zeco_train.bench.figures import reference
from zeco_train.errors import ConfigError
from zeco_train.system.command import docstring, errors_in_a_line
from zeco_train.system.figures import save_figure
from zeco_train.system.files import whole_file, write_errors
from zeco_train.system.signals import run_command


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; prints the paths of what it has written."""
    if {"-h", "--help"} & {*arguments}:
        print(docstring(sys.modules[__name__]))
    else:
        print("\n".join(str(path) for path in paper(arguments)))
    return 0


def paper(arguments: Sequence[str]) -> list[Path]:
    """Write all figures and tables into the folder of `out=FOLDER`; returns their paths.

    Raises:
        ConfigError: an unknown argument, or no folder.
        DataError: a file cannot be written, or our results are damaged.
    """
    out = None
    for text in arguments:
        key, _, value = text.partition("=")
        if key != "out" or not value:
            raise ConfigError("argument", text, "paper takes out=FOLDER only")
        out = Path(value)
    if out is None:
        raise ConfigError("out", "", "needs a folder for the figures: out=FOLDER")
    machine, rows, own, ahead = fit(), tables(), measured(), predicted()
    figures = {
        "figure_1": pictures.figure_1(rows, machine, ahead),
        "figure_3": pictures.figure_3(rows, own),
        "figure_4": pictures.figure_4(rows, own, machine, ahead),
        "lasp2_figure_4": pictures.lasp2_figure_4(rows),
        "scaling": pictures.scaling(ahead),
    }
    written = [save_figure(figure, out / f"{name}.png") for name, figure in figures.items()]
    texts = {
        "tables.csv": _table_of(rows),
        "errors.txt": errors(machine, rows),
        "predictions.csv": _records(ahead),
        "noise.csv": _records(noisy()),
    }
    for name, text in texts.items():
        with write_errors(out / name), whole_file(out / name) as partial:
            partial.write_text(text, encoding="utf-8")
        written.append(out / name)
    return written


def errors(machine: Machine, rows: Sequence[Row]) -> str:
    """The parameters, and the errors by table and method."""
    lines = ["ZeCO's machine, 7 fitted parameters, ms:"]
    lines += [f"  {name:<16}{value:10.4f}" for name, value in dataclasses.asdict(machine).items()]
    fixed, per_16k = fit_lasp2()
    lines.append(f"LASP-2's, 2 parameters: {fixed:.4f} s a step and {1e3 * per_16k:.3f} ms for 16,384 tokens")
    lines += ["", f"{'table':<10}{'method':<12}{'rows':>5}{'mean':>8}{'worst':>9}{'ratio to dp':>13}"]
    groups = dict.fromkeys((row.table, row.method) for row in rows)
    for table, method in groups:
        own = [row for row in rows if (row.table, row.method) == (table, method)]
        found = [row.error for row in own]
        ratios = [row.ratio_error for row in own if row.ratio_error is not None]
        mean, worst = sum(map(abs, found)) / len(found), max(found, key=abs)
        ratio = f"{max(ratios, key=abs):+13.3f}" if ratios else f"{'-':>13}"
        note = "" if method in FITTED or table.startswith("LASP-2") else "  not fitted"
        lines.append(f"{table:<10}{method:<12}{len(own):5}{mean:8.1%}{worst:+9.1%}{ratio}{note}")
    return "\n".join([*lines, "", *_loss_of_dp(), "", f"predictions: {ASSUMED}", ""])


def _loss_of_dp() -> list[str]:
    """What the paper's dp loses with more GPUs, beside FSDP's collectives if nothing hid them; nothing is fitted."""
    lines = ["dp, ms a step above 8 GPUs: ZeCO's Tables 5 and 6, and FSDP's collectives by NCCL's table, none hidden"]
    lines.append(f"  {'GPUs':>6}{'16k':>9}{'32k':>9}{'FSDP':>9}")
    paper = {
        (int(row["gpus"]), int(row["seq_len_per_gpu"])): 1e3 * row["seq_len_per_gpu"] / row["dp"]
        for row in reference("zeco_model_tokens_per_second_per_gpu")
    }
    for gpus in sorted({gpus for gpus, _ in paper} - {NODE}):
        above = "".join(f"{paper[gpus, tokens] - paper[NODE, tokens]:9.1f}" for tokens in TOKENS)
        lines.append(f"  {gpus:6}{above}{1e3 * (ring_seconds(gpus) - ring_seconds(NODE)):9.1f}")
    return lines


def _table_of(rows: Sequence[Row]) -> str:
    lines: list[list[object]] = [
        ["table", "method", "gpus", "tokens", "paper", "model", "error", "ratio", "ratio_error"]
    ]
    for row in rows:
        ratio = ["" if value is None else f"{value:.4f}" for value in (row.paper_ratio, row.ratio_error)]
        values = f"{row.paper:.6g}", f"{row.model:.6g}", f"{row.error:.4f}", *ratio
        lines.append([row.table, row.method, row.gpus, row.tokens or "", *values])
    return _csv(lines)


def _records(rows: Sequence[Predicted] | Sequence[Noisy]) -> str:
    names = [field.name for field in dataclasses.fields(rows[0])]
    return _csv([names, *([_short(value) for value in dataclasses.astuple(row)] for row in rows)])


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _csv(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


if __name__ == "__main__":
    run_command("lab.paper.__main__")
