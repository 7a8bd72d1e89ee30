"""torchrun on a node of a Slurm job: unsigned state is never unpickled, where stores listen, exit codes."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from launch import slurm_node
from tests.support.commands import REPOSITORY
from tests.support.few import one_of
from tests.support.waiting import ENOUGH

# Prints which addresses listen on the store ports, and MASTER_ADDR.
RANK = """
import os
from pathlib import Path

port = int(os.environ["MASTER_PORT"])
for port in (int(os.environ["HEAD_PORT"]), port):
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    print(port, sorted(row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")))
print(os.environ["MASTER_ADDR"])
"""


@contextlib.contextmanager
def node(folder: Path, port: int, nodes: int = 1, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The first node of a job with one rank a node."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CACHE_DIR": str(folder / "cache"), **variables}
    environment |= {"TMPDIR": str(folder)}
    environment |= {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "HEAD_ADDRESS": "127.0.0.1", "HEAD_PORT": str(port)}
    environment |= {"RENDEZVOUS_ID": "a" * 32, "SLURMD_NODENAME": "n0"}
    (folder / "rank.py").write_text(RANK)
    sizes = ["--nodes", str(nodes), "--ranks", "1", "--output", str(folder), "--", str(folder / "rank.py")]
    command = [sys.executable, str(REPOSITORY / "launch" / "slurm_node.py"), *sizes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def connect(port: int) -> dist.TCPStore:
    """Connect, as one of two nodes, to a store that may not listen yet."""
    deadline = time.monotonic() + ENOUGH
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return dist.TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=20))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_what_others_write_into_the_rendezvous_is_not_unpickled(tmp_path: Path) -> None:
    """A foreign process, which knows the id of the rendezvous, writes in the place of the second node."""
    port, target = free_port(), tmp_path / "executed"
    with node(tmp_path, port, nodes=2) as process:
        store = dist.PrefixStore("a" * 32, connect(port))
        forged: Any = pickle.dumps(Payload(target))
        store.set("torchelastic/role_info/1", forged)
        _, errors = process.communicate(timeout=ENOUGH)
    assert not target.exists()
    assert process.returncode == 70
    assert errors.startswith(f"node 0 has no connection to the first one at 127.0.0.1:{port}: ")


@pytest.mark.slow
@pytest.mark.parametrize("interface", one_of(["lo", ""], "lo"))
def test_stores_listen_on_cluster_interface(interface: str, tmp_path: Path) -> None:
    port = free_port()
    with node(tmp_path, port, CLUSTER_INTERFACE=interface) as process:
        output, errors = process.communicate(timeout=ENOUGH)
    assert process.returncode == 0, output + errors
    assert not [*tmp_path.glob("torchelastic_*")]
    *stores, last = output.splitlines()
    for line in stores:
        listening = re.findall(r"'(\w+):\w+'", line)
        # 127.0.0.1, as the kernel writes it, or all addresses.
        assert listening == ["0100007F" if interface else "0" * 32], output
    assert len(stores) == 2
    if interface:
        assert last == "127.0.0.1"


@pytest.mark.parametrize(
    ("code", "written", "lines", "of_node"),
    [
        # The first rank to end may be a peer of the failed one, which has reported, here or on another node.
        (3, "", [], 103),
        (7, "", [], 70),
        (6, "", [], 70),
        (3, "error: a file: is gone\n", ["error: a file: is gone", "rank 1 on n0 ended with exit code 3"], 103),
        (1, "KeyError: ours\n", ["KeyError: ours", "rank 1 on n0 ended with exit code 1"], 70),
        (-9, "", ["rank 1 on n0 was ended by SIGKILL"], 70),
    ],
)
def test_node_reports_failed_rank_and_exit_code(
    code: int, written: str, lines: list[str], of_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    (tmp_path / "rank_0001.err").write_text(written)
    said, found = slurm_node._explain(1, code, range(2), tmp_path)
    assert ([line.partition("; its output")[0] for line in said], found) == (lines, of_node)


@pytest.mark.parametrize(
    ("name", "value"), [("CACHE_DIR", "/proc/cache"), ("CLUSTER_INTERFACE", "none0"), ("CLUSTER_INTERFACE", "x" * 16)]
)
def test_unusable_folder_or_interface_ends_job(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slurm_node.py", "--nodes", "1", "--ranks", "1", "--output", "o", "--", "x"])
    # `main` sets environment variables.
    with mock.patch.dict(os.environ, {"CACHE_DIR": str(tmp_path / "cache"), "SLURMD_NODENAME": "n0", name: value}):
        os.environ.pop("TRITON_CACHE_DIR", None)
        assert slurm_node.main() == 102
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name}={value}: ")
    assert line.endswith(" (on n0)")
