"""Commands that tests fork from a loaded process (tests/support/loaded.py) start, end and are seen as new processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Command, Outcome

# Nothing else in the fast set starts a loaded process, which imports for seconds.
pytestmark = [pytest.mark.processes, pytest.mark.slow]

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
