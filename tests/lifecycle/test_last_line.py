"""What is last on the screen under torchrun, which prints a report of its own after its ranks have ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.lifecycle.test_end import fail_with
from tests.support.commands import REPOSITORY, SMALL, Command, is_running
from tests.support.few import one_of
from tests.support.waiting import ENOUGH
from zeco_train.errors import ConfigError
from zeco_train.lifecycle import end, watch
from zeco_train.lifecycle.end import Job
from zeco_train.lifecycle.join import Launch
from zeco_train.system import terminal

BORDER = "=" * 60


def _report(file: Path, code: int) -> list[str]:
    """What torchrun prints last, after rank 1 was killed by it and rank 0 has ended with an exit code."""
    failures = {0: ProcessFailure(0, 10, code, str(file)), 1: ProcessFailure(1, 11, -signal.SIGTERM, "none")}
    return ChildFailedError("train.py", failures).format_msg().splitlines()


def test_report_of_torchrun_ends_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    code = fail_with(ConfigError("train.steps", 0, "must be ≥ 1"), [])
    assert _report(file, code)[-2:] == ["  traceback : error: train.steps=0: must be ≥ 1", BORDER]
    # Of a bug it ends with the traceback.
    with pytest.raises(KeyError):
        fail_with(KeyError("ours"), [])
    report = _report(file, 1)
    assert report[-2:] == ["  KeyError: 'ours'", BORDER]
    assert "in command" in "\n".join(report)
    # Half a file would break torchrun's own end; nothing else is left.
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    # A file that cannot be written changes nothing.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert fail_with(ConfigError("field", 1, "must be 2"), []) == ConfigError.exit_code


def test_line_comes_again_when_the_launcher_has_ended() -> None:
    with subprocess.Popen(["sleep", "0.5"]) as launcher:
        command = [sys.executable, "-I", "-S", "-c", terminal._REPEAT, str(launcher.pid), "saved; it goes on\n"]
        began = time.monotonic()
        repeated = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, timeout=ENOUGH)
    assert repeated.stderr == "saved; it goes on\n"
    assert time.monotonic() - began >= 0.3
    # It may have ended before.
    late = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, timeout=ENOUGH)
    assert late.stderr == "saved; it goes on\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/venv/bin/python /venv/bin/torchrun --standalone train.py", True),
        ("python -m torch.distributed.run train.py", True),
        # Its agent, without its report.
        ("python launch/slurm_node.py --nodes 2 -- train.py name=torchrun", False),
        ("bash", False),
    ],
)
def test_line_comes_again_below_torchrun_only(command: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with (
        mock.patch.object(Path, "read_bytes", return_value=command.replace(" ", "\0").encode() + b"\0"),
        mock.patch.object(terminal.subprocess, "Popen") as started,
    ):
        for rank in (1, 0):
            Job(Launch(rank, 1, rank), mock.Mock()).report_stop("SIGTERM: saved")
        assert started.call_count == expected
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        terminal.repeat_below_launcher("SIGTERM: saved")
        assert started.call_count == expected


@pytest.mark.parametrize(("count", "most", "expected"), [("0", "0", False), ("0", "3", True), ("3", "3", False)])
def test_no_last_line_before_a_restart(count: str, most: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", most)
    assert watch._is_restarted() == expected


def _launched(folder: Path, setting: str, fault: str) -> Command:
    """By the name that a user gives it, which its ranks look for."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = REPOSITORY / ("tests/support/faulty_train.py" if fault else "train.py")
    settings = [*SMALL, "train.steps=1000000", "run_dir=run", *filter(None, [setting])]
    return Command([*launcher, str(script), *settings], folder, fault)


def _after_two_steps(act: Callable[[Command], object]) -> Callable[[Command], None]:
    def wait(job: Command) -> None:
        job.wait_until(lambda: "step       2/" in job.out, "two steps")
        assert len(job.ranks()) == 2
        act(job)

    return wait


def _kill_rank_1(job: Command) -> None:
    job.wait_until(lambda: len(job.ranks()) == 2, "two ranks")
    end.os.kill(job.ranks()[1], signal.SIGKILL)


_SAVED = ": saved; the same command goes on from there"
_LOST = "goes on from the last checkpoint"
_SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
# A setting, what happens then, the beginning and end of the last line, and the lines of torchrun below it.
ENDS = {
    "mistake": ("train.steps=0", None, "  traceback : error: train.steps=0: must be ≥ 1", "", 1),
    **{
        name: ("", _after_two_steps(partial(Command.signal, number=number)), f"{name} after step ", _SAVED, 0)
        for name, number in _SIGNALS.items()
    },
    "warning": ("", _after_two_steps(Command.warn), "SIGUSR1 after step ", _SAVED, 0),
    "killed": ("", _after_two_steps(_kill_rank_1), "error: rank 0: ", _LOST, 0),
    "bug": ("bug:1:3", None, "error: rank 0: step 3, ", _LOST, 0),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", one_of(ENDS, "SIGTERM", "bug"))
def test_last_line_and_exit_code_of_torchrun(name: str, tmp_path: Path) -> None:
    given, act, start, stop, below = ENDS[name]
    setting, fault = ("", given) if name == "bug" else (given, "")
    with _launched(tmp_path, setting, fault) as job:
        if act is not None:
            act(job)
        outcome = job.wait()
        # torchrun's own code, whatever those of its ranks are.
        assert outcome.code == 1, outcome
        deadline = time.monotonic() + ENOUGH
        while not (lines := job.err.splitlines())[-1 - below].startswith(start) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert lines[-1 - below].startswith(start), job.err
    assert lines[-1 - below].endswith(stop), job.err
    assert lines[len(lines) - below :] == [BORDER] * below
    assert name != "bug" or ": rank 1 failed: OSError: the disk is on fire; nothing more was saved" in lines[-1]
    # Ranks that were asked to end have saved the last step that they did, and no step is done twice.
    if stop == _SAVED:
        folder = tmp_path / "run"
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, steps[-1] + 1))
        assert lines[-1] == f"{start}{steps[-1]}{_SAVED}"
        assert (folder / "checkpoints" / "latest").readlink() == Path(f"step_{steps[-1]:08d}")
        assert outcome.errors == []
        assert not [rank for rank, process in job.ranks().items() if is_running(process)]
    # torchrun's traceback is above.
    assert any(line.startswith("Traceback (most recent call last)") for line in lines[:-2])
