"""Plant faults in a copy of this repository, one at a time, and see whether a judge notices.

    python -m tests.campaigns.mutants --list                               the grid: places × kinds
    python -m tests.campaigns.mutants --judge verify                       96 faults drawn from it by seed 0
    python -m tests.campaigns.mutants --judge verify tokens=[100]          the same, with settings of verify
    python -m tests.campaigns.mutants --judge tests --map FILE             by the tests, see below
    python -m tests.campaigns.mutants --judge verify --only chain gla-suffix-off        places, or faults

The faults are in `faults/*.toml`; each is one exact replacement in one file. The judges:

    verify    `torchrun --nproc-per-node 2 -m zeco_train.verify` with the arguments given here
    tests     `pytest -m "not slow"` over the rooms that compute, `ROOMS`

A fault is caught if the judge fails, or does not end within its bound, four times as long as it takes without a fault.
The judge is stopped at its first failure. Each campaign begins with a run without a fault, which must pass.

Tests are run by file, and only files that execute the statement of the fault, those of its own room first. The map of
files is made by one run of all tests with a probe at each fault's statement; `--map` keeps it for later campaigns.
A test that fails under a fault is run once more, since tests that wait for processes can fail by the machine's load.

Judges are forks of this process, which has imported torch once. Only the copy is changed, never the checkout.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = ("dropped term", "wrong sign", "off by one", "stale buffer", "wrong order", "missing decay", "wrong rank")
# Where a fault shows: nowhere else is a result changed.
WHEN = (
    "everywhere",
    "one rank",
    "one head",
    "reverse",
    "second call",
    "many chunks",
    "odd shape",
    "carry",
    "documents",
)
# Rooms of tests that compute values: the tests of verify itself, of launchers and of commands around them do not count.
ROOMS = ("ops", "sp", "collectives", "models", "distributed", "training", "data", "evaluate", "generate", "hf")
_COPIED = (
    "zeco_train",
    "models",
    "data",
    "configs",
    "tests",
    "launch",
    "train.py",
    "pyproject.toml",
    "docs",
    "README.md",
)
_BOUND = 4.0
# At least: starts take longer beside other work.
_LEAST_SECONDS = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault that a maintainer could make.

    Attributes:
        id: its name.
        place: operator, scan, method or part of a step that it is in.
        kind: one of `KINDS`.
        when: one of `WHEN`.
        file: path in the repository.
        old: text that occurs once in the file.
        new: its replacement.
        wrong: what is wrong, in a line.
        unchanged: the proof that no result changes by more than rounding; empty if one does.
    """

    id: str
    place: str
    kind: str
    when: str
    file: str
    old: str
    new: str
    wrong: str
    unchanged: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a judge said of a fault.

    Attributes:
        caught: whether it noticed.
        by: its first failure, or how long it did not end.
        seconds: until then.
    """

    caught: bool
    by: str
    seconds: float


def catalogue() -> list[Fault]:
    """All faults, in the order of the files."""
    paths = sorted((Path(__file__).parent / "faults").glob("*.toml"))
    return [Fault(**fields) for path in paths for fields in tomllib.loads(path.read_text())["fault"]]


def draw(faults: Sequence[Fault], number: int, seed: int) -> list[Fault]:
    """As many faults of each place as of any other, as far as there are, drawn without replacement."""
    generator, by_place = random.Random(seed), defaultdict(list)
    for fault in faults:
        by_place[fault.place].append(fault)
    for of_place in by_place.values():
        generator.shuffle(of_place)
    places = list(by_place)
    drawn: list[Fault] = []
    while len(drawn) < min(number, len(faults)):
        generator.shuffle(places)
        drawn += [by_place[place].pop() for place in places if by_place[place]]
    return sorted(drawn[:number], key=list(faults).index)


def faulty(fault: Fault, text: str) -> str:
    """The file's text with the fault.

    Raises:
        ValueError: the text that it replaces does not occur exactly once, or the result does not compile.
    """
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.id}: its old text occurs {count} times in {fault.file}")
    changed = text.replace(fault.old, fault.new)
    try:
        compile(changed, fault.file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{fault.id}: {fault.file} does not compile: {error}") from error
    return changed


class Copy:
    """A copy of the repository's tracked files in a folder, which it may change."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder / "tree", folder / "tmp"
        self.temporary.mkdir(parents=True)
        tracked = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", *_COPIED],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        for name in tracked:
            if (REPOSITORY / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(REPOSITORY / name, self.folder / name)
        # Runs write no bytecode: that of a fault could be taken for the next one's, by time and size.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "1", str(self.folder)], check=True)

    def replace(self, file: str, text: str) -> None:
        """Change a file."""
        path = self.folder / file
        path.write_text(text)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Inside, the copy has the fault."""
        text = (self.folder / fault.file).read_text()
        self.replace(fault.file, faulty(fault, text))
        try:
            yield
        finally:
            self.replace(fault.file, text)


def fork(copy: Copy, main: Callable[[], object], output: Path, environment: dict[str, str]) -> int:
    """Run `main` in a fork of this process, in the copy and with its modules; returns the process's number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        _become(copy, main, output, environment)
    finally:
        os._exit(70)


def _become(copy: Copy, main: Callable[[], object], output: Path, environment: dict[str, str]) -> NoReturn:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.chdir(copy.folder)
    own = {"PYTHONPATH": str(copy.folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    os.environ.update({**own, "TMPDIR": str(copy.temporary), **environment})
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(copy.folder), *(path for path in sys.path if Path(path or ".").resolve() != REPOSITORY)]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def wait(pids: Sequence[int], seconds: float, stop: Callable[[], bool]) -> list[int] | None:
    """Wait for processes: their exit codes, fewer if one failed or `stop` said so; None after so many seconds."""
    running, codes, deadline = list(pids), list[int](), time.monotonic() + seconds
    while running and not any(codes) and not stop():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
    return codes


def clear(copy: Copy, pids: Sequence[int]) -> None:
    """Kill what a judge has left: its processes, which have the copy's folders as working directories."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(copy.folder.parent):
                os.kill(int(link.parent.name), signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    shutil.rmtree(copy.temporary, ignore_errors=True)
    copy.temporary.mkdir()


class Verify:
    """The command `zeco_train.verify` on 2 ranks."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments, self.seconds = list(arguments), math.inf

    def run(self, copy: Copy, fault: Fault | None) -> Outcome:
        """Run it; without a fault, note how long it takes."""
        began, output = time.monotonic(), copy.folder.parent / "output"
        output.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pids = [
            fork(copy, self._main, output, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
        ]
        codes = wait(pids, _bound(self.seconds), lambda: "FAILED" in output.read_text() if output.exists() else False)
        clear(copy, pids)
        seconds = time.monotonic() - began
        if fault is None:
            self.seconds = seconds
        return Outcome(codes != [0, 0], _first_failure(output, codes), seconds)

    def _main(self) -> None:
        sys.argv = ["verify", *self._arguments]
        runpy.run_module("zeco_train.verify", run_name="__main__", alter_sys=True)


class Tests:
    """The tests that execute a fault's statement.

    Args:
        reached: fault → files of tests that execute its statement.
        seconds: of each file.
    """

    def __init__(self, reached: dict[str, list[str]], seconds: dict[str, float]) -> None:
        self._reached, self._seconds = reached, seconds

    def run(self, copy: Copy, fault: Fault | None) -> Outcome:
        """Run the tests of a fault, or all that any fault needs, until one fails twice."""
        files = set().union(*self._reached.values()) if fault is None else self._reached[fault.id]
        room = None if fault is None else own_room(fault)
        order = sorted(files, key=lambda file: (file.split("/")[1] != room, self._seconds[file]))
        if not order:
            return Outcome(False, "no test executes it", 0.0)
        began, left = time.monotonic(), [*order]
        bound = _bound(sum(self._seconds[file] for file in order))
        passed_again: list[str] = []
        while True:
            codes, output = self._run(copy, left, passed_again, bound - (time.monotonic() - began))
            failed = _failed_test(output)
            if codes in ([0], [5]) or failed is None or codes is None:
                break
            # Once more: it may have failed by the machine's load.
            again, second = self._run(copy, [failed], [], bound)
            if again != [0]:
                output = second if _failed_test(second) else output
                break
            passed_again.append(failed)
            left = left[[failed.split("::")[0] == file for file in left].index(True) :]
        by = "" if codes in ([0], [5]) else _first_failure(output, codes)
        return Outcome(codes not in ([0], [5]), by, time.monotonic() - began)

    def _run(self, copy: Copy, tests: list[str], left_out: list[str], seconds: float) -> tuple[list[int] | None, Path]:
        output = copy.folder.parent / "output"
        output.unlink(missing_ok=True)
        excluded = [f"--deselect={test}" for test in left_out]
        options = ["-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(copy.temporary / "pytest")]
        pid = fork(copy, lambda: _pytest([*options, *excluded, *tests], tests), output, {})
        codes = wait([pid], seconds, lambda: False)
        clear(copy, [pid])
        return codes, output


def _pytest(arguments: list[str], order: Sequence[str]) -> int:
    import pytest

    class Plugin:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            """In our order; and without the bound on CPU time, which a busy machine may exceed."""
            items.sort(key=lambda item: next(i for i, name in enumerate(order) if item.nodeid.startswith(name)))
            sys.modules["tests.conftest"].LIMIT = math.inf

    return int(pytest.main(arguments, plugins=[Plugin()]))


def own_room(fault: Fault) -> str:
    """The folder of tests of the code that a fault is in."""
    first, second, *_ = fault.file.split("/")
    return second if first == "zeco_train" else first


def map_tests(faults: Sequence[Fault], folder: Path, workers: int) -> dict[str, Any]:
    """Which files of tests execute each fault's statement, and how long each file takes.

    Raises:
        AssertionError: the tests fail without a fault.
    """
    copy = Copy(folder)
    by_file = defaultdict(list)
    for fault in faults:
        by_file[fault.file].append(fault)
    for file, of_file in by_file.items():
        copy.replace(file, _probed((copy.folder / file).read_text(), of_file))
    results, seen = folder / "results.xml", folder / "seen"
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-q", "-n", str(workers), "--dist", "loadfile"]
    command += ["-p", "no:cacheprovider", "--basetemp", str(copy.temporary / "pytest"), f"--junitxml={results}"]
    own = {"PYTHONPATH": str(copy.folder), "OMP_NUM_THREADS": "1", "ZECO_REACHED": str(seen)}
    own["TMPDIR"] = str(copy.temporary)
    code = subprocess.run([*command, *_rooms()], cwd=copy.folder, env={**os.environ, **own}).returncode
    clear(copy, [])
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        name = case.get("classname", "").split(".")
        seconds["/".join(name[:3]) + ".py"] += float(case.get("time", "0"))
    reached: dict[str, set[str]] = {fault.id: set() for fault in faults}
    for line in seen.read_text().splitlines():
        fault_id, test = line.split("\t")
        reached[fault_id].add(test.split("::")[0])
    assert code == 0, f"the tests fail without a fault: exit code {code}"
    return {"reached": {name: sorted(files) for name, files in reached.items()}, "seconds": dict(seconds)}


def _rooms() -> list[str]:
    return [f"tests/{room}" for room in ROOMS]


def _probed(text: str, faults: Sequence[Fault]) -> str:
    """The text with a call of `reached` before each fault's statement."""
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    before: dict[int, list[str]] = defaultdict(list)
    for fault in faults:
        first = text[: text.index(fault.old)].count("\n") + 1
        inside = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and node.lineno <= first <= (node.end_lineno or 0)
        ]
        # `elif` and decorated functions have no place right before them: then the statement around them.
        found = next(
            node
            for node in sorted(inside, key=lambda node: -node.lineno)
            if lines[node.lineno - 1].lstrip().startswith(("elif", "@")) is False
        )
        before[found.lineno].append(fault.id)
    probed = []
    for number, line in enumerate(lines, start=1):
        indentation = line[: len(line) - len(line.lstrip())]
        probed += [
            f'{indentation}__import__("tests.campaigns.reached", fromlist=["reached"]).reached("{name}")\n'
            for name in before[number]
        ]
        probed.append(line)
    return "".join(probed)


def _bound(seconds: float) -> float:
    return max(_LEAST_SECONDS, _BOUND * seconds) if math.isfinite(seconds) else 3600.0


def _failed_test(output: Path) -> str | None:
    lines = output.read_text(errors="replace").splitlines()
    found = [line.split(" ")[1] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return found[0] if found else None


def _first_failure(output: Path, codes: list[int] | None) -> str:
    if codes is None:
        return "did not end"
    lines = output.read_text(errors="replace").splitlines()
    signs = ("FAILED", "ERROR tests/", "error:")
    failures = [line for line in lines if any(sign in line for sign in signs)]
    rest = [line for line in lines if line.strip()]
    return (
        " ".join((failures or rest or ["no output"])[0 if failures else -1].split())[:240]
        if any(codes) or failures
        else ""
    )


def table(faults: Sequence[Fault], outcomes: dict[str, Outcome], of: str) -> str:
    """Counts by place, or by kind, of the faults that change a result."""
    rows = [f"{of:16}{'faults':>8}{'caught':>8}{'share':>8}"]
    counted = [fault for fault in faults if fault.id in outcomes and not fault.unchanged]
    groups = dict.fromkeys([getattr(fault, of) for fault in counted])
    for name in (*groups, "all"):
        members = [fault for fault in counted if name in ("all", getattr(fault, of))]
        caught = sum(outcomes[fault.id].caught for fault in members)
        rows.append(f"{name:16}{len(members):8}{caught:8}{caught / max(1, len(members)):8.0%}")
    return "\n".join(rows)


def grid(faults: Sequence[Fault]) -> str:
    """Numbers of faults by place and kind."""
    counts = Counter((fault.place, fault.kind) for fault in faults)
    rows = [f"{'':14}" + "".join(f"{kind:>14}" for kind in KINDS) + f"{'all':>6}"]
    for place in dict.fromkeys(fault.place for fault in faults):
        numbers = [counts[place, kind] for kind in KINDS]
        rows.append(f"{place:14}" + "".join(f"{number:14}" for number in numbers) + f"{sum(numbers):6}")
    sums = [sum(counts[place, kind] for place in {fault.place for fault in faults}) for kind in KINDS]
    return "\n".join([*rows, f"{'all':14}" + "".join(f"{number:14}" for number in sums) + f"{len(faults):6}"])


def main() -> int:
    """Run a campaign, and print its tables."""
    parser = argparse.ArgumentParser(description="plant faults, and see whether they are noticed")
    parser.add_argument("settings", nargs="*", help="of verify: KEY=VALUE")
    parser.add_argument("--list", action="store_true", help="print the grid, and the faults that would be planted")
    parser.add_argument("--judge", choices=["verify", "tests"], default="verify")
    parser.add_argument("--number", type=int, default=96, help="of faults drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="places, or faults, in place of a draw")
    parser.add_argument("--map", type=Path, help="JSON file of the map of tests; made if it does not exist")
    parser.add_argument("--workers", type=int, default=1, help="processes that make the map")
    parser.add_argument("--out", type=Path, help="JSON file of the results; outcomes in it are not repeated")
    options = parser.parse_args()
    faults = catalogue()
    print(f"{grid(faults)}\n", flush=True)
    chosen = draw(faults, options.number or len(faults), options.seed)
    if options.only:
        chosen = [fault for fault in faults if {fault.id, fault.place} & set(options.only)]
    if options.list:
        print("\n".join(f"{fault.id:34}{fault.kind:15}{fault.when:13}{fault.wrong}" for fault in chosen))
        return 0
    # Imported once, here: a fork has them. Not the project, which each fork imports from its copy.
    import hydra  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    outcomes: dict[str, Outcome] = {}
    if options.out is not None and options.out.exists():
        stored = json.loads(options.out.read_text())["faults"]
        outcomes = {row["id"]: Outcome(row["caught"], row["by"], row["seconds"]) for row in stored}
    with tempfile.TemporaryDirectory(prefix="zeco-mutants-") as name:
        folder = Path(name)
        copy = Copy(folder / "judged")
        judge: Verify | Tests
        if options.judge == "tests":
            if options.map is None or not options.map.exists():
                found = map_tests(faults, folder / "mapped", options.workers)
                if options.map is not None:
                    options.map.write_text(json.dumps(found, indent=1))
            else:
                found = json.loads(options.map.read_text())
            judge = Tests(found["reached"], found["seconds"])
        else:
            judge = Verify(options.settings)
        # The run that made the map was the tests' run without a fault.
        if isinstance(judge, Verify):
            control = judge.run(copy, None)
            print(f"without a fault: {control.by or 'passed'}, {control.seconds:.0f} s", flush=True)
            if control.caught:
                return 1
        for fault in chosen:
            if fault.id in outcomes:
                continue
            with copy.planted(fault):
                outcomes[fault.id] = judge.run(copy, fault)
            _print(fault, outcomes[fault.id])
            _write(options, chosen, outcomes)
    survivors = [fault for fault in chosen if not outcomes[fault.id].caught]
    for of in ("kind", "place", "when"):
        print(f"\n{table(chosen, outcomes, of)}")
    print("\nsurvivors:" + "".join(f"\n  {fault.id}: {fault.unchanged or fault.wrong}" for fault in survivors))
    return 0


def _print(fault: Fault, outcome: Outcome) -> None:
    verdict = "caught" if outcome.caught else "SURVIVED"
    print(f"{verdict:9}{outcome.seconds:6.0f} s  {fault.id:34}{outcome.by[:120]}", flush=True)


def _write(options: argparse.Namespace, chosen: Sequence[Fault], outcomes: dict[str, Outcome]) -> None:
    if options.out is None:
        return
    described = ("id", "place", "kind", "when")
    rows = [
        {**{name: getattr(fault, name) for name in described}, **asdict(outcomes[fault.id])}
        for fault in chosen
        if fault.id in outcomes
    ]
    settings = {"judge": options.judge, "settings": options.settings, "seed": options.seed}
    options.out.write_text(json.dumps({**settings, "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
