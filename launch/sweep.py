r"""Train with several backends, sequence lengths and numbers of nodes, each combination as a separate job.

    python launch/sweep.py --backends dp lasp1 lasp2 zeco --lengths 64k 256k 1M --nodes 1 4 \
        --sbatch "--partition h100 --time 2:00:00" -- +experiment=gla_1b_16k train.steps=100 data.global_batch=32

checks all combinations, then submits launch/slurm_256gpu.sh once for each. Started again, it skips finished runs and
queued jobs, and submits the rest; interrupted runs resume. Each run's folder is FOLDER/BACKEND-LENGTH-NODESn, and the
job ids are in FOLDER/sweep.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.config import check_split
from zeco_train.config.schema import Config, load_config
from zeco_train.distributed.config import resolve_sp_size
from zeco_train.errors import ConfigError, DataError, system_errors
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.sp.exchange import check_softmax
from zeco_train.system.command import docstring, errors_in_a_line
from zeco_train.system.files import METRICS_FILE, write_durably
from zeco_train.system.terminal import format_table, show_any_text
from zeco_train.tracking.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "launch" / "slurm_256gpu.sh"
# Settings controlled by the sweep.
_OWN_KEYS = ("sp", "data.seq_len", "run_dir", "name")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder whose path would be interpreted as a value of run_dir, by `ConfigError`."""
    if "${" in str(folder):
        raise ConfigError(option, folder, "must have no ${ in its path; name another folder")


