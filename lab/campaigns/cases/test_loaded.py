"""Forked commands: modules, signals, times, settings and ends."""

from __future__ import annotations

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
from tests.system.test_loaded import ended, reports, script

pytestmark = pytest.mark.campaign


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
