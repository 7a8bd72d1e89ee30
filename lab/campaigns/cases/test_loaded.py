"""Commands that tests fork from a loaded process (tests/support/loaded.py) start, end and are seen as new processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import REPOSITORY, TORCHRUN, Command, Outcome, is_running
from tests.support.waiting import ENOUGH

pytestmark = [pytest.mark.campaign, pytest.mark.processes]

# What a process can see of its start.
REPORT = """
import json, os, random, resource, signal, sys, threading

handlers = {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())}
report = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name not in UNIQUE},
    "parent": os.getppid(),
    "leads_session": os.getsid(0) == os.getpid(),
    "signals": {number: text for number, text in handlers.items() if "SIG_DFL" not in text},
    "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": threading.active_count(),
    "descriptors": [number for number in range(3, 256) if os.path.exists(f"/proc/self/fd/{number}")],
    "stdout": [sys.stdout.encoding, sys.stdout.errors],
    "limits": resource.getrlimit(resource.RLIMIT_AS),
}
rank = os.environ.get("RANK", "alone")
name = f"report_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}_{rank}.json"
with open("part_" + name, "w") as file:
    json.dump(report, file)
os.replace("part_" + name, name)
print("random", random.random())
"""
# Of a launch, or of the shell that starts a fresh one.
UNIQUE = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
UNIQUE |= {"PWD", "OLDPWD", "SHLVL", "_"}
# Ends that a launcher, or a test, tells apart.
ENDS = {
    "return": ("", 0),
    "code": ("sys.exit(7)", 7),
    "large": ("sys.exit(256 + 3)", 3),
    "text": ("sys.exit('bad luck')", 1),
    "error": ("1 / 0", 1),
    "now": ("os._exit(9)", 9),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "crash": ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
    "interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "exits": ("import atexit; atexit.register(print, 'at exit')", 0),
    "thread": ("threading.Thread(target=lambda: print('thread', flush=True)).start()", 0),
}


def script(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "reports.py"
    path.write_text("\n".join((f"UNIQUE = {UNIQUE}", REPORT, *lines)) + "\n")
    return path


def reports(folder: Path, parent: int) -> dict[str, Any]:
    """By name. Of this process or a launcher, they are children."""
    texts = {path.name: path.read_text() for path in folder.glob("report_*.json")}
    found = {name: json.loads(text.replace(str(folder), "FOLDER")) for name, text in texts.items()}
    assert {report.pop("parent") for report in found.values()} <= {parent}
    return found


def ended(command: Command, folder: Path) -> Outcome:
    """How it ended, without what differs between two runs."""
    outcome = command.wait()
    out = [line for line in outcome.out.splitlines() if not line.startswith("random")]
    return Outcome(outcome.code, "\n".join(out), outcome.err.replace(str(folder), "FOLDER"))


def test_fork_sees_and_ends_as_fresh_process(tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {"fork": {}, "fresh": {}}
    for name, (line, code) in ENDS.items():
        for which, ends in found.items():
            path = script(tmp_path / f"{which}_{name}", line)
            command = [sys.executable, str(path), "one", "two words"]
            with Command(command, path.parent, fault="none", fresh=which == "fresh") as running:
                ends[name] = (ended(running, path.parent), reports(path.parent, os.getpid()))
            assert ends[name][0].code == code, (which, name)
    for name in ENDS:
        assert found["fork"][name] == found["fresh"][name], name
    assert "ZeroDivisionError" in found["fork"]["error"][0].err
    assert found["fork"]["return"][1]["report_0_alone.json"]["argv"][1:] == ["one", "two words"]


def kind(command: Command) -> str:
    """Forks have no program of their own."""
    return "fork" if b"tests.support" in Path(f"/proc/{command.pid}/cmdline").read_bytes() else "fresh"


def test_module_runs_as_in_fresh_process(tmp_path: Path) -> None:
    """Of the working directory, which comes first in the path."""
    found = []
    for fresh in (False, True):
        path = script(tmp_path / str(fresh), "sys.exit(5)")
        with Command([sys.executable, "-m", path.stem, "-x", "y=z"], path.parent, fresh=fresh) as command:
            found.append((ended(command, path.parent), reports(path.parent, os.getpid())))
    assert found[0] == found[1]
    assert found[0][0].code == 5


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL) received"),
        ("sys.exit(7)", "(exitcode: 7)"),
    ],
)
def test_launcher_reports_codes_and_signals_of_forked_ranks(line: str, shown: str, tmp_path: Path) -> None:
    outcome, _ = launched(tmp_path, [f"os.environ['RANK'] == '1' and {line}"], False)
    assert outcome.code == 1
    assert shown in outcome.err


def test_signal_of_launcher_reaches_forked_ranks(tmp_path: Path) -> None:
    """SIGUSR1 is ignored by the launcher and its ranks; SIGTERM to the launcher ends its ranks."""
    with Command([*launcher(tmp_path, "signal.pause()")], tmp_path) as command:
        command.wait_until(lambda: len(reports(tmp_path, command.pid)) == 2, "reports")
        assert kind(command) == "fork"
        assert command.ranks().keys() == {0, 1}
        ranks = list(command.ranks().values())
        command.warn()
        command.signal(signal.SIGTERM)
        assert command.wait().code == 1
        assert not any(map(is_running, ranks))


def launcher(folder: Path, *lines: str) -> list[str]:
    return [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script(folder, *lines))]


def wait_for_end(processes: list[int]) -> None:
    deadline = time.monotonic() + ENOUGH
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_leaving_the_block_ends_forked_ranks(tmp_path: Path) -> None:
    with Command(launcher(tmp_path, "signal.pause()"), tmp_path) as command:
        command.wait_until(lambda: len(reports(tmp_path, command.pid)) == 2, "reports")
        processes = [command.pid, *command.ranks().values()]
        assert all(map(is_running, processes))
    wait_for_end(processes)


def test_cpu_time_of_forked_ranks_counts_as_of_children(tmp_path: Path) -> None:
    """Once: by their launcher, whose time is added when it is waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome, _ = launched(tmp_path, ["import time", "while time.process_time() < 1: pass"], False)
    assert outcome.code == 0, outcome
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 2 <= after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4


