"""Question: do the scans grow with the nodes as the cost model says?
Command: python -m lab.emulated_scans --nodes 2 4 8 --ranks 1 --delay-ms 10
Date: 2026-11-24, 2 CPU cores
Answer: yes, chain, two_shot, doubling and lane within 10 %, one rank a node, with nothing beside; with three ranks a
    node up to 24 % more. lab/README.md, "Nodes that this machine does not have".

The time over that of the fewest nodes is compared; a difference of more than `--limit` gives exit code 1. A gloo
message leaves when its receiver's notice has arrived: one delay, absent from the model, is added to its times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.emulated_nodes import EmulatedNodes, Network, run_ranks
from zeco_train.collectives.cost_model import MEASURED, Costs, Link, Load
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.collectives.topology import find_topology
from zeco_train.collectives.worker import ScanWorker
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.ops.seam import ScanRequest, fold
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.small_files import read_json
from zeco_train.system.terminal import show_any_text

TIMEOUT = timedelta(seconds=60)
# [B, H, K, V] in fp32: 64 KB, so that the delay counts and not the switch's speed.
SHAPE = (1, 4, 32, 128)
_WARMUP = 4
# For the news of a start to reach all ranks: a broadcast takes a delay or two, of each of its rounds.
_DELAYS = 12


def costs_of(network: Network) -> Costs:
    """Gloo's costs on this machine inside a node, and between nodes those with the delay and the rate of the links."""
    inside = MEASURED[Link.gloo]
    delay, byte = network.delay_ms / 1e3, 1 / (network.rate_mb * 1e6)
    between = replace(
        inside,
        message=inside.message + delay,
        byte=inside.byte + byte,
        exchange=inside.exchange + delay,
        exchange_byte=inside.exchange_byte + byte,
    )
    return replace(inside, between=between)


