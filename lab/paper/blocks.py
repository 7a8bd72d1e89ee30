"""Question: how does the time of All-Scan's chain depend on the number of blocks K, and is the chosen one the best?
Command: python -m lab.paper.blocks [--ranks 4] [--transport symmetric] [--results FILE] [--name NAME]
Date: 2026-11-27, 4 CPU ranks of gloo on 2 cores, which others used, too; 2026-11-28, 2 × H200, symmetric memory
Answer: lab/results/paper_blocks_{4cpu,2xh200}.json and .png, docs/papers.md. In one kernel on two GPUs 32 blocks are
    best up to 4 MiB, one for each of its CTAs, then 64 and 128; the chosen ones, of 16,384 elements, take 1.00 to 1.17
    of that time.

`bench collectives` measures the chain with K from 1 to 512, and states of 0.5 to 16 MiB. Beside each point are

    Eq. 12    T(K) = τ + (P − 1) τ / K, with τ the measured time of a hop of a whole state, T(1) / (P − 1). Its boundary
              term counts one hop more than there are, and no message costs anything by itself.
    the model T(K) = (P − 2 + K) (α + β S / K), with the α and β of `zeco_train.collectives.cost_model`; it chooses K

`--results`: of a `bench collectives` run elsewhere, with `all_gather` among its variants. Times are the fastest of the
runs, since others used the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.paper import store
from lab.paper.page import command_of, commit_of, machine_of
from zeco_train.collectives.chain import CHAIN, best_blocks
from zeco_train.collectives.cost_model import MEASURED, Link, Load
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.figures import CURVES, label_axes, new_figure, save_figure

BLOCKS = tuple(1 << n for n in range(10))
SIZES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def measure(ranks: int, transport: str, folder: Path) -> dict[str, Any]:
    """`bench collectives` of the chain with every K."""
    variants = ",".join(f"zeco:chain:{transport}:{blocks}" for blocks in BLOCKS)
    settings = [f"variants=[all_gather,{variants}]", f"sizes_mb=[{','.join(f'{size:g}' for size in SIZES)}]"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "zeco_train.bench", "collectives", *settings, "runs=12", "warmup=2", "graph=false"]
    subprocess.run([*command, f"out={folder}", "budget_seconds=400"], check=True)
    return dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each size and K; then one for each size with the best K found, and the one chosen."""
    ranks = result["world_size"]
    link = Link.gloo if result["environment"]["device"] == "cpu" else Link.nccl
    own = [row for row in result["rows"] if row["variant"].startswith("zeco:chain:") and row.get("median_ms")]
    if any(":symmetric:" in row["variant"] for row in own):
        link = Link.symmetric
    gathers = {row["size_mb"]: row["min_ms"] for row in result["rows"] if row["variant"] == "all_gather"}
    found: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for size in sorted({row["size_mb"] for row in own}):
        times = {int(row["variant"].rpartition(":")[2]): row for row in own if row["size_mb"] == size}
        shape = 1, times[1]["heads"], times[1]["key_dim"], times[1]["value_dim"]
        load, hop = Load(ranks, shape, 4), times[1]["min_ms"] / max(1, ranks - 1)
        for blocks, row in sorted(times.items()):
            modelled = CHAIN.seconds(MEASURED[link], load, None if link is Link.symmetric else blocks)
            found.append(
                {
                    "size_mb": size,
                    "blocks": blocks,
                    "fastest_ms": row["min_ms"],
                    "median_ms": row["median_ms"],
                    "equation_12_ms": hop * (1 + (ranks - 1) / blocks),
                    "model_ms": 1e3 * modelled,
                }
            )
        fastest = min(times, key=lambda blocks: times[blocks]["min_ms"])
        # Of the measured ones the nearest to that of the model; in one kernel blocks have 16,384 elements.
        wanted = load.state_bytes / 4 / 16_384 if link is Link.symmetric else best_blocks(MEASURED[link], load)
        chosen = min(times, key=lambda blocks: abs(blocks - wanted))
        least = times[fastest]["min_ms"]
        best.append(
            {
                "size": size,
                "best_blocks": fastest,
                "chosen_blocks": chosen,
                "chosen_over_best": times[chosen]["min_ms"] / least,
                "best_over_all_gather": least / gathers[size],
            }
        )
    return found + best


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Time over K by size: points as measured, dashed Eq. 12, dotted the model; the K chosen has a ring."""
    figure = new_figure(title, (13.0, 7.2), dpi=110, title_size=11)
    sizes = sorted({row["size_mb"] for row in rows if "blocks" in row})
    for axes, size, colour in zip(figure.subplots(2, 3).flat, sizes, CURVES, strict=False):
        own = [row for row in rows if row.get("size_mb") == size]
        counts = [row["blocks"] for row in own]
        chosen = next(row["chosen_blocks"] for row in rows if row.get("size") == size)
        times = {row["blocks"]: row["fastest_ms"] for row in own}
        axes.plot(counts, list(times.values()), "o-", color=colour, markersize=4, label="measured, fastest")
        axes.plot(counts, [row["equation_12_ms"] for row in own], "--", color=colour, alpha=0.7, label="Eq. 12")
        axes.plot(counts, [row["model_ms"] for row in own], ":", color=colour, alpha=0.9, label="cost model")
        axes.plot([chosen], [times[chosen]], "o", markersize=12, fillstyle="none", color="black", label="chosen")
        label_axes(axes, f"{size:g} MiB", "blocks K", "ms")
        axes.set_xscale("log", base=2)
    save_figure(figure, path)


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = Parser(
        prog="python -m lab.paper.blocks",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", choices=("p2p", "symmetric"), default="p2p")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--name", help="of the files in lab/results; default: by machine and transport")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="zeco-blocks-") as name:
        if options.results is None:
            result = measure(options.ranks, options.transport, Path(name))
        else:
            result = json.loads(options.results.read_text(encoding="utf-8"))
    is_cpu = result["environment"]["device"] == "cpu"
    machine = f"{result['world_size']} CPU ranks" if is_cpu else machine_of(result)
    rows = rows_of(result)
    is_symmetric = any(":symmetric:" in row["variant"] for row in result["rows"])
    transport = "symmetric" if is_symmetric else "p2p"
    facts: dict[str, Any] = {"commit": commit_of(result)}
    if options.results is None:
        command = f"python -m lab.paper.blocks --ranks {result['world_size']} --transport {transport}"
    else:
        command, packages = command_of(result), result["environment"]["packages"]
        facts |= {"date": result["created"][:10], "torch": packages["torch"], "triton": packages["triton"]}
    name = options.name or f"paper_blocks_{store.in_names(machine)}{'_symmetric' * is_symmetric}"
    store.write(store.RESULTS / f"{name}.json", command, machine, rows, **facts)
    draw(rows, f"All-Scan's chain by number of blocks ({machine})", store.RESULTS / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
