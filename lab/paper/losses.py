"""Question: how well, and how fast, do the modules of LASP-2's Tables 2 and 3 learn after equal steps?
Command: python -m lab.paper.losses modules|unmasked [--size llama3_1b] [--steps N] [--out FILE]
Date: 2026-11-27, two seeds; models of 0.9M parameters on 2 CPU ranks, which others used, too; 2026-11-28, one H100,
    five rows of Llama3-1B's shape, and rows of H200s
Answer: lab/results/paper_modules_2cpu.json, paper_unmasked_2cpu.json and paper_modules_llama3_1b_*.json,
    docs/papers.md. So few steps say that all rows train; they do not order the modules.

`modules`   softmax attention with Ring, then six modules, pure and with softmax in one layer of four, by LASP-2; Based
            with a sliding window in every second layer
`unmasked`  models of masked tokens: softmax attention with Ring, and basic linear attention by LASP-2

`tiny` is on CPUs. `llama3_1b` is the shape of LASP-2's Linear-Llama3-1B, 16 layers of width 2,048 with 16 heads, on
GPUs, in bf16; on one rank each, rows may be measured at once. Rows that are in FILE already are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import forked_ranks
from lab.paper import store
from lab.paper.unmasked import unmasked_softmax
from zeco_train import cli
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

MODULES = ("linear", "lightning", "retnet", "gla", "based", "rebased")
SOFTMAX = ("model.attn.every=1", "sp.attention=ring")
HYBRID = ("model.attn.every=4", "sp.attention=ring")
WINDOW = ("model.attn.every=2", "model.attn.window=64", "sp.attention=ring")
UNMASKED = ("model.causal=false", "task=mlm")
SIZES = {
    "tiny": "data.seq_len=256 data.global_batch=4 optim.lr=2e-3 parallel=ddp train.device=cpu",
    "llama3_1b": """
        model.hidden_size=2048 model.num_layers=16 model.num_heads=16 model.intermediate_size=8192 parallel=zero2
        data.seq_len=16384 data.global_batch=1 optim.lr=3e-4 train.dtype=bf16 train.eval_sequences=8
    """,
}
SHARED = """
    sp=lasp2 data=embedded sched=constant sched.warmup_steps=10 train.log_every=1 train.eval_every=0
    train.eval_sequences=32 checkpoint.every=0 checkpoint.final=false name=row
"""
# Of a run, at most.
SECONDS = 1_800.0


class RowError(Exception):
    """A run that did not end well."""


@dataclass(frozen=True)
class Row:
    """A row of a table: a model of `mixer`, with these settings besides."""

    module: str
    layers: str
    mixer: str
    settings: tuple[str, ...] = ()

    def overrides(self, size: str, seed: int, steps: int, folder: Path) -> list[str]:
        """The settings of its run."""
        suffix = "tiny" if size == "tiny" else "1b"
        own = [f"model={self.mixer}_{suffix}", *SHARED.split(), *SIZES[size].split(), *self.settings]
        return [*own, f"seed={seed}", f"train.steps={steps}", f"run_dir={folder}"]


def rows(table: str) -> list[Row]:
    """The rows of a table, in the paper's order."""
    if table == "unmasked":
        return [
            Row("softmax", "softmax", "linear", (*UNMASKED, *SOFTMAX)),
            Row("linear", "pure", "linear", UNMASKED),
        ]
    of_modules = itertools.chain.from_iterable(
        (Row(name, "pure", name), Row(name, "1/4 softmax", name, HYBRID)) for name in MODULES
    )
    # As Based was designed, with a sliding window beside it: configs/experiment/based_1b_window.yaml.
    window = Row("based", "1/2 window of 64", "based", WINDOW)
    return [Row("softmax", "softmax", "linear", SOFTMAX), *of_modules, window]


def measure(row: Row, size: str, seed: int, steps: int, ranks: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Train; the mean loss of the last tenth of the steps, the validation loss, and the median speed of steps."""

    def run(rank: int) -> int:
        with unmasked_softmax() if "model.causal=false" in row.settings else contextlib.nullcontext():
            return cli.main(row.overrides(size, seed, steps, folder / "run"))

    with tempfile.TemporaryDirectory(prefix="zeco-losses-") as name:
        folder = Path(name)
        started = forked_ranks.start(ranks, run, folder)
        codes = started.wait(seconds)
        if any(code != 0 for code in codes):
            lines = "\n".join(started.errors() or started.last_lines())
            raise RowError(f"{row}: exit codes {codes}:\n{lines}")
        logged = read_metrics(folder / "run" / METRICS_FILE)
    last = logged[-max(1, steps // 10) :]
    return {
        "loss": statistics.fmean(each["loss"] for each in last),
        "val_loss": next(each["val_loss"] for each in reversed(logged) if each.get("val_loss") is not None),
        "tokens_per_second": statistics.median(each["tokens_per_second"] for each in logged[1:] or logged),
        **{name: last[-1][name] for name in ("memory_gb",) if name in last[-1]},
    }


def result_file(table: str, size: str, machine: str) -> Path:
    """Where rows go by default; a table of another size, or of another machine, has a file of its own."""
    of_size = "" if size == "tiny" else f"_{size}"
    return store.RESULTS / f"paper_{table}{of_size}_{store.in_names(machine)}.json"


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = Parser(
        prog="python -m lab.paper.losses",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=("modules", "unmasked"))
    parser.add_argument("--size", choices=[*SIZES], default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--minutes", type=float, default=60.0, help="no further row is begun after these")
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="default: all")
    parser.add_argument("--layers", nargs="+", help="as in the rows, such as pure; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a row, at most")
    parser.add_argument("--out", type=Path, help="default: in lab/results, named by table, size and machine")
    options = parser.parse_args(arguments)
    ranks = options.ranks
    machine = f"{ranks} CPU ranks" if options.size == "tiny" else store.machine_of(ranks)
    out = options.out or result_file(options.table, options.size, machine)
    stored = json.loads(out.read_text()) if out.exists() else {"rows": []}
    facts = {"size": options.size, "steps": options.steps}
    if stored["rows"] and {key: stored[key] for key in facts} != facts:
        parser.error(f"{out}: its rows have --size {stored['size']} --steps {stored['steps']}; choose another --out")
    measured = stored["rows"]
    deadline, code = time.monotonic() + 60 * options.minutes, 0
    modules, layers = options.only, options.layers
    chosen = [
        row
        for row in rows(options.table)
        if row.module in (modules or [row.module]) and row.layers in (layers or [row.layers])
    ]
    if not chosen:
        parser.error(f"--only {modules} --layers {layers}: no row of {options.table}")
    for seed, row in itertools.product(options.seeds, chosen):
        about = {"module": row.module, "layers": row.layers, "seed": seed, "ranks": ranks}
        is_there = any(about.items() <= ({"ranks": 2} | each).items() for each in measured)
        if is_there or time.monotonic() > deadline:
            continue
        try:
            measured.append(about | measure(row, options.size, seed, options.steps, ranks, options.seconds))
        except RowError as error:
            # One row's error must not end the others.
            print(error, file=sys.stderr, flush=True)
            code = 1
            continue
        print(json.dumps(measured[-1]), flush=True)
        command = f"python -m lab.paper.losses {options.table} --size {options.size} --ranks {ranks}"
        command += f" --steps {options.steps}"
        store.write(out, command, machine, measured, **facts)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