def run_scans(runs: int, costs: Costs) -> dict[str, list[float]]:
    """Seconds of each scan by name, on the ranks of the default process group. Collective.

    Raises:
        ZecoError: a result is wrong, or a rank is gone.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ranks, *SHAPE, generator=generator)
    transitions = -torch.rand(ranks, *SHAPE[:3], generator=generator)
    expected: Tensor = torch.zeros(SHAPE)
    for before in range(rank):
        expected = fold(states[before], transitions[before], expected)
    request = ScanRequest(states[rank].clone(), transitions[rank].clone())
    group = dist.new_group(range(ranks), timeout=TIMEOUT)
    topology = find_topology(group)
    load, found = Load(ranks, SHAPE, 4, nodes=topology.nodes), {}
    worker = ScanWorker(group, TIMEOUT, topology)
    for scan in ALL_SCANS:
        name = scan.name
        blocks = scan.best_blocks(costs, load) if scan.best_blocks else None
        seconds = []
        for number in range(_WARMUP + runs):
            started = _start_together(_DELAYS * costs.farthest(load.nodes).message)
            launched = scan.over(worker, blocks)(request)
            state = launched.wait()
            ended = time.monotonic()
            launched.finish()
            worker.drain()
            if number == 0 and not torch.allclose(state, expected, rtol=1e-4, atol=1e-4):
                raise ZecoError(f"{name} is wrong on rank {rank} of {topology}")
            times: list[Any] = [None] * ranks
            dist.all_gather_object(times, ended)
            seconds.append(max(times) - started)
        found[name] = seconds[_WARMUP:]
    return found


def _start_together(seconds: float) -> float:
    """Wait until a moment that all ranks know; returns it. One machine has one clock."""
    moment = [time.monotonic() + seconds]
    dist.broadcast_object_list(moment)
    time.sleep(max(0.0, moment[0] - time.monotonic()))
    return moment[0]


def measure(network: Network, ranks: int, runs: int) -> dict[str, list[float]]:
    """Seconds of each scan by name, over emulated nodes.

    Raises:
        ConfigError: this machine cannot emulate them.
        ZecoError: a rank failed; its error is printed.
    """
    with tempfile.TemporaryDirectory() as folder, EmulatedNodes(network) as nodes:
        out = Path(folder, "seconds.json")
        own = ["-m", "lab.emulated_scans", "--on-ranks", str(out), "--runs", str(runs), "--nodes"]
        own += [str(network.nodes), "--delay-ms", str(network.delay_ms), "--rate-mb", str(network.rate_mb)]
        if any(codes := run_ranks(nodes, network, ranks, own)):
            raise ZecoError(f"ranks over {network.nodes} nodes failed: exit codes {codes}")
        return dict(read_json(out))


def compare(measured: dict[int, dict[str, list[float]]], network: Network, ranks: int, limit: float) -> list[str]:
    """Print the table; returns the scans and nodes whose growth differs from the model's by more than the limit."""
    fewest, beyond = min(measured), []
    costs = costs_of(network)
    print(f"{'scan':<12}{'nodes':>6}{'ms':>9}{'spread':>16}{'model ms':>10}{'growth':>8}{'model':>8}{'ratio':>7}")
    for scan in ALL_SCANS:
        name = scan.name
        first: tuple[float, float] | None = None
        for nodes, seconds in sorted(measured.items()):
            load = Load(nodes * ranks, SHAPE, 4, nodes=nodes)
            blocks = scan.best_blocks(costs, load) if scan.best_blocks else None
            modelled_seconds = scan.seconds(costs, load, blocks) + network.delay_ms / 1e3
            times = statistics.median(seconds[name]), modelled_seconds
            first = first or times
            growth, modelled = (time / base for time, base in zip(times, first, strict=True))
            spread = f"{1e3 * min(seconds[name]):.1f}–{1e3 * max(seconds[name]):.1f}"
            row = f"{name:<12}{nodes:>6}{1e3 * times[0]:>9.1f}{spread:>16}{1e3 * times[1]:>10.1f}"
            print(f"{row}{growth:>8.2f}{modelled:>8.2f}{growth / modelled:>7.2f}", flush=True)
            if nodes != fewest and not 1 - limit <= growth / modelled <= 1 + limit:
                beyond.append(f"{name} over {nodes} nodes")
    return beyond


def _on_ranks(out: Path, runs: int, costs: Costs) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = run_scans(runs, costs)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog="python -m lab.emulated_scans",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="default 2 4 8")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of each node; default 1")
    parser.add_argument("--delay-ms", type=float, default=10.0, metavar="X", help="between nodes; default 10")
    parser.add_argument("--rate-mb", type=float, default=500.0, metavar="X", help="MB/s that a node sends; default 500")
    parser.add_argument("--runs", type=int, default=9, metavar="N", help="of each scan; default 9")
    parser.add_argument("--limit", type=float, default=0.3, metavar="X", help="of |growth/model − 1|; default 0.3")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = parse(arguments)
    networks = [Network(nodes, options.delay_ms, options.rate_mb) for nodes in sorted(set(options.nodes))]
    if options.on_ranks is not None:
        _on_ranks(options.on_ranks, options.runs, costs_of(networks[0]))
        return 0
    if min(options.nodes) < 2 or len(networks) < 2:
        raise ConfigError("--nodes", " ".join(map(str, options.nodes)), "must be two or more numbers ≥ 2")
    for name in ("ranks", "runs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}", getattr(options, name), "must be ≥ 1")
    if not 0 < options.limit < 1:
        raise ConfigError("--limit", options.limit, "must be > 0 and < 1")
    measured = {}
    for network in networks:
        print(f"== {network.nodes} nodes of {options.ranks} ranks", flush=True)
        measured[network.nodes] = measure(network, options.ranks, options.runs)
    if beyond := compare(measured, networks[0], options.ranks, options.limit):
        print(f"more than {options.limit:.0%} from the model: {', '.join(beyond)}", file=sys.stderr, flush=True)
    return 1 if beyond else 0


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
