"""How a command ends: expected errors give one line and an exit code, unexpected ones a traceback."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import Command
from zeco_train.errors import CommunicationError, ConfigError, DataError, OutOfMemoryError, ZecoError
from zeco_train.lifecycle import end, join, watch
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.lifecycle.join import Launch, launcher_store
from zeco_train.lifecycle.watch import Watchdog

ADVICE = Advice("the rest is lost", "less needs less", "patience")


def fail_with(error: BaseException, closed: list[str]) -> int:
    def command(running: Job) -> int:
        running.closing.callback(closed.append, "closed")
        running.enter("thinking")
        raise error

    return run_job(command, ADVICE)


@pytest.mark.few(quick=1)
@pytest.mark.processes
@pytest.mark.parametrize("name", ["evaluate", "generate", "export"])
def test_interrupt_during_torch_import_is_silent(name: str, tmp_path: Path) -> None:
    # Background jobs of a script ignore SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Command([sys.executable, "-m", f"zeco_train.{name}", "nowhere", "out"], tmp_path, fresh=True) as command:
        maps = Path(f"/proc/{command.pid}/maps")
        command.wait_until(lambda: "libtorch" in maps.read_text(), "import")
        command.signal(signal.SIGINT)
        outcome = command.wait()
    # Exit code 130 in a shell.
    assert (outcome.code, outcome.out, outcome.err) == (-signal.SIGINT, "", "")


def test_return_value_is_exit_code_and_closing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []

    def command(running: Job) -> int:
        running.closing.callback(closed.append, "closed")
        return 1

    assert run_job(command, ADVICE) == 1
    assert closed == ["closed"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("field", 1, "must be\n 2"), ConfigError.exit_code, "field=1: must be 2"),
        *(
            (error, OutOfMemoryError.exit_code, f"rank 0: thinking: out of memory ({text}); less needs less")
            for error, text in (
                (torch.OutOfMemoryError("Tried 2 GiB\nmore"), "Tried 2 GiB"),
                (MemoryError(), "no details"),
                (RuntimeError("DefaultCPUAllocator: can't allocate memory"),) * 2,
                (RuntimeError("NCCL error: unhandled cuda error, out of memory"),) * 2,
            )
        ),
    ],
)
def test_expected_errors_print_one_line_and_set_exit_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    assert fail_with(error, closed) == code
    assert closed == ["closed"]
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_unexpected_errors_are_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError):
        fail_with(KeyError("ours"), [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("joined", [False, True])
def test_ctrl_c_and_closed_stdout_end_command_silently(
    joined: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and `| head`: no output, and the exit codes 130 and 141."""
    monkeypatch.setattr(end.signal, "signal", mock.Mock())
    monkeypatch.setattr(end.dist, "is_initialized", lambda: joined)
    reading, writing = os.pipe()
    os.close(reading)
    with mock.patch.object(end.os, "_exit", side_effect=SystemExit) as leave, os.fdopen(writing, "w") as unread:
        for error, code in ((KeyboardInterrupt(), 130), (BrokenPipeError(), 141)):
            closed: list[str] = []
            monkeypatch.setattr(end.sys, "stdout", unread)
            if joined:
                with pytest.raises(SystemExit):
                    fail_with(error, closed)
                leave.assert_called_with(code)
            else:
                assert fail_with(error, closed) == code
            assert closed == ["closed"]
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


def test_broken_pipe_other_than_stdout_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as read:
        monkeypatch.setattr(end.sys, "stdout", read)
        with pytest.raises(BrokenPipeError):
            fail_with(BrokenPipeError(), [])


def test_lost_peer_ends_process_without_closing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process exits at once, without running the closing callbacks."""
    closed: list[str] = []
    monkeypatch.setattr(end.signal, "signal", mock.Mock())
    with mock.patch.object(end.os, "_exit", side_effect=SystemExit) as leave, pytest.raises(SystemExit):
        fail_with(RuntimeError("[gloo] Connection closed by peer"), closed)
    leave.assert_called_once_with(6)
    assert closed == []
    assert capsys.readouterr().err == "error: rank 0: thinking: [gloo] Connection closed by peer\n"


@pytest.mark.parametrize(("joined", "speaks"), [(False, True), (True, False)])
def test_rank_failing_alone_waits_and_reports_unless_joined(
    joined: bool, speaks: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a launcher's store: the rank waits for rank 0, then reports unless the ranks had joined."""
    waits: list[float] = []
    monkeypatch.setattr(end, "time", SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits)))
    monkeypatch.setattr(end.dist, "is_initialized", lambda: joined)
    with mock.patch.object(end.os, "_exit") as leave:
        code = Job(Launch(1, 2, 1), ADVICE).fail(ZecoError("alone"))
    assert code == 1
    assert leave.called == joined
    assert sum(waits) == (2.0 if joined else 22.0)
    assert capsys.readouterr().err == ("error: alone\n" if speaks else "")


