"""Question: what do LASP-1's tables that need GPUs give here: strategies, kernel fusion and state cache, lengths?
Command: python -m lab.lasp1 losses|ablation|longest|memory [--ranks N] [--out FOLDER] [KEY=VALUE …]
Date: 2026-11-28, `losses` with 20 steps of 2,048 tokens on 2 × H100; the others tiny, on 2 CPU ranks
Answer: all strategies have one loss, with LASP-1 and without, but for one in the sixth digit; docs/papers.md. The
    others: open.

    losses     Table 2: the last loss of every strategy, with whole sequences on each rank and with LASP-1's ring, of
               Lightning Attention (the paper's TNL) and plain linear attention; one global batch for all
    ablation   Table 3: kernel fusion × state cache, of Lightning Attention on LASP-1's ring, eager
    longest    Tables 4 and 7: `bench longest` with and without recomputation, pure and 1/4 hybrid
    memory     Figure 3 and Table 10: speed and peak memory by length, with `ddp` and `zero3`

KEY=VALUE are passed on: to train.py by `losses`, to the benchmark by the others.

Without fusion the operators run in PyTorch, whose products and elementwise operations are kernels of their own. Without
the cache a layer's backward pass computes the state that it received again, and ranks send it once more; the kept one
is held all the same, as it is a few MB, so the cache's memory is not what this measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeco_train.bench import __main__ as bench
from zeco_train.ops import mix
from zeco_train.ops.operator import Operator, Passes, Target
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import METRICS_FILE, write_result
from zeco_train.system.terminal import markdown_table
from zeco_train.tracking.metrics import read_metrics

_STRATEGIES = ("ddp", "torch_ddp", "zero1", "zero2", "zero3")
Row = dict[str, Any]


@errors_in_a_line
def main(arguments: list[str]) -> int:
    """Run a table's commands, or a rank of one."""
    if arguments[:1] == ["rank"]:
        fused, cached, *rest = arguments[1:]
        _ablate(fused=fused == "True", cached=cached == "True")
        return bench.main(rest)
    options = _parser().parse_intermixed_args(arguments)
    rows = [*TABLES[options.table](options)]
    text = markdown_table([*rows[0]], [[str(cell) for cell in row.values()] for row in rows]) if rows else ""
    write_result(options.out / f"{options.table}.md", f"{text}\n")
    print(text)
    return 0


def _losses(options: argparse.Namespace) -> Iterator[Row]:
    # fp32: torch's DDP has no other dtype that GPUs are fast in. The same sequences in every run.
    size = [f"data.global_batch={options.ranks}", "data.seq_len=16384", "train.steps=200", "data=embedded"]
    for model, strategy in itertools.product(("lightning_340m", "linear_340m"), _STRATEGIES):
        row: Row = {"model": model, "strategy": strategy}
        for backend in ("dp", "lasp1"):
            folder = options.out / "losses" / f"{model}-{strategy}-{backend}"
            own = [f"model={model}", f"parallel={strategy}", f"sp={backend}", f"run_dir={folder}", *size]
            _start(options.ranks, "zeco_train", "train", *own, "checkpoint.final=false", *options.settings)
            row[f"loss, {backend}"] = f"{read_metrics(folder / METRICS_FILE)[-1]['loss']:.4f}"
        yield row


def _ablation(options: argparse.Namespace) -> Iterator[Row]:
    size = ["variants=[lasp1]", "model=lightning_1b", "tokens=[8192]", "seq_len=8192", "steps=20", "strategy=ddp"]
    for fused, cached in itertools.product((False, True), repeat=2):
        out = options.out / "ablation" / f"fused-{fused}-cached-{cached}"
        # Compiled code would leave out a state whose value is known.
        own = [f"out={out}", *size, "compile=never", "cuda_graphs=off", *options.settings]
        _start(options.ranks, "lab.lasp1", "rank", str(fused), str(cached), "model", *own)
        yield {"kernel fusion": fused, "state cache": cached, **_measured(out)}


def _longest(options: argparse.Namespace) -> Iterator[Row]:
    out = options.out / "longest"
    own = ["model=lightning_1b", f"ranks={options.ranks}", "variants=[dp,lasp1]", "recompute=[none,full]"]
    own += ["strategies=[ddp,zero1,zero2,zero3]", "every=[0,4]", "budget_seconds=3600", f"out={out}"]
    _start(1, "zeco_train.bench", "longest", *own, *options.settings)
    names = ("model", "strategy", "recompute", "variant", "tokens", "planned_tokens", "ratio", "tokens_per_second")
    for row in _rows(out):
        yield {name: row.get(name) for name in (*names, "note")}


def _memory(options: argparse.Namespace) -> Iterator[Row]:
    lengths = f"tokens=[{','.join(str(1 << power) for power in range(10, 18))}]"
    for strategy in ("ddp", "zero3"):
        out = options.out / "memory" / strategy
        own = [f"out={out}", f"strategy={strategy}", "model=lightning_1b", "variants=[dp,lasp1]", "steps=5", lengths]
        _start(options.ranks, "zeco_train.bench", "model", *own, *options.settings)
        for row in _rows(out):
            yield {"strategy": strategy, "backend": row["variant"], "tokens a rank": row["tokens"], **_figures(row)}


TABLES = {"losses": _losses, "ablation": _ablation, "longest": _longest, "memory": _memory}


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


def _start(ranks: int, *command: str) -> None:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    subprocess.run([sys.executable, "-m", *launcher, *command], check=True)


def _rows(out: Path) -> list[Row]:
    rows: list[Row] = json.loads((out / "results.json").read_text())["rows"]
    return rows


def _figures(row: Row) -> Row:
    return {
        "tokens/s a GPU": f"{row['tokens_per_second_per_gpu']:.0f}",
        "GB": row["peak_gb"] and f"{row['peak_gb']:.1f}",
    }


def _measured(out: Path) -> Row:
    (row,) = _rows(out)
    return _figures(row)


def _parser() -> Parser:
    parser = Parser(prog="python -m lab.lasp1", description=docstring(sys.modules[__name__]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/lasp1"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
