"""Question: where do the seconds before the first step and after the last one go, for train, generate and evaluate?
Command: python -m lab.campaigns.start_times [COMMIT|FOLDER …] [--commands train,generate,evaluate]
    [--caches empty,warm] [--place FOLDER] [KEY=VALUE of train.py …]
Date: 27 November 2026, one H100 (d5edbaf9).
Answer: a table for each command; each version has two columns, for empty and for warm caches. The results for `gla_1b`
    are in docs/benchmarks.md.

Of each version in turn (default: this one): a run of 3 steps, which ends with a checkpoint; a text and a validation of
it. Empty are the caches of compiled code (Triton's, Inductor's, the driver's) and of matplotlib's fonts; warm are the
caches that the run before has filled. All are in temporary folders. A run of a tiny model before reads the files of
Python's packages, and prepares the data. What the disk needs is measured by writing as many bytes as a checkpoint has,
by several writers, with fsync. Rows are seconds after the command's start, or durations where "(s)" stands behind.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lab.campaigns import start_marks
from lab.campaigns.same_bits import sources

COMMANDS = ("train", "generate", "evaluate")
CACHES = ("empty", "warm")
STEPS = 3
_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR")
_SHORT = [f"train.steps={STEPS}", "train.log_every=1", "checkpoint.every=0", "sched.warmup_steps=1", "logger=none"]
_TINY = ["model=gla_tiny", "data.seq_len=512", "data.global_batch=1", "train.eval_sequences=1"]
_ON_GPU = ["model=gla_1b", "train.dtype=bf16", "data.seq_len=16384", "data.global_batch=1"]
_TEXT = ["--prompt", "def main(", "--max-tokens", "50", "--greedy"]
_BLOCK = 1 << 26


@dataclass
class Timed:
    """A command's moments, in seconds after its start, and durations, by label.

    Attributes:
        seconds: until its process had ended.
        code: its exit code; None: ended here, after the limit.
    """

    moments: dict[str, float] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    code: int | None = None
    output: str = ""


def timed(arguments: Sequence[str], tree: Path, caches: Path, limit: float, place: Path) -> Timed:
    """Run `python ARGUMENTS` with a version's sources, at most `limit` seconds; its output is read as it comes."""
    marks = place / f"marks-{time.monotonic_ns()}"
    hooks = place / "hooks"
    hooks.mkdir(exist_ok=True)
    shutil.copyfile(start_marks.__file__, hooks / "sitecustomize.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(hooks), str(tree)])
    environment[start_marks.VARIABLE] = str(marks)
    for name in _VARIABLES:
        (caches / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        environment[name] = str(caches / name)
    began, found = time.monotonic(), Timed()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        found.output = _read(process, found.moments, began, began + limit)
        found.code = process.wait(max(0.1, began + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    found.seconds = time.monotonic() - began
    for line in marks.read_text().splitlines() if marks.exists() else []:
        moment, label, seconds = json.loads(line)
        if seconds is None:
            # Steps have a place for each micro-batch, and more for what follows.
            label = f"{label.partition(',')[0]} begins" if label.startswith("step ") else label
            found.moments.setdefault(label, moment - began)
        else:
            found.durations[f"{label} (s)"] = seconds
    found.moments["exit"] = found.seconds
    return found


def _read(process: subprocess.Popen[bytes], moments: dict[str, float], began: float, deadline: float) -> str:
    # The moments of its first output and of each line about a step; returns what it has written.
    texts = {"out": b"", "err": b""}
    with selectors.DefaultSelector() as selector:
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, name)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                now = time.monotonic() - began
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                if key.data == "out":
                    moments.setdefault("first output", now)
                    moments["last output"] = now
                before = texts[key.data].count(b"\n")
                texts[key.data] += piece
                for line in texts[key.data].split(b"\n")[before:-1]:
                    if line.startswith(b"step ") and b"/" in line[:20]:
                        number = line.decode().split("/")[0]
                        moments.setdefault(f"{number}: its line", now)
    return (texts["out"] + texts["err"]).decode(errors="replace")


def disk_seconds(folder: Path, size: int, writers: int) -> float:
    """Seconds to write so many bytes into a folder, by several writers with a file each, until they are on the disk."""
    block = os.urandom(_BLOCK)

    def write(number: int) -> None:
        left = size // writers
        with (folder / f"bytes-{number}").open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(block[: min(left, _BLOCK)])
            os.fsync(file.fileno())

    began = time.monotonic()
    try:
        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(write, range(writers)))
        return time.monotonic() - began
    finally:
        for number in range(writers):
            (folder / f"bytes-{number}").unlink(missing_ok=True)


def _arguments(command: str, run: Path, place: Path, settings: Sequence[str]) -> list[str]:
    if command == "train":
        return ["train.py", *_SHORT, *settings, f"run_dir='{run}'"]
    if command == "generate":
        return ["-m", "zeco_train.generate", str(run), *_TEXT]
    out = place / f"evaluated-{time.monotonic_ns()}"
    return ["-m", "zeco_train.evaluate", str(run), "--out", str(out), "validation.sequences=4"]


def measure(
    tree: Path, commands: Sequence[str], caches: Sequence[str], settings: Sequence[str], limit: float, place: Path
) -> dict[tuple[str, str], Timed]:
    """All commands of one version, by command and caches; the run's folder is removed at the end."""
    found: dict[tuple[str, str], Timed] = {}
    compiled, run = place / "caches", place / "run"
    try:
        for command in commands:
            for state in caches:
                # What another command has compiled is empty for this one, too; 'warm' alone follows a run before.
                if state == "empty":
                    shutil.rmtree(compiled, ignore_errors=True)
                if command == "train":
                    shutil.rmtree(run, ignore_errors=True)
                done = timed(_arguments(command, run, place, settings), tree, compiled, limit, place)
                found[command, state] = done
                moments = ", ".join(f"{label} {moment:.1f}" for label, moment in done.moments.items())
                print(
                    f"{tree.name}: {command}, {state}: {done.seconds:.1f} s, exit code {done.code}: {moments}",
                    flush=True,
                )
                if done.code != 0:
                    print(done.output[-3000:], flush=True)
                if command == "train":
                    size = sum(file.stat().st_size for file in run.glob("checkpoints/step_*/*") if file.is_file())
                    done.durations["bytes of the checkpoint (GB)"] = size / 1e9
    finally:
        for folder in (compiled, run):
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _add_end(done: Timed, place: Path, writers: int, known: dict[int, float]) -> None:
    # How much longer the end takes than the disk needs for the checkpoint's bytes.
    size = round(done.durations.get("bytes of the checkpoint (GB)", 0.0) * 1e9)
    last = done.moments.get(f"step {STEPS}: its line")
    if last is None:
        return
    # Versions differ by some bytes of metadata.
    key = round(size, -8)
    if key not in known:
        known[key] = disk_seconds(place, size, writers)
    done.durations |= {
        "end - last step (s)": done.seconds - last,
        f"the disk for these bytes, {writers} writers (s)": known[key],
        "end beyond the disk (s)": done.seconds - last - known[key],
    }


def table(columns: dict[str, Timed]) -> str:
    """Rows by moment, then durations; columns are measurements."""
    moments = {label: moment for done in columns.values() for label, moment in done.moments.items()}
    durations = dict.fromkeys(label for done in columns.values() for label in done.durations)
    labels = [*sorted(moments, key=lambda label: moments[label]), *durations]
    width = max(map(len, labels))
    lines = [f"{'':{width}}  " + "  ".join(f"{name:>14}" for name in columns)]
    for label in labels:
        values = [(done.moments | done.durations).get(label) for done in columns.values()]
        lines.append(f"{label:{width}}  " + "  ".join(f"{'-' if v is None else f'{v:.2f}':>14}" for v in values))
    return "\n".join(lines)


def main() -> int:
    """Measure, and print the tables; returns 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description="seconds of the parts of a start and of the end, by version and caches"
    )
    parser.add_argument("given", nargs="*", metavar="COMMIT|FOLDER|KEY=VALUE", help="default: this version")
    parser.add_argument("--commands", default=",".join(COMMANDS), help=f"default: {','.join(COMMANDS)}")
    parser.add_argument("--caches", default=",".join(CACHES), help=f"default: {','.join(CACHES)}")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a command (default: 200)")
    parser.add_argument("--writers", type=int, default=4, help="when the disk is measured (default: 4)")
    parser.add_argument("--place", type=Path, help="for runs and caches, on the disk in question (default: temporary)")
    options = parser.parse_intermixed_args()
    trees = [text for text in options.given if "=" not in text] or ["."]
    settings = [text for text in options.given if "=" in text]
    commands, caches = options.commands.split(","), options.caches.split(",")
    found: dict[str, dict[tuple[str, str], Timed]] = {}
    with ExitStack() as stack:
        if options.place is not None:
            options.place.mkdir(parents=True, exist_ok=True)
        prefix = "zeco-start-"
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=options.place))).resolve()
        if not settings:
            settings = _ON_GPU if _has_gpu() else _TINY
        for name in trees:
            tree = stack.enter_context(sources(name))
            tiny = timed(_arguments("train", place / "tiny", place, _TINY), tree, place / "tiny-caches", 300.0, place)
            print(f"{name}: a tiny model before, not counted: {tiny.seconds:.1f} s, exit code {tiny.code}", flush=True)
            found[name] = measure(tree, commands, caches, settings, options.limit, place)
            for left in ("tiny", "tiny-caches"):
                shutil.rmtree(place / left, ignore_errors=True)
        known: dict[int, float] = {}
        for (command, _), done in ((key, done) for each in found.values() for key, done in each.items()):
            if command == "train":
                _add_end(done, place, options.writers, known)
    for command in commands:
        columns = {f"{name[-8:]} {state}": found[name][command, state] for name in trees for state in caches}
        print(f"\n{command} {' '.join(settings) if command == 'train' else ''}\n{table(columns)}", flush=True)
    return int(any(done.code != 0 for each in found.values() for done in each.values()))


def _has_gpu() -> bool:
    # Without torch, whose import would take this process's memory, too.
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


if __name__ == "__main__":
    sys.exit(main())
