"""`launch/slurm_checks.py`: one finding per fault of a node, none for healthy nodes."""

from __future__ import annotations

import copy
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch import slurm_checks
from tests.launch.test_slurm_node import free_port
from tests.support.commands import REPOSITORY

NODES = ["n0", "n1", "n2", "n3"]
GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "570.86.15",
    "uuid": "GPU-0",
    "memory.total": "81559",
    "memory.used": "4",
    "clocks.max.sm": "1980",
    "power.limit": "700.00",
    "mig.mode.current": "Disabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active",
}
Machine = dict[str, Any]
SOUND: Machine = {
    "installation": {
        "python": "3.12.3",
        "packages": {"torch": "2.11.0"},
        "commit": "abc",
        "variables": {"NCCL_IB_HCA": "mlx5"},
    },
    "nccl": (2, 28, 9),
    "cpus": 192,
    "gpus": [GPU] * 8,
    "rates": [700.0 + number for number in range(8)],
    "free": {"run": 9000.0, "cache": 400.0, "shm": 500.0},
}
NEED_GPUS = ["--ranks", "8", "--gpus"]


def run(*arguments: str, stdin: str = "") -> int:
    with mock.patch("sys.argv", ["slurm_checks.py", *arguments]), mock.patch("sys.stdin", io.StringIO(stdin)):
        return slurm_checks.main()


