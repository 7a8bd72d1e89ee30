"""Errors in the launcher's environment variables, and missing packages: one line each."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

from tests.support.commands import REPOSITORY, check_line, train_here
from tests.support.waiting import ENOUGH
from zeco_train.distributed.mesh import Device, find_device
from zeco_train.errors import CommunicationError, ConfigError
from zeco_train.lifecycle import end
from zeco_train.lifecycle.join import Launch, await_listener

CONFIG, COMMUNICATION = ConfigError.exit_code, CommunicationError.exit_code
TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
COUNT = "must be a whole number ≥ 1 of at most 7 digits; start with torchrun"


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 1 of two; the test process must not end with its launcher."""
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(end, "die_with_launcher", mock.Mock())


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"MASTER_PORT": "x"}, "variable MASTER_PORT=x: must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "99999"}, "variable MASTER_PORT=99999: must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "٢٩٥٠٠"}, "variable MASTER_PORT=٢٩٥٠٠: must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "9" * 5000}, "must be a whole number from 1 to 65535"),
        ({"WORLD_SIZE": "0"}, f"variable WORLD_SIZE=0: {COUNT}"),
        ({"WORLD_SIZE": "9" * 5000}, COUNT),
        ({"RANK": "2"}, "variable RANK=2: must be < WORLD_SIZE=2; start with torchrun"),
        ({"LOCAL_WORLD_SIZE": "0"}, f"variable LOCAL_WORLD_SIZE=0: {COUNT}"),
        # An error on this rank only, which the node's first rank would not report.
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "variable LOCAL_RANK=3: must be < LOCAL_WORLD_SIZE=2"),
        ({"MASTER_ADDR": "host.invalid"}, "name the machine of rank 0 by its address"),
        ({"MASTER_ADDR": "a..b"}, "variable MASTER_ADDR=a..b: cannot be resolved on "),
        ({"MASTER_ADDR": "x" * 300}, "cannot be resolved on "),
    ],
)
def test_invalid_launch_variable_is_reported(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    check_line(train_here("parallel.timeout_seconds=300"), CONFIG, line)
    # Far below the timeout; a resolver without a network is slow.
    assert time.monotonic() - started < 60


def test_launch_without_local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Launch.from_environment() == Launch(1, 2, 1)


def test_local_rank_without_a_device_is_reported() -> None:
    """LOCAL_WORLD_SIZE is not set, so only the rank itself tells that there are too few."""
    problem = r"train\.device=cuda: 4 ranks on this machine, 2 CUDA devices"
    with mock.patch("torch.cuda.device_count", return_value=2), pytest.raises(ConfigError, match=problem):
        find_device(Device.cuda, Launch(3, 8, 3), "train.device")


def test_missing_rank_0_is_reported_after_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait until the timeout, then each reports the address and port it waited for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    outcome = train_here("parallel.timeout_seconds=1", "logger=none", f"run_dir={tmp_path / 'run'}")
    problem = f"no process listens at 127.0.0.1:{port} (Connection refused) within 1 s; start rank 0 there, "
    check_line(outcome, COMMUNICATION, "rank 1: joining the other ranks: ", problem)
    assert not any(tmp_path.iterdir())


def test_late_rank_0_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        assert await_listener(host, port, timedelta(0)) is not None
        monkeypatch.setattr("zeco_train.lifecycle.join.time.sleep", lambda seconds: server.listen())
        assert await_listener(host, port, timedelta(seconds=60)) is None


def _commands() -> list[list[str]]:
    """train.py and every module with a `__main__` block."""
    found = [["train.py"]]
    for path in sorted([*REPOSITORY.glob("zeco_train/**/*.py"), *REPOSITORY.glob("data/**/*.py")]):
        if re.search(r'^if __name__ == "__main__":', path.read_text(encoding="utf-8"), re.M):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            found.append(["-m", name.removesuffix(".__main__")])
    return found


@pytest.mark.slow
def test_missing_packages_are_reported_by_every_command(tmp_path: Path) -> None:
    """In a Python without them: the error names the package and the command that installs it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'numpy', 'matplotlib', 'omegaconf', 'hydra'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    commands = _commands()
    assert len(commands) >= 14
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=ENOUGH
        )
        if command == ["-m", "zeco_train.compare"] and "argument" in done.stderr:
            # matplotlib is imported last.
            continue
        if command in (["-m", "zeco_train.system.code_cache"], ["-m", "zeco_train"]):
            # They need no packages: the first prints a folder's name for batch scripts, the second the commands.
            assert done.returncode == 0, done.stderr
            continue
        assert done.returncode == CONFIG, (command, done.stderr)
        assert re.fullmatch(r"error: package=\w+: is not installed in [^\n]+\n", done.stderr), (command, done.stderr)
        assert "activate" in done.stderr or "pip install -e" in done.stderr
