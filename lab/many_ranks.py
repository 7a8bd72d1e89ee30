"""Question: what does a start cost by rank, do its requests stay linear in the ranks, and is a lost rank named?
Command: python -m lab.many_ranks --counts 8 16 32 --ranks 64 --folder runs/many_ranks
Date: 2026-11-24, gla_tiny, forked ranks on 2 CPU cores
Answer: 14 requests, 6 groups and 23 checks a rank at 8 to 64 ranks; 256 with a core each would start in 3.4 s. Of 64
    one was killed: named, all ended 5.0 s later, resumed with one rank's losses to 2.1e-5.

With `--counts` none of these may grow by more than a tenth; with `--ranks` the others must end within
`parallel.timeout_seconds` and 15 s. Arguments after `--` are train.py's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from data.sources import corpora
from lab import forked_ranks
from lab.forked_ranks import Ranks
from lab.start_counts import count_start
from zeco_train import cli
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError, DataError
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import METRICS_FILE
from zeco_train.system.small_files import read_json
from zeco_train.system.terminal import show_any_text
from zeco_train.tracking.metrics import read_metrics

# Tokens of a rank.
_TOKENS = 16
_STEPS, _EVERY = 6, 2
_GRACE_SECONDS = 15.0
_PRIVATE_MB = 150.0
_GROWTH = 1.1
# Memory that is freed goes back to the system, of all threads from one heap: 79 MB instead of 104 on each of 32 ranks.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# fp32, sums in another order.
_TOLERANCE = 1e-3
# Assumed for the estimate: seconds of a small message between machines.
_MESSAGE_SECONDS = 50e-6


def start(count: int, arguments: Sequence[str], folder: Path) -> Ranks:
    """Fork a launcher's store and `count` ranks of train.py, which count until their first step."""

    def train(rank: int) -> int:
        count_start(folder / f"rank_{rank}.json")
        return cli.main(list(arguments))

    return forked_ranks.start(count, train, folder)


def counts(ranks: Ranks) -> list[dict[str, float]]:
    """What each rank has counted until its first step."""
    return [read_json(ranks.folder / f"rank_{rank}.json") for rank in range(len(ranks.pids))]


def available_mb() -> float:
    """Memory that processes may still take."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    return int(line.split()[1]) / 1024


def settings(count: int, run_dir: Path, timeout: float, more: Sequence[str]) -> list[str]:
    """train.py's arguments for `count` ranks that share one sequence."""
    return [
        f"run_dir='{run_dir}'",
        "train.device=cpu",
        f"data.seq_len={_TOKENS * count}",
        "data.global_batch=1",
        "train.log_every=1",
        "train.eval_every=0",
        "train.eval_sequences=0",
        f"parallel.timeout_seconds={timeout:g}",
        *more,
    ]


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Count and lose; returns the exit code."""
    options = _parse(arguments)
    for count in (*options.counts, options.ranks):
        _check_memory(count)
    prepare(options.more)
    problems = list[str]()
    if options.counts:
        problems += count_starts(options)
    if options.ranks:
        problems += lose_one(options)
    for problem in problems:
        print(f"wrong: {problem}")
    return 1 if problems else 0


def prepare(more: Sequence[str]) -> None:
    """Do once what each rank would do: imports, the parsers' tables, the embedded corpus."""
    load_config([*settings(1, Path("run"), 60.0, more)])
    corpora.standard_library_documents = functools.cache(corpora.standard_library_documents)
    corpora.standard_library_documents()
    # The ranks share these objects' memory; a collection in a rank would visit, and so copy, all of it.
    gc.collect()
    gc.freeze()


def count_starts(options: argparse.Namespace) -> list[str]:
    """Print the counts of starts of each size, and the estimate; returns what does not hold."""
    names = ("requests", "keys", "groups", "created", "checks", "sockets", "cpu_seconds", "seconds", "private_mb")
    print(f"{'ranks':>6}" + "".join(f"{name:>13}" for name in names) + "   of a rank, mean; seconds: of the last")
    means, problems = dict[int, dict[str, float]](), list[str]()
    for count in options.counts:
        folder = options.folder / f"start_{count}"
        more = [*options.more, "train.steps=1", "checkpoint.every=0"]
        ranks = start(count, settings(count, folder / "run", options.timeout, more), folder)
        codes = ranks.wait(options.limit)
        if any(codes):
            return [*problems, f"{count} ranks: exit codes {sorted(set(codes), key=str)}; see {folder}"]
        found = counts(ranks)
        means[count] = {name: sum(each[name] for each in found) / count for name in names}
        means[count] |= {name: max(each[name] for each in found) for name in ("seconds", "private_mb")}
        print(f"{count:6}" + "".join(f"{means[count][name]:13.1f}" for name in names), flush=True)
        if means[count]["private_mb"] > _PRIVATE_MB:
            problems.append(f"{count} ranks: {means[count]['private_mb']:.0f} MB of private memory on a rank")
    first, last = min(means), max(means)
    grown = [name for name in names[:6] if means[last][name] > _GROWTH * means[first][name]]
    print(f"of a rank, grow with the ranks: {', '.join(grown) or 'none'}")
    for name in ("requests", "groups", "checks"):
        if means[last][name] > _GROWTH * means[first][name]:
            problems.append(f"{name} of a rank grow from {means[first][name]:.1f} to {means[last][name]:.1f}")
    if last > first:
        _estimate(means, options.estimate)
    return problems


