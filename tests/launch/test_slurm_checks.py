"""`launch/slurm_checks.py`: one finding per fault of a node, none for healthy nodes."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from launch.slurm_checks import Facts, gather, judge, send

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


def sound() -> dict[str, Facts]:
    fact = {
        "versions": {"python": "3.12.3", "torch": "2.11.0", "nccl": "2.28.9", "source": "abc"},
        "variables": {"NCCL_IB_HCA": "mlx5"},
        "cpus": 192,
        "gpus": [dict(GPU) for _ in range(8)],
        "throughput": [700.0 + number for number in range(8)],
        "free_gb": {"run_dir": 9000.0, "cache": 400.0, "/dev/shm": 500.0},
        "ranks": 8,
        "skew": 0.001,
    }
    return {node: copy.deepcopy(fact) for node in NODES}


def test_sound_nodes_have_no_findings() -> None:
    assert judge(sound(), NODES, uses_gpus=True) == []


def change(path: str, value: Any) -> Callable[[dict[str, Facts]], None]:
    """Fault of n2: replace the value at a path such as `gpus/3/name`."""

    def apply(facts: dict[str, Facts]) -> None:
        *sections, last = path.split("/", 2)
        place: Any = facts["n2"]
        for section in sections:
            place = place[int(section) if isinstance(place, list) else section]
        place[int(last) if isinstance(place, list) else last] = value

    return apply


@pytest.mark.parametrize(
    ("fault", "fatal", "text"),
    [
        (lambda facts: facts.pop("n2"), True, "unreachable: did not report in time"),
        (lambda facts: facts.update(n2={"problem": "OSError: libcudart.so"}), True, "OSError: libcudart.so"),
        (lambda facts: facts["n2"]["gpus"].pop(), True, "7 GPUs, 8 needed"),
        (change("gpus/0/driver_version", "535.0"), True, "driver 535.0/570.86.15, 3 nodes have 570.86.15"),
        (change("gpus/3/ecc.errors.uncorrected.volatile.total", "2"), True, "GPU 3: 2 uncorrected memory errors"),
        (change("gpus/3/mig.mode.current", "Enabled"), True, "GPU 3: MIG is on"),
        (change("gpus/3/memory.used", "61000"), False, "GPU 3: 61000 MiB in use by another process"),
        (change("gpus/5/clocks_throttle_reasons.hw_power_brake_slowdown", "Active"), False, "GPU 5: slowed down"),
        (change("gpus/5/power.limit", "450.00"), False, "power limit 450.00/700.00, 3 nodes have 700.00"),
        (change("gpus/5/clocks.max.sm", "1200"), False, "max SM clock 1200/1980, 3 nodes have 1980"),
        (change("throughput/6", 500.0), False, "GPU 6: 500 TFLOP/s in bf16, the median GPU of the job 703"),
        (change("versions/nccl", "2.21.5"), True, "nccl 2.21.5, 3 nodes have 2.28.9"),
        (change("versions/torch", "2.10.0"), True, "torch 2.10.0, 3 nodes have 2.11.0"),
        (change("versions/source", "def+"), True, "source def+, 3 nodes have abc"),
        (change("variables/NCCL_IB_HCA", "mlx4"), False, "NCCL_IB_HCA mlx4, 3 nodes have mlx5"),
        (change("variables/NCCL_DEBUG", "INFO"), False, "NCCL_DEBUG INFO, 3 nodes have None"),
        (change("free_gb/run_dir", 0.2), True, "run_dir: 0.2 GB free"),
        (change("free_gb/cache", 2.0), False, "cache: 2.0 GB free"),
        (change("free_gb/run_dir", None), True, "run_dir: does not exist there, or cannot be written"),
        (change("free_gb/cache", None), True, "cache: does not exist there, or cannot be written"),
        (change("cpus", 1), False, "1 CPUs for 8 ranks"),
        (change("skew", -40.0), False, "its clock is -40.0 s off the first node's"),
    ],
)
def test_each_fault_gives_one_finding(fault: Callable[[dict[str, Facts]], object], fatal: bool, text: str) -> None:
    facts = sound()
    fault(facts)
    (finding,) = judge(facts, NODES, uses_gpus=True)
    assert (finding.node, finding.fatal) == ("n2", fatal)
    assert finding.line.startswith(f"check: n2: {'error' if fatal else 'warning'}: {text}")


def test_different_gpu_model_is_reported() -> None:
    facts = sound()
    for gpu in facts["n2"]["gpus"]:
        gpu["name"] = "NVIDIA A100"
    (finding,) = judge(facts, NODES, uses_gpus=True)
    assert finding.line == ("check: n2: error: GPU NVIDIA A100, 3 nodes have NVIDIA H100 80GB HBM3")


def test_nodes_without_gpus_fail_only_gpu_jobs() -> None:
    facts = sound()
    for fact in facts.values():
        fact |= {"gpus": [], "throughput": []}
    assert {f.text for f in judge(facts, NODES, uses_gpus=True)} == {"0 GPUs, 8 needed"}
    assert judge(facts, NODES, uses_gpus=False) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "text", ["[1]", "null", '{"node": 3, "token": "job"}', '{"token": "job"}', '{"node": "x"}', "[" * 100_000, "\xff"]
)
def test_invalid_reports_are_ignored(text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    deadline = time.monotonic() + 60.0
    found: list[dict[str, Facts]] = []
    thread = threading.Thread(target=lambda: found.append(gather(port, "job", 1, deadline)))
    thread.start()
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as stranger:
                stranger.sendall(text.encode("latin-1") + b"\n")
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    send(("127.0.0.1", port), {"node": "n1", "token": "job"}, deadline)
    thread.join()
    assert [*found[0]] == ["n1"]
    assert "token" not in found[0]["n1"]


@pytest.mark.processes
def test_reports_are_gathered_with_clock_skew_until_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Long enough for the reports of this process to arrive.
    deadline = time.monotonic() + 8.0

    def report(node: str, token: str, ahead: float) -> None:
        facts = {"node": node, "token": token}
        send(("127.0.0.1", port), facts, deadline, clock=lambda: time.time() + ahead)

    reports = [("n1", "job", 0.0), ("n2", "job", 30.0), ("stranger", "another job", 0.0)]
    threads = [threading.Thread(target=report, args=arguments) for arguments in reports]
    # n3 never reports.
    for thread in threads:
        thread.start()
    facts = gather(port, "job", 3, deadline)
    for thread in threads:
        thread.join()
    assert set(facts) == {"n1", "n2"}
    # A report that waits for its turn on a busy machine looks late.
    assert abs(facts["n1"]["skew"]) < 8.0
    assert abs(facts["n2"]["skew"] - 30.0) < 8.0
    assert time.monotonic() >= deadline
    with pytest.raises(OSError, match="refused"):
        send(("127.0.0.1", port), {}, time.monotonic() + 0.1)
