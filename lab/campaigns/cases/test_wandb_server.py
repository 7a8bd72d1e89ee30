"""`logger.mode=online` with the real W&B client: without an account, and a server that stalls or is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lab.campaigns.cases.wandb_server import WandbServer
from tests.support.commands import REPOSITORY, SMALL
from tests.support.waiting import ENOUGH
from tests.tracking.test_loggers import history, offline, run_python
from zeco_train.tracking.metrics import read_metrics

# A fixture.
__all__ = ["offline"]
pytestmark = pytest.mark.campaign


@pytest.mark.processes
def test_wandb_online_without_account_is_refused(tmp_path: Path) -> None:
    arguments = ["train.device=cpu", "logger=wandb", "logger.mode=online", f"run_dir='{tmp_path}/run'"]
    done = run_python([str(REPOSITORY / "train.py"), *arguments], tmp_path)
    line = "error: logger.mode=online: W&B has no account here; wandb login, or mode offline\n"
    assert (done.returncode, done.stderr) == (2, line)


# Timeouts for the W&B service to start and finish; the short one is for a server that does not answer.
_PATIENCE = 100.0
_SHORT = 10.0


class Training:
    """`train.py` on one rank, tracked online."""

    def __init__(self, run_dir: Path, server: WandbServer, *overrides: str, patience: float = _PATIENCE) -> None:
        home = run_dir.parent / "home"
        home.mkdir(exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **server.environment(home)}
        online = ["logger=wandb", "logger.mode=online", f"logger.timeout_seconds={patience}", f"run_dir='{run_dir}'"]
        command = [sys.executable, str(REPOSITORY / "train.py"), *SMALL, "train.device=cpu", *online, *overrides]
        self.process = subprocess.Popen(
            command, env=environment, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        try:
            _, err = self.process.communicate(timeout=ENOUGH)
        finally:
            self.process.kill()
        return self.process.returncode, err


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.processes
def test_lost_wandb_connection_does_not_end_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with WandbServer() as server:
        assert Training(run_dir, server, "train.steps=2").end() == (0, "")
        (run_id,) = {start["name"] for start in server.started}
        assert [row["step"] for row in server.rows(run_id)] == [1, 2]

        known = len(server.started)
        training = Training(run_dir, server, "train.steps=4", patience=_SHORT)
        wait_until(lambda: len(server.started) > known)
        # Resumes the same run; from here on the server does not answer.
        server.answer_with = "stall"
        assert training.end() == (0, "")
        assert {start["name"] for start in server.started} == {run_id}
    *_, log = sorted(run_dir.glob(f"wandb/run-*/run-{run_id}.wandb"))
    assert [row["step"] for row in history(log)] == [3, 4]

    # Without a server the same run is tracked offline.
    code, warning = Training(run_dir, server, "train.steps=6", patience=_SHORT).end()
    assert code == 0
    assert warning.startswith("warning: W&B cannot be reached (")
    assert warning.count("\n") == 1
    (log,) = run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    assert [row["step"] for row in history(log)] == [5, 6]
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.processes
def test_wandb_sync_merges_both_starts_without_losing_a_row(offline: tuple[str, list[Path]], tmp_path: Path) -> None:
    run_id, files = offline
    with WandbServer() as server:
        folders = [str(file.parent) for file in files]
        synced = run_python(["-m", "wandb", "sync", *folders], tmp_path, **server.environment(tmp_path))
        assert synced.returncode == 0, synced.stderr
        assert [row["step"] for row in server.rows(run_id)] == [1, 2, 3, 4, 3, 4, 5]
        assert {start["name"] for start in server.started} == {run_id}


_ONLINE = """
import sys; from zeco_train.tracking.loggers import *; from zeco_train.tracking.metrics import *
config = LoggerConfig(kind=LoggerKind.wandb, mode=LoggerMode.online)
try:
    build_logger(config, sys.argv[1], 0).begin({}, Start(0, Layout("zeco", "gla_tiny", 1024, 1, 1), {}), None)
except ConfigError as error:
    print(error)
"""


class _Refuse(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(403)


@pytest.mark.processes
def test_refusing_wandb_server_gives_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with HTTPServer(("127.0.0.1", 0), _Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        account = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}
        done = run_python(["-c", _ONLINE, str(tmp_path / "run")], tmp_path, **account)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("logger.mode=online: W&B cannot start (")
    assert "403" in done.stdout
    assert done.stdout.count("\n") == 1