def _estimate(means: dict[int, dict[str, float]], ranks: int) -> None:
    """Print the start of more ranks, each with a core of its own, from the counts."""
    (first, last), rate = (min(means), max(means)), _store_rate()

    def ahead(name: str) -> float:
        slope = (means[last][name] - means[first][name]) / (last - first)
        return means[last][name] + slope * (ranks - last)

    store = ranks * ahead("requests") / rate
    # An object's gathering is two rounds over a ring.
    checks = ahead("checks") * 2 * ranks * _MESSAGE_SECONDS
    cpu = ahead("cpu_seconds")
    print(
        f"{ranks} ranks, estimated: {cpu:.1f} s of a rank's CPU + {store:.1f} s for {ranks * ahead('requests'):,.0f} "
        f"requests ({rate:,.0f} a second, measured) + {checks:.1f} s for {ahead('checks'):.0f} checks (rings of "
        f"{_MESSAGE_SECONDS * 1e6:g} µs a message, assumed) = {cpu + store + checks:.1f} s after the imports"
    )


def _store_rate() -> float:
    """Requests a second of a store on this machine, by one client."""
    store, number = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 2000
    began = time.monotonic()
    for index in range(number):
        store.add(f"key {index % 100}", 1)
    return number / (time.monotonic() - began)


def lose_one(options: argparse.Namespace) -> list[str]:
    """Train, kill a rank, and resume; returns what does not hold."""
    count, folder, lost = options.ranks, options.folder / f"lost_{options.ranks}", options.ranks // 2
    more = [*options.more, f"train.steps={_STEPS}", f"checkpoint.every={_EVERY}", "sched.warmup_steps=1"]
    arguments = settings(count, folder / "run", options.timeout, more)
    began = time.monotonic()
    ranks = start(count, arguments, folder / "first")
    while _steps(folder / "run") <= _EVERY and time.monotonic() - began < options.limit:
        time.sleep(0.1)
    print(f"{count} ranks: step {_steps(folder / 'run')} after {time.monotonic() - began:.1f} s", flush=True)
    os.kill(ranks.pids[lost], signal.SIGKILL)
    killed, bound = time.monotonic(), options.timeout + _GRACE_SECONDS
    codes, problems = ranks.wait(bound), list[str]()
    print(f"rank {lost} killed: the others ended within {time.monotonic() - killed:.1f} s")
    if None in codes:
        problems.append(f"{codes.count(None)} ranks still ran {bound:g} s after the loss")
    named = [line for line in ranks.errors() if f"rank {lost} " in line]
    print("\n".join(named))
    if len(named) != 1 or len(ranks.errors()) != 1:
        problems.append(f"{len(named)} of {len(ranks.errors())} error lines name rank {lost}")
    began = time.monotonic()
    ranks = start(count, arguments, folder / "second")
    codes = ranks.wait(options.limit)
    print(f"resumed by the same command: ended after {time.monotonic() - began:.1f} s, step {_steps(folder / 'run')}")
    if any(codes):
        return [*problems, f"the resumed run: exit codes {sorted(set(codes), key=str)}; see {folder}"]
    more = [text for text in more if not text.startswith("parallel")]
    alone = start(1, settings(count, folder / "alone", options.timeout, more), folder / "one")
    if any(alone.wait(options.limit)):
        return [*problems, f"one rank failed; see {folder / 'one'}"]
    rows, expected = (
        {row["step"]: row["loss"] for row in read_metrics(folder / name / METRICS_FILE)} for name in ("run", "alone")
    )
    worst = max(abs(rows[step] / expected[step] - 1) for step in expected)
    print(f"losses of {len(rows)} steps differ from one rank's by {worst:.1e}")
    private = max(each["private_mb"] for each in counts(ranks))
    print(f"private memory of a rank: {private:.0f} MB at most")
    if private > _PRIVATE_MB:
        problems.append(f"{private:.0f} MB of private memory on a rank")
    if rows.keys() != expected.keys() or not worst <= _TOLERANCE:
        problems.append(f"losses differ from one rank's by {worst:.1e}")
    return problems


def _steps(run_dir: Path) -> int:
    """The last step that a run has recorded."""
    path = run_dir / METRICS_FILE
    return max((row["step"] for row in read_metrics(path)), default=0) if path.is_file() else 0


def _check_memory(count: int) -> None:
    needed = count * _PRIVATE_MB
    if (free := available_mb()) < needed:
        raise ConfigError("ranks", count, f"take up to {needed:,.0f} MB, and {free:,.0f} are available")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=docstring(sys.modules[__name__]), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="*", default=[8, 16, 32], help="starts to count, by ranks")
    parser.add_argument("--ranks", type=int, default=0, help="of the run that loses one; 0: none")
    parser.add_argument("--estimate", type=int, default=256, help="ranks of the estimate")
    parser.add_argument("--folder", type=Path, default=Path("runs/many_ranks"), help="new folder for runs and output")
    # 64 ranks on 2 cores take a minute to join.
    parser.add_argument("--timeout", type=float, default=150.0, help="parallel.timeout_seconds")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a start or a run")
    parser.add_argument("more", nargs="*", help="train.py's overrides, after --")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        raise DataError(options.folder, "exists", "name a new folder")
    options.folder = options.folder.resolve()
    return options


if __name__ == "__main__":
    show_any_text()
    if not _MALLOC.keys() <= os.environ.keys():
        # glibc reads them when a process starts.
        os.execve(sys.executable, sys.orig_argv, {**_MALLOC, **os.environ})
    sys.exit(main(sys.argv[1:]))