def records(node: str, machine: Machine, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a node prints whose machine has these facts."""
    facts: dict[str, Any] = {
        "installation": lambda: machine["installation"],
        "query_gpus": lambda _: machine["gpus"],
        "product_rates": lambda: machine["rates"],
        "free_gb": lambda path: machine["free"][path.name],
        "compare_clock": lambda *_: [("machine", "skew", 0.001)],
    }
    environment = {"SLURMD_NODENAME": node, "CACHE_DIR": "cache", "HEAD_ADDRESS": "n0", "HEAD_PORT": "20000"}
    with (
        mock.patch.multiple(slurm_checks, **facts),
        mock.patch.dict(os.environ, environment),
        mock.patch("os.sched_getaffinity", return_value=range(machine["cpus"])),
        mock.patch("torch.cuda.device_count", return_value=len(machine["gpus"])),
        mock.patch("torch.cuda.nccl.version", return_value=machine["nccl"]),
    ):
        assert run("node", "--run-dir", "run", *arguments) == 0
    return capsys.readouterr().out


def judged(printed: str, need: int, folder: Path) -> tuple[int, Any]:
    """Exit code and report of the judge."""
    report = folder / "checks.json"
    with mock.patch.dict(os.environ, {"NODE_NAMES": " ".join(NODES)}):
        code = run("judge", "--need", str(need), "--report", str(report), stdin=printed)
    return code, json.loads(report.read_text())


def change(path: str, value: Any) -> Callable[[Machine], None]:
    """Replace the value at a path such as `gpus/3/name`."""

    def apply(machine: Machine) -> None:
        *sections, last = path.split("/", 2)
        place: Any = machine
        for section in sections:
            place = place[int(section) if isinstance(place, list) else section]
        place[int(last) if isinstance(place, list) else last] = value

    return apply


def on_each_gpu(name: str, value: str) -> Callable[[Machine], None]:
    return lambda machine: [gpu.update({name: value}) for gpu in machine["gpus"]] and None


@pytest.mark.parametrize(
    ("fault", "is_fatal", "text"),
    [
        (lambda machine: machine.update(gpus=[]), True, "0 GPUs, 8 needed"),
        (lambda machine: machine["gpus"].pop(), True, "7 GPUs, 8 needed"),
        (lambda machine: machine.pop("rates"), True, "KeyError: 'rates'"),
        (on_each_gpu("name", "NVIDIA A100"), True, "GPU NVIDIA A100, 3 nodes have NVIDIA H100 80GB HBM3"),
        (change("gpus/0/driver_version", "535.0"), True, "driver 535.0/570.86.15, 3 nodes have 570.86.15"),
        (change("gpus/3/ecc.errors.uncorrected.volatile.total", "2"), True, "GPU 3: 2 uncorrected memory errors"),
        (change("gpus/3/mig.mode.current", "Enabled"), True, "GPU 3: MIG is on"),
        (change("gpus/3/memory.used", "61000"), False, "GPU 3: 61000 MiB in use by another process"),
        (change("gpus/5/clocks_throttle_reasons.hw_power_brake_slowdown", "Active"), False, "GPU 5: slowed down"),
        (change("gpus/5/power.limit", "450.00"), False, "power limit 450.00/700.00, 3 nodes have 700.00"),
        (change("gpus/5/clocks.max.sm", "1200"), False, "max SM clock 1200/1980, 3 nodes have 1980"),
        (change("rates/6", 500.0), False, "GPU 6: 500 TFLOP/s in bf16, the median GPU of the job 703"),
        (change("nccl", (2, 21, 5)), True, "nccl 2.21.5, 3 nodes have 2.28.9"),
        (change("installation/packages/torch", "2.10.0"), True, "torch 2.10.0, 3 nodes have 2.11.0"),
        (change("installation/commit", "def+"), True, "source def+, 3 nodes have abc"),
        (change("installation/variables/NCCL_IB_HCA", "mlx4"), False, "NCCL_IB_HCA mlx4, 3 nodes have mlx5"),
        (change("installation/variables/NCCL_DEBUG", "INFO"), False, "NCCL_DEBUG INFO, 3 nodes have None"),
        (change("free/run", 0.2), True, "run_dir: 0.2 GB free"),
        (change("free/cache", 2.0), False, "cache: 2.0 GB free"),
        (change("free/run", None), True, "run_dir: does not exist there, or cannot be written"),
        (change("free/cache", None), True, "cache: does not exist there, or cannot be written"),
        (change("free/shm", None), False, "/dev/shm: does not exist there, or cannot be written"),
        (change("cpus", 1), False, "1 CPUs for 8 ranks"),
    ],
)
def test_each_fault_gives_one_finding(
    fault: Callable[[Machine], object], is_fatal: bool, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = copy.deepcopy(SOUND)
    machine["gpus"] = [dict(gpu) for gpu in machine["gpus"]]
    fault(machine)
    printed = [records(node, machine if node == "n2" else SOUND, capsys, *NEED_GPUS) for node in NODES]
    code, report = judged("".join(printed), 4, tmp_path)
    (line,) = report["findings"]
    assert line.startswith(f"check: n2: {'error' if is_fatal else 'warning'}: {text}")
    assert (code, report["bad"]) == ((1, ["n2"]) if is_fatal else (0, []))


@pytest.mark.parametrize("arguments", [NEED_GPUS, ["--ranks", "8"]])
def test_sound_nodes_have_no_findings(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = judged("".join(records(node, SOUND, capsys, *arguments) for node in NODES), 4, tmp_path)
    assert (code, report["findings"], report["bad"]) == (0, [], [])
    summary = capsys.readouterr().out
    machine = (
        "8 × NVIDIA H100 80GB HBM3 81559 MiB, driver 570.86.15, nccl 2.28.9" if "--gpus" in arguments else "192 CPUs"
    )
    assert summary.startswith(f"check: 4 nodes with {machine}")
    assert summary.endswith("clocks within 1 ms; 0 findings, 0 nodes at fault\n")


def test_node_without_whole_report_is_unreachable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """n1 was killed while it printed; n3 printed nothing. Lines of others are passed on."""
    printed = [records(node, SOUND, capsys) for node in NODES[:3]]
    text = "".join([printed[0], "of a site's prolog\n", printed[1][:-10], "\n", printed[2]])
    assert judged(text, 2, tmp_path)[0] == 0
    code, report = judged(text, 3, tmp_path)
    assert (code, report["bad"]) == (1, ["n1", "n3"])
    assert report["findings"] == [f"check: {node}: error: unreachable: did not report in time" for node in ("n1", "n3")]
    assert "of a site's prolog\n" in capsys.readouterr().out


@pytest.mark.processes
def test_clock_is_compared_with_that_of_first_node() -> None:
    """Ahead, exact, of a server with other answers, or without any."""
    port = free_port()
    command = [sys.executable, str(REPOSITORY / "launch" / "slurm_checks.py"), "clock"]
    environment = {**os.environ, "HEAD_PORT": str(port - 1), "CLUSTER_INTERFACE": "lo"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.time()
        ((_, _, skew),) = slurm_checks.compare_clock("127.0.0.1", port, 60.0)
        with mock.patch("time.time", return_value=began + 40.0):
            (_, _, ahead), (kind, text, _) = slurm_checks.compare_clock("127.0.0.1", port, 60.0)
        process.kill()
    assert abs(skew) < 1.0
    assert abs(ahead - 40.0) < 1.0
    assert (kind, text) == ("warning", f"its clock is {ahead:+.1f} s off the first node's")
    with socket.create_server(("127.0.0.1", 0)) as other:
        for address in (("127.0.0.1", port), other.getsockname()):
            ((kind, text, _),) = slurm_checks.compare_clock(*address, 0.2)
            assert kind == "error"
            assert text.startswith(f"cannot reach the first node at {address[0]}:{address[1]}: ")