def test_rank_ends_once_rank_0_has_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(end, "launcher_store", lambda launch: store)
    waits: list[float] = []
    monkeypatch.setattr(end.time, "sleep", waits.append)
    assert Job(Launch(0, 2, 0), ADVICE).fail(ZecoError("all alike")) == 1
    assert waits == []
    assert Job(Launch(1, 2, 1), ADVICE).fail(ZecoError("all alike")) == 1
    assert sum(waits) == 2.0
    assert capsys.readouterr().err == "error: all alike\n"


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("a file", "is gone"), DataError.exit_code), (KeyError("ours"), 6)]
)
def test_peers_end_with_exit_code_of_failed_rank(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the failed rank is still closing; the first exit code decides whether a restart would help."""
    store = dist.HashStore()
    monkeypatch.setattr(end, "launcher_store", lambda launch: store)
    monkeypatch.setattr(end.time, "sleep", mock.Mock())
    failing, peer = (Job(Launch(rank, 2, rank), ADVICE) for rank in (1, 0))
    told: list[CommunicationError] = []
    failing.closing.callback(lambda: told.append(peer.watchdog.diagnose(RuntimeError("late"))))
    failing.fail(error)
    failing.closing.close()
    assert [peer.exit_code for peer in told] == [code]
    assert "rank 1 failed: " in str(told[0])


def test_closed_terminal_does_not_change_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.tqdm, "write", mock.Mock(side_effect=BrokenPipeError))
    assert fail_with(ConfigError("field", 1, "must be 2"), []) == ConfigError.exit_code


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "0"}, "variable RANK=0: is set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT not: start with torchrun"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "variable RANK=x: must be a"),
    ],
)
def test_incomplete_launcher_variables_are_refused(
    variables: dict[str, str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = mock.Mock()
    assert run_job(command, ADVICE) == ConfigError.exit_code
    assert not command.called
    assert capsys.readouterr().err.startswith(f"error: {line}")


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_unreachable_launcher_store_is_reported_once_per_node(
    local_rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow node finds the store closed after the first node has failed; one rank of the node reports it."""
    launcher = {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in {**launcher, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(end, "die_with_launcher", mock.Mock())
    monkeypatch.setattr(join, "_STORE_TIMEOUT", timedelta(0))
    assert run_job(mock.Mock(), ADVICE) == CommunicationError.exit_code
    line = "error: rank 9: start: the launcher's store at localhost:1 cannot be reached; its node may be gone\n"
    assert capsys.readouterr().err == (line if local_rank == "0" else "")


def test_attempts_of_a_launcher_share_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives its ranks: addresses of those before a restart must not be found."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in {**address, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    stores = []
    for attempt in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(launcher_store(Launch(0, 2, 0)))
    first, same, second = stores
    assert first is not None
    assert same is not None
    assert second is not None
    first.set("address", "old")
    assert (same.check(["address"]), second.check(["address"])) == (True, False)


def test_joining_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo applies the time-out to each of its tries, so it may take several times as long."""
    ended: list[CommunicationError] = []
    monkeypatch.setattr(Watchdog, "abandon", lambda self, error: ended.append(error))
    monkeypatch.setattr(end, "SILENCE_SECONDS", 0.1)
    with Job(Launch(0, 1, 0), ADVICE).joining(timedelta(seconds=0.1)):
        while not ended:
            time.sleep(0.01)
    with Job(Launch(0, 1, 0), ADVICE).joining(timedelta(seconds=0.1)):
        pass
    time.sleep(0.3)
    assert [str(error) for error in ended] == ["rank 0: joining the other ranks: not done within 0.1 s"]


def test_world_size_without_rank_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Launch.from_environment() == Launch(0, 1, 0)