@dataclass(frozen=True)
class Case:
    """One run: `backend` is dp, lasp1, lasp2, zeco, or zeco:ALGORITHM."""

    backend: str
    length: str
    nodes: int
    ranks: int
    folder: Path
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the run's folder and of the job."""
        return f"{self.backend.replace(':', '_')}-{self.length}-{self.nodes}n"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name

    @property
    def overrides(self) -> list[str]:
        backend, _, algorithm = self.backend.partition(":")
        own = [f"sp={backend}", f"data.seq_len={tokens(self.length)}", f"name={self.name}"]
        shared = list(self.settings)
        if backend == "dp":
            # dp keeps whole sequences on a rank: an sp.size from settings or an experiment is for the other backends.
            shared = [setting for setting in shared if not setting.startswith("sp.size=")]
            own.append("sp.size=-1")
        own.append(f"run_dir={self.run_dir}")
        return [*shared, *own, *([f"sp.all_scan.algorithm={algorithm}"] if algorithm else [])]

    def check(self) -> Config:
        """Load and check the run's configuration, as far as that can be done without data; errors name the run."""
        try:
            config = load_config(self.overrides)
            world_size = self.nodes * self.ranks
            sp_size = resolve_sp_size(config.sp.size, world_size, config.sp.backend.value)
            check_split(config.data, sp_size, world_size // sp_size, config.train.segments)
            check_softmax(config.sp, config.model, sp_size)
        except ConfigError as error:
            error.args = (f"{self.name}: {error}",)
            raise
        return config


def tokens(length: str) -> int:
    """`16k` → 16384, `1M` → 1048576, `3000` → 3000; `ConfigError` for another text."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", length)
    if match is None or int(match[1]) == 0:
        raise ConfigError("--lengths", length, "must be a number of tokens, such as 16384, 16k or 1M (powers of two)")
    return int(match[1]) * _UNITS[match[2].lower()]


class Sweep:
    """All cases of a grid, and their job ids by name (`sweep.json`)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder.resolve()
        _check_grid(options)
        check_folder("--folder", self.folder)
        for setting in options.settings:
            key = setting.lstrip("+").partition("=")[0]
            if key in _OWN_KEYS:
                raise ConfigError(key, setting.partition("=")[2], "is what the sweep sets, differently for each run")
        for length in options.lengths:
            tokens(length)
        grid = product(options.backends, options.lengths, options.nodes)
        settings = tuple(options.settings)
        self.cases = [Case(b, length, n, options.ranks_per_node, self.folder, settings) for b, length, n in grid]
        self._record = self.folder / "sweep.json"
        self.jobs = _read_jobs(self._record)

    def run(self) -> int:
        """Check all cases, then submit or run the unfinished ones; returns the exit code."""
        steps = {case.name: case.check().train.steps for case in self.cases}
        queued = {} if self.options.local or not self.jobs else _queued(self.jobs)
        rows, previous, failed = [], [], False
        for case in self.cases:
            logged = read_metrics(case.run_dir / METRICS_FILE)
            done = logged[-1]["step"] if logged else 0
            if done >= steps[case.name]:
                state = "finished"
            elif case.name in queued:
                state = f"{queued[case.name].lower()} as job {self.jobs[case.name]}"
                previous.append(self.jobs[case.name])
            else:
                before = f"from step {done}" if done else "from the start"
                state, ok = self._start(case, before, previous)
                failed |= not ok
            rows.append((case.backend, case.length, str(case.nodes * case.ranks), str(case.run_dir), state))
        headings = ("backend", "length", "ranks", "run", "state")
        widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
        columns = {name: (name, f"<{width}") for name, width in zip(headings, widths, strict=True)} | {
            "state": ("state", "<")
        }
        print(format_table([dict(zip(headings, row, strict=True)) for row in rows], columns))
        return 1 if failed else 0

    def _start(self, case: Case, before: str, previous: list[str]) -> tuple[str, bool]:
        # Returns the case's state for the table, and whether that succeeded. `previous`: earlier job ids.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        command += [str(ROOT / "train.py"), *case.overrides]
        if not self.options.local:
            command = self._submission(case, previous)
        if self.options.dry_run:
            print(shlex.join(command))
            if not self.options.local:
                previous.append(f"JOB{len(previous) + 1}")
            return f"would go {before}", True
        with system_errors(lambda reason: ConfigError("--folder", self.folder, f"cannot be made ({reason})")):
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.options.local:
            print(f"== {case.name}", flush=True)
            code = _run_here(command)
            return ("finished", True) if code == 0 else (f"failed with exit code {code}", False)
        # The submitting folder is the jobs' working directory; `_submission` sends their output to the sweep's folder.
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            return f"not submitted: {error.filename}: {error.strerror}", False
        if done.returncode != 0:
            return f"not submitted: {' '.join(done.stderr.split())}", False
        number = done.stdout.strip().partition(";")[0]
        self.jobs[case.name] = number
        previous.append(number)
        # After each job, so that an interrupted sweep does not submit it twice.
        write_durably(self._record, json.dumps({"jobs": self.jobs}, indent=2))
        return f"submitted as job {number}, {before}", True

    def _submission(self, case: Case, previous: list[str]) -> list[str]:
        command = ["sbatch", "--parsable", f"--output={self.folder}/%x-%j.out", f"--job-name={case.name}"]
        command += [f"--nodes={case.nodes}", f"--gpus-per-node={0 if self.options.cpu else case.ranks}"]
        if self.options.at_once and len(previous) >= self.options.at_once:
            command.append(f"--dependency=afterany:{previous[-self.options.at_once]}")
        command.append(f"--export=ALL,RANKS_PER_NODE={case.ranks}")
        return [*command, *shlex.split(self.options.sbatch), str(SCRIPT), "--", *case.overrides]


def _check_grid(options: argparse.Namespace) -> None:
    for name in ("backends", "lengths", "nodes"):
        given = getattr(options, name)
        for value in given:
            if given.count(value) > 1:
                raise ConfigError(f"--{name}", value, "comes twice")
    for name, value in (*(("--nodes", count) for count in options.nodes), ("--ranks-per-node", options.ranks_per_node)):
        if value < 1:
            raise ConfigError(name, value, "must be ≥ 1")
    if options.at_once < 0:
        raise ConfigError("--at-once", options.at_once, "must be ≥ 0; 0 sets no limit")
    try:
        shlex.split(options.sbatch)
    except ValueError as error:
        raise ConfigError("--sbatch", options.sbatch, f"cannot be split into words ({error})") from error


def _read_jobs(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["jobs"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(path, "is not what a sweep has left", "remove it, or take another --folder") from error


def _run_here(command: list[str]) -> int:
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The run has received the signal, too, and saves.
            process.wait()
            raise


def _queued(jobs: dict[str, str]) -> dict[str, str]:
    # States of the queued and running jobs, by name of the case.
    command = ["squeue", "--me", "--noheader", "--format=%i %T"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError("squeue", "", f"which jobs are still queued cannot be found out ({error})") from error
    states = dict(line.split() for line in done.stdout.splitlines())
    return {name: states[number] for name, number in jobs.items() if number in states}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="launch/sweep.py",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backends", nargs="+", default=[*BACKENDS], metavar="BACKEND")
    parser.add_argument("--lengths", nargs="+", required=True, metavar="TOKENS", help="whole sequences: 16k, 1M, …")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1], metavar="N", help="default 1")
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="R", help="and GPUs; default 8")
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"), help="of all runs; default runs/sweep")
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="more of sbatch's options, in one argument")
    parser.add_argument("--at-once", type=int, default=0, metavar="J", help="let at most J of the jobs run at a time")
    parser.add_argument("--cpu", action="store_true", help="nodes without GPUs")
    parser.add_argument("--local", action="store_true", help="here, one after the other, without Slurm")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of train.py, for all runs; after --")
    return parser.parse_args(arguments)


@errors_in_a_line
def main(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    options = parse(arguments)
    try:
        if options.local and options.nodes != [1]:
            raise ConfigError("--nodes", " ".join(map(str, options.nodes)), "must be 1 with --local")
        return Sweep(options).run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
