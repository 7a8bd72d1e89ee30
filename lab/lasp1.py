"""Question: what do LASP-1's tables that need GPUs give here: strategies, kernel fusion and state cache, lengths?
Command: python -m lab.lasp1 losses|mixers|ablation|longest|memory [--ranks N] [--only VALUE …] [--out FILE]
    [KEY=VALUE …]
Date: 2026-11-28, on 1 and 2 × H200 (`losses` on 2 × H100), but for rows that docs/papers.md says are not measured
Answer: docs/papers.md. All strategies have one loss, with LASP-1 and without; RetNet's rounding grows too fast to say.
    The planned lengths train, and a tenth more does not; with recomputation 0.91 of the planned one did. Fused and with
    the cache training is twice as fast as with neither.

    losses     Table 2: the last loss of every strategy, with whole sequences on each rank and with LASP-1's ring, of
               Lightning Attention (the paper's TNL) and plain linear attention; one global batch for all
    mixers     Table 6: the same of cosFormer, RetNet and Mamba, with DDP and ZeRO-1
    ablation   Table 3: kernel fusion × state cache, of Lightning Attention on LASP-1's ring, eager
    longest    Tables 4 and 7: `bench longest` with and without recomputation, pure and 1/4 hybrid
    memory     Figure 3 and Table 10: speed and peak memory by length, with `ddp` and `zero3`

KEY=VALUE are passed on: to train.py by `losses` and `mixers`, to the benchmark by the others. Rows that are in FILE
already are not measured again, and each is written as it comes; `--only ddp none`, last, measures those with both.

Without fusion the operators run in PyTorch, whose products and elementwise operations are kernels of their own. Without
the cache a layer's backward pass computes the state that it received again, and ranks send it once more; the kept one
is held all the same, as it is a few MB, so the cache's memory is not what this measures.

A length of `longest` is the longest that trained, and one at most a tenth above it did not: the search begins at the
plan's, so a ratio of 1 is a plan that fits, and is too short by less than a tenth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab import forked_ranks
from lab.paper import store
from zeco_train.bench import __main__ as bench
from zeco_train.errors import ZecoError
from zeco_train.ops import mix
from zeco_train.ops.operator import Operator, Passes, Target
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import METRICS_FILE
from zeco_train.system.terminal import markdown_table
from zeco_train.tracking.metrics import read_metrics

_STRATEGIES = ("ddp", "torch_ddp", "zero1", "zero2", "zero3")
Row = dict[str, Any]
# What tells a table's rows apart, and their measurement, which writes into a folder.
Rows = Iterator[tuple[Row, Callable[[Path], list[Row]]]]


@errors_in_a_line
def main(arguments: list[str]) -> int:
    """Measure a table's rows."""
    options = _parser().parse_intermixed_args(arguments)
    machine, deadline = store.machine_of(options.ranks), time.monotonic() + 60 * options.minutes
    out = options.out or store.RESULTS / f"paper_{options.table}_{store.in_names(machine)}.json"
    measured: list[Row] = json.loads(out.read_text())["rows"] if out.exists() else []
    command = " ".join(["python -m lab.lasp1", options.table, f"--ranks {options.ranks}", *options.settings])
    chosen = [row for row in TABLES[options.table](options) if {*options.only} <= {str(x) for x in row[0].values()}]
    if not chosen:
        _parser().error(f"--only {' '.join(options.only)}: no row has all of these values")
    for about, measure in chosen:
        if any(about.items() <= row.items() for row in measured) or time.monotonic() > deadline:
            continue
        with tempfile.TemporaryDirectory(prefix="zeco-lasp1-") as folder:
            try:
                found = measure(Path(folder))
            except (OSError, ZecoError) as error:
                print(f"{about}: {error}", file=sys.stderr, flush=True)
                continue
        measured += [about | row for row in found]
        store.write(out, command, machine, measured)
        for row in found:
            print(json.dumps(about | row), flush=True)
    if measured:
        print(markdown_table([*measured[0]], [[str(row.get(name, "")) for name in measured[0]] for row in measured]))
    return 0


def _losses(options: argparse.Namespace) -> Rows:
    return _trained(options, ("lightning_340m", "linear_340m"), _STRATEGIES)


def _mixers(options: argparse.Namespace) -> Rows:
    return _trained(options, ("cosformer_340m", "retnet_340m", "mamba1_340m"), ("ddp", "zero1"))


def _trained(options: argparse.Namespace, models: Sequence[str], strategies: Sequence[str]) -> Rows:
    # fp32: torch's DDP has no other dtype that GPUs are fast in. The same sequences in every run.
    size = [f"data.global_batch={options.ranks}", "data.seq_len=16384", "train.steps=200", "data=embedded"]

    def measure(own: Sequence[str], folder: Path) -> list[Row]:
        settings = [*own, f"run_dir={folder}/run", *size, "checkpoint.final=false", *options.settings]
        if code := _start(options.ranks, "zeco_train", "train", *settings):
            # The loss of an earlier step is none of this table's.
            raise ZecoError(f"no row: the run ended with exit code {code}")
        last = read_metrics(folder / "run" / METRICS_FILE)[-1]
        return [{"step": last["step"], "loss": last["loss"]}]

    for model, strategy, backend in itertools.product(models, strategies, ("dp", "lasp1")):
        about = {"model": model, "strategy": strategy, "backend": backend}
        yield about, partial(measure, [f"model={model}", f"parallel={strategy}", f"sp={backend}"])