def test_other_settings_of_imports_need_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, "signal.pause()")
    cases = {"ZECO_ANY": "fork", "TORCH_FR_BUFFER_SIZE": "fork", "TRITON_INTERPRET": "fresh"}
    for variable, expected in cases.items():
        monkeypatch.setenv(variable, "1")
        with Command([sys.executable, str(path)], tmp_path) as command:
            command.wait_until((tmp_path / "report_0_alone.json").exists, "report")
            assert kind(command) == expected
            [report] = reports(tmp_path, os.getpid()).values()
            assert report["environment"][variable] == "1"
        (tmp_path / "report_0_alone.json").unlink()


OWNER = """
import os, signal
from tests.support.loaded import loaded
print(loaded().pid, flush=True)
END
"""


@pytest.mark.parametrize("end", [pytest.param("", marks=pytest.mark.campaign), "os.kill(os.getpid(), signal.SIGKILL)"])
def test_loaded_process_ends_with_its_owner(end: str, tmp_path: Path) -> None:
    program = OWNER.replace("END", end)
    # Not through pipes, which the loaded process would hold.
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, stdout=out, timeout=ENOUGH, check=not end)
    pid = int((tmp_path / "out").read_text())
    wait_for_end([pid])


def launched(folder: Path, lines: list[str], fresh: bool, *options: str) -> tuple[Outcome, dict[str, Any]]:
    path = script(folder, *lines)
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *options, str(path), "a=b"]
    with Command(launcher, folder, fresh=fresh) as command:
        return command.wait(), reports(folder, command.pid)


def test_ranks_and_restarts_equal_those_of_fresh_launcher(tmp_path: Path) -> None:
    """The first attempt fails by a signal on rank 1, once rank 0 has reported, too; the second one passes."""
    lines = [
        "import time",
        "is_first = name.startswith('report_0')",
        "if is_first and rank == '0':",
        "    sys.stdout.flush()",
        "    open('reported', 'w').close()",
        "while is_first and not (rank == '1' and os.path.exists('reported')):",
        "    time.sleep(0.02)",
        "if is_first:",
        "    os.kill(os.getpid(), signal.SIGKILL)",
    ]
    found = [launched(tmp_path / str(fresh), lines, fresh, "--max-restarts=1") for fresh in (False, True)]
    assert [outcome.code for outcome, _ in found] == [0, 0], found
    assert found[0][1] == found[1][1]
    assert found[0][1].keys() == {f"report_{attempt}_{rank}.json" for attempt in range(2) for rank in range(2)}
    numbers = [line for line in found[0][0].out.splitlines() if line.startswith("random")]
    assert len({*numbers}) == len(numbers) == 4
