"""The judges of `lab.campaigns.mutants`, and the copy of the repository that they judge.

A judge is a fork of this process, which has imported torch once. It imports the project from the copy.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol
from xml.etree import ElementTree

from lab.campaigns.grid import Fault, faulty

REPOSITORY = Path(__file__).resolve().parents[2]
# Rooms of tests that compute values; those of verify itself, of launchers and of reports do not count.
ROOMS = ("ops", "sp", "collectives", "models", "distributed", "training", "data", "evaluate", "generate", "hf")
# A judge may take this many times as long as without a fault, and at least so many seconds on a busy machine.
_BOUND, _LEAST_SECONDS = 4.0, 120.0

# Beginnings of pytest's lines on failures; the first is in verify's rows, too.
_FAILURES = ("FAILED", "ERROR tests/")


@dataclass(frozen=True)
class Outcome:
    """What a judge found.

    Attributes:
        caught: whether it noticed the fault.
        by: its first failure, or that it did not end; empty if it passed.
        seconds: until then.
    """

    caught: bool
    by: str
    seconds: float


NOT_EXECUTED = Outcome(False, "its statement is not executed", 0.0)


class Judge(Protocol):
    """Runs something in a copy, and sees whether it fails."""

    def explore(self, copy: Copy, faults: Sequence[Fault]) -> None:
        """Run without a fault, and find which faults' statements are executed.

        Raises:
            AssertionError: it fails without a fault.
        """
        ...

    def run(self, copy: Copy, fault: Fault) -> Outcome:
        """Judge the copy, in which the fault is planted."""
        ...


class Copy:
    """A copy of the repository's files in a folder, which may be changed; the checkout never is."""

    def __init__(self, folder: Path) -> None:
        self.base, self.tree, self.temporary = folder, folder / "tree", folder / "tmp"
        self._notes = folder / "notes"
        self.temporary.mkdir(parents=True)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()
        for name in filter(lambda name: (REPOSITORY / name).is_file(), names):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, self.tree / name)
        # Once, since judges write no bytecode: that of a fault could be taken for the next one's, by time and size.
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(self.tree)], check=True)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Inside, the copy has the fault."""
        with self._changed({fault.file: lambda text: faulty(fault, text)}):
            yield

    @contextlib.contextmanager
    def probed(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Inside, a fault's statement notes when it is executed; see `notes`."""
        self._notes.write_bytes(b"")
        by_file: dict[str, list[Fault]] = defaultdict(list)
        for fault in faults:
            by_file[fault.file].append(fault)
        with self._changed({file: partial(_probed, faults=of_file) for file, of_file in by_file.items()}):
            yield

    def notes(self) -> Iterator[tuple[str, str]]:
        """What probes have noted: faults, and the tests that executed their statements."""
        for line in self._notes.read_text().splitlines():
            name, test = line.split("\t")
            yield name, test

    @contextlib.contextmanager
    def _changed(self, changes: Mapping[str, Callable[[str], str]]) -> Iterator[None]:
        texts = {file: (self.tree / file).read_text() for file in changes}
        for file, change in changes.items():
            self._write(file, change(texts[file]))
        try:
            yield
        finally:
            for file, text in texts.items():
                self._write(file, text)

    def _write(self, file: str, text: str) -> None:
        path = self.tree / file
        path.write_text(text)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def environment(self) -> dict[str, str]:
        """Variables of processes that run in the copy."""
        own = {"PYTHONPATH": str(self.tree), "TMPDIR": str(self.temporary), "ZECO_REACHED": str(self._notes)}
        return {**own, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    def clear(self, processes: Sequence[int] = ()) -> None:
        """End what a judge has left: its processes, which work in the copy's folders, and its files."""
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if link.readlink().is_relative_to(self.base):
                    os.kill(int(link.parent.name), signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()


class Verify:
    """`torchrun --nproc-per-node 2 -m zeco_train.verify`, stopped at the first row that failed.

    Args:
        settings: of verify.
    """

    def __init__(self, settings: Sequence[str]) -> None:
        self._settings, self._bound = list(settings), math.inf
        self._reached: set[str] = set()

    def explore(self, copy: Copy, faults: Sequence[Fault]) -> None:
        """See `Judge`."""
        with copy.probed(faults):
            control = self._run(copy)
        assert not control.caught, f"verify fails without a fault: {control.by}"
        print(f"without a fault verify passes in {control.seconds:.0f} s", flush=True)
        self._bound = max(_LEAST_SECONDS, _BOUND * control.seconds)
        self._reached = {name for name, _ in copy.notes()}

    def run(self, copy: Copy, fault: Fault) -> Outcome:
        """See `Judge`."""
        return self._run(copy) if fault.id in self._reached else NOT_EXECUTED

    def _run(self, copy: Copy) -> Outcome:
        began, output = time.monotonic(), copy.base / "output"
        output.write_bytes(b"")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # What torchrun sets.
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [_fork(copy, self._main, output, {**world, "RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(2)]
        codes = _wait(ranks, self._bound, lambda: b"FAILED" in output.read_bytes())
        copy.clear(ranks)
        return Outcome(codes != [0, 0], _first_failure(output, codes), time.monotonic() - began)

    def _main(self) -> None:
        sys.argv = ["verify", *self._settings]
        runpy.run_module("zeco_train.verify", run_name="__main__", alter_sys=True)


class Tests:
    """`pytest -m "not slow"` over the files that execute a fault's statement, those of its own room first.

    A test that fails is run once more: tests that wait for processes can fail by the machine's load.

    Args:
        map_file: keeps what exploration finds; that is taken from it if it exists.
    """

    def __init__(self, map_file: Path | None) -> None:
        self._map_file = map_file

    def explore(self, copy: Copy, faults: Sequence[Fault]) -> None:
        """See `Judge`."""
        if self._map_file is None or not self._map_file.exists():
            found = self._explore(copy, faults)
            if self._map_file is not None:
                self._map_file.write_text(json.dumps(found, indent=1))
        else:
            found = json.loads(self._map_file.read_text())
        # Files of tests by fault, and the seconds of each file.
        self._reached, self._seconds = found["reached"], found["seconds"]

    def run(self, copy: Copy, fault: Fault) -> Outcome:
        """See `Judge`."""
        seconds, own = self._seconds, f"tests/{fault.room}/"
        left = sorted(self._reached[fault.id], key=lambda file: (not file.startswith(own), seconds[file]))
        began, bound = time.monotonic(), max(_LEAST_SECONDS, _BOUND * sum(seconds[file] for file in left))
        passed_again: list[str] = []
        while left:
            codes, output = _run_tests(copy, left, bound - (time.monotonic() - began), "-x", *passed_again)
            failed = _failed_tests(output)
            # 5: all that was left is deselected.
            if codes in ([0], [5]) or codes is None or not failed:
                caught = codes not in ([0], [5])
                return Outcome(caught, _first_failure(output, codes) if caught else "", time.monotonic() - began)
            by = _first_failure(output, codes)
            if _run_tests(copy, failed, bound)[0] != [0]:
                return Outcome(True, by, time.monotonic() - began)
            passed_again.append(f"--deselect={failed[0]}")
            left = left[left.index(failed[0].split("::")[0]) :]
        return NOT_EXECUTED

    def _explore(self, copy: Copy, faults: Sequence[Fault]) -> dict[str, Any]:
        results, rooms = copy.base / "results.xml", [f"tests/{room}" for room in ROOMS]
        with copy.probed(faults):
            codes, output = _run_tests(copy, rooms, math.inf, f"--junitxml={results}")
            if failed := _failed_tests(output):
                print("once more:", *failed, sep="\n  ", flush=True)
                codes, output = _run_tests(copy, failed, math.inf)
        assert codes == [0], f"the tests fail without a fault: {_first_failure(output, codes)}"
        seconds: dict[str, float] = defaultdict(float)
        for case in ElementTree.parse(results).iter("testcase"):
            seconds["/".join(case.get("classname", "").split(".")[:3]) + ".py"] += float(case.get("time", "0"))
        reached: dict[str, set[str]] = {fault.id: set() for fault in faults}
        for name, test in copy.notes():
            if test.startswith("tests/"):
                reached[name].add(test.split("::")[0])
        return {"reached": {name: sorted(files) for name, files in reached.items()}, "seconds": seconds}


def _run_tests(copy: Copy, tests: list[str], bound: float, *options: str) -> tuple[list[int] | None, Path]:
    output = copy.base / "output"
    output.write_bytes(b"")
    always = ["-m", "not slow", "-q", "-p", "no:cacheprovider", f"--basetemp={copy.temporary}/pytest"]
    process = _fork(copy, lambda: _pytest([*always, *options, *tests], tests), output, {})
    codes = _wait([process], bound, lambda: False)
    copy.clear([process])
    return codes, output


def _probed(text: str, faults: Sequence[Fault]) -> str:
    """The text with a call of `lab.campaigns.reached` before each fault's statement."""
    lines, statements = (
        text.splitlines(keepends=True),
        [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.stmt)],
    )
    # What stands right before `elif`, or inside a decorated function's head, is not a place for a statement.
    places = [x for x in statements if not lines[x.lineno - 1].lstrip().startswith(("elif", "@"))]
    before: dict[int, list[str]] = defaultdict(list)
    for fault in faults:
        first = text[: text.index(fault.old)].count("\n") + 1
        before[max(x.lineno for x in places if x.lineno <= first <= (x.end_lineno or 0))].append(fault.id)
    probed = []
    for number, line in enumerate(lines, start=1):
        margin = line[: len(line) - len(line.lstrip())]
        for name in before[number]:
            probed.append(f'{margin}__import__("lab.campaigns.reached", fromlist=["reached"]).reached("{name}")\n')
        probed.append(line)
    return "".join(probed)


def _fork(copy: Copy, main: Callable[[], object], output: Path, environment: Mapping[str, str]) -> int:
    """Run `main` in a fork of this process, in the copy; returns the process's number."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    try:
        _become(copy, main, output, environment)
    finally:
        os._exit(70)


def _become(copy: Copy, main: Callable[[], object], output: Path, environment: Mapping[str, str]) -> NoReturn:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(copy.tree)
    os.environ.update({**copy.environment(), **environment})
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lab")]:
        del sys.modules[name]
    # Ranks that a judge starts import what is here.
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [str(copy.tree), *(path for path in sys.path if Path(path or ".").resolve() != REPOSITORY)]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _pytest(arguments: list[str], order: Sequence[str]) -> int:
    import pytest

    class Ordered:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items.sort(key=lambda item: next(n for n, name in enumerate(order) if item.nodeid.startswith(name)))
            # A busy machine may exceed the bound on CPU time, which is no fault.
            sys.modules["tests.conftest"].LIMIT = math.inf  # type: ignore[attr-defined]

    return int(pytest.main(arguments, plugins=[Ordered()]))


def _wait(processes: Sequence[int], seconds: float, stop: Callable[[], bool]) -> list[int] | None:
    """Exit codes of processes, fewer if one failed or `stop` became true; None if they did not end in time."""
    running, codes, deadline = list(processes), list[int](), time.monotonic() + seconds
    while running and not any(codes) and not stop():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                running.remove(process)
                codes.append(os.waitstatus_to_exitcode(status))
    return codes


def _failed_tests(output: Path) -> list[str]:
    lines = output.read_text(errors="replace").splitlines()
    # Parameters may have spaces.
    named = (line.partition(" - ")[0].partition(" ")[2] for line in lines if line.startswith(_FAILURES))
    return [name for name in named if name.startswith("tests/")]


def _first_failure(output: Path, codes: list[int] | None) -> str:
    if codes is None:
        return "did not end"
    lines = [" ".join(line.split()) for line in output.read_text(errors="replace").splitlines() if line.strip()]
    for signs in (_FAILURES, ("error:", "Error:")):
        if failures := [line for line in lines if any(sign in line for sign in signs)]:
            return failures[0][:300]
    return f"exit code {max(codes)}: {lines[-1][:240] if lines else ''}" if any(codes) else ""