def _ablation(options: argparse.Namespace) -> Rows:
    size = ["variants=[lasp1]", "model=lightning_1b", "tokens=[8192]", "seq_len=8192", "steps=20", "strategy=ddp"]

    def measure(fused: bool, cached: bool, folder: Path) -> list[Row]:
        # Compiled code would leave out a state whose value is known.
        own = ["model", f"out={folder}", *size, "compile=never", "cuda_graphs=off", *options.settings]

        def run(_: int) -> int:
            _ablate(fused=fused, cached=cached)
            return bench.main(own)

        # Forked: what is replaced is so in these ranks only, and no time is taken by imports.
        ranks = forked_ranks.start(options.ranks, run, folder)
        if any(code != 0 for code in ranks.wait(options.seconds)):
            print(*ranks.last_lines(), sep="\n", file=sys.stderr, flush=True)
        return [_figures(row) for row in _rows(folder)]

    # Neither and both first, should the others not be reached.
    for fused, cached in ((False, False), (True, True), (True, False), (False, True)):
        yield {"fused": fused, "cached": cached}, partial(measure, fused, cached)


def _longest(options: argparse.Namespace) -> Rows:
    # The same four steps of a search are a process each: budgets, and trials that hang, end the search.
    size = ["model=lightning_1b", f"ranks={options.ranks}", "precision=0.1", "trial_seconds=150"]
    names = ("tokens", "planned_tokens", "ratio", "memory_gb", "tokens_per_second", "trials", "note")

    def measure(own: Sequence[str], folder: Path) -> list[Row]:
        _start(1, "zeco_train.bench", "longest", *size, *own, f"out={folder}", *options.settings)
        return [{name: row[name] for name in names if row.get(name) is not None} for row in _rows(folder)]

    strategies, recompute = ("ddp", "zero3", "zero1", "zero2"), ("none", "full")
    backends = ("lasp1", "dp") if options.ranks > 1 else ("dp",)
    for backend, every, how, strategy in itertools.product(backends, (0, 4), recompute, strategies):
        about = {"strategy": strategy, "recompute": how, "every": every, "backend": backend, "ranks": options.ranks}
        own = [f"strategies=[{strategy}]", f"recompute=[{how}]", f"every=[{every}]", f"variants=[{backend}]"]
        yield about, partial(measure, own)


def _memory(options: argparse.Namespace) -> Rows:
    backends = ("dp", "lasp1") if options.ranks > 1 else ("dp",)
    size = ["model=lightning_1b", f"variants=[{','.join(backends)}]", "steps=5", "tokens=[4096,16384,65536]"]

    def measure(strategy: str, folder: Path) -> list[Row]:
        _start(
            options.ranks,
            "zeco_train.bench",
            "model",
            f"out={folder}",
            f"strategy={strategy}",
            *size,
            *options.settings,
        )
        return [{"backend": row["variant"], "tokens": row["tokens"], **_figures(row)} for row in _rows(folder)]

    for strategy in ("ddp", "zero3"):
        yield {"strategy": strategy, "ranks": options.ranks}, partial(measure, strategy)


TABLES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "losses": _losses,
    "mixers": _mixers,
    "ablation": _ablation,
    "longest": _longest,
    "memory": _memory,
}


def _ablate(*, fused: bool, cached: bool) -> None:
    if not fused:

        def portable(operator: Operator, operands: Sequence[Tensor], target: Target | None = None) -> Passes:
            return operator.portable

        Operator.select = portable  # type: ignore[assignment, method-assign]
    if cached:
        return
    with_cache = mix._Differentiable.backward

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Arguments as `mix._Differentiable.forward` has them; the state is the one that was kept, to the bit.
        handle, *kept, _, incoming, doc_ids = ctx.saved_tensors
        assert not ctx.replaced, "an operator whose backward pass does not keep its operands"
        assert not ctx.num_aside, "a layer beside the scan, whose input is saved last"
        if incoming is not None:
            again = torch.ops.zeco.mix.default(
                kept[: ctx.num_operands], ctx.operator, ctx.scale, handle, doc_ids, None, None, False, [], None
            )[1]
            assert again.shape == incoming.shape
        return with_cache(ctx, *grads)

    mix._Differentiable.backward = staticmethod(backward)  # type: ignore[assignment, method-assign]


def _start(ranks: int, *command: str) -> int:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    # A search that was stopped, and a length that does not fit, end with an error; what they have found is written.
    return subprocess.run([sys.executable, "-m", *launcher, *command], check=False).returncode


def _rows(out: Path) -> list[Row]:
    rows: list[Row] = json.loads((out / "results.json").read_text())["rows"]
    return rows


def _figures(row: Row) -> Row:
    names = ("tokens_per_second_per_gpu", "median_ms", "p10_ms", "p90_ms", "peak_gb")
    return {name: row[name] for name in names if row.get(name) is not None}


def _parser() -> Parser:
    parser = Parser(prog="python -m lab.lasp1", description=docstring(sys.modules[__name__]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="of a row of `ablation`, at most")
    parser.add_argument("--only", nargs="+", metavar="VALUE", default=[], help="rows with these values; last")
    parser.add_argument("--minutes", type=float, default=600.0, help="no further row is begun after these")
    parser.add_argument("--out", type=Path, help="default: in lab/results, named by table and machine")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
