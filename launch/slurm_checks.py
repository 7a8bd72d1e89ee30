"""Health check of a Slurm job's nodes, one task per node.

Usage: `srun … python launch/slurm_checks.py --ranks R …`

Each node collects its facts and sends them to the first, over the network that the ranks will use; the first evaluates
them and prints one line per finding. Versions and GPUs are compared with those of most nodes, so no reference values
are needed. Exit code 1 on the first node if too few healthy nodes remain to train.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.slurm_network import own_address, token
from zeco_train.system.environment import installation
from zeco_train.system.small_files import parse_json

Facts = dict[str, Any]

# Time for a node to start Python, collect its facts and reach the first node.
SECONDS_TO_REPORT = 120.0
SKEW_LIMIT_SECONDS = 2.0
DISK_LIMITS_GB = {"run_dir": (1.0, 50.0), "cache": (0.5, 5.0), "/dev/shm": (0.05, 1.0)}
# Threshold relative to the median GPU's throughput: one slower GPU holds up all others.
SLOW_SHARE = 0.9
_QUERY = (
    "name", "driver_version", "uuid", "memory.total", "memory.used", "clocks.max.sm", "power.limit", "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
)  # fmt: skip
# (Name in findings, nvidia-smi query, whether a difference is fatal.)
_COMPARED = (
    ("GPU", "name", True),
    ("GPU memory, MiB,", "memory.total", True),
    ("driver", "driver_version", True),
    ("power limit", "power.limit", False),
    ("max SM clock", "clocks.max.sm", False),
)
_MEMORY_IN_USE_MIB = 2000.0
# Limit for a node's facts, far more than 16 GPUs need.
_LONGEST_LINE = 1 << 22
_MATRIX = 8192


@dataclass(frozen=True)
class Finding:
    """`node`: empty for all nodes. `fatal`: the node must not be used."""

    node: str
    fatal: bool
    text: str

    @property
    def line(self) -> str:
        """The finding as a line for the user."""
        return f"check: {self.node or 'job'}: {'error' if self.fatal else 'warning'}: {self.text}"


def collect(run_dir: Path, cache: Path, ranks: int) -> Facts:
    """Collect this node's facts."""
    software = installation()
    versions = {"python": software["python"], **software["packages"], "source": software["commit"]}
    gpus = _gpus() if shutil.which("nvidia-smi") else []
    if gpus:
        import torch

        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        if torch.cuda.device_count() != len(gpus):
            raise RuntimeError(f"torch finds {torch.cuda.device_count()} GPUs, nvidia-smi {len(gpus)}")
    return {
        "versions": versions,
        "variables": {k: v for k, v in software["variables"].items() if k.startswith(("NCCL_", "TORCH_"))},
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "throughput": _throughput(len(gpus)) if gpus else [],
        "free_gb": {"run_dir": _free(run_dir), "cache": _free(cache), "/dev/shm": _free(Path("/dev/shm"))},
        "ranks": ranks,
    }


def judge(facts: dict[str, Facts], expected: list[str], uses_gpus: bool) -> list[Finding]:
    """Evaluate the facts of all nodes.

    Args:
        facts: by node, of those that reported; `skew` is its clock offset from the first node's, in seconds.
        expected: all nodes of the job.
        uses_gpus: whether each rank needs a GPU.
    """
    findings = [Finding(node, True, "unreachable: did not report in time") for node in expected if node not in facts]
    findings += [Finding(node, True, fact["problem"]) for node, fact in facts.items() if "problem" in fact]
    sound = {node: fact for node, fact in facts.items() if "problem" not in fact}
    for node, fact in sound.items():
        findings += _judge_disks(node, fact["free_gb"])
        if abs(fact.get("skew", 0.0)) > SKEW_LIMIT_SECONDS:
            text = f"its clock is {fact['skew']:+.1f} s off the first node's"
            findings.append(Finding(node, False, text))
        if fact["cpus"] < fact["ranks"]:
            text = f"{fact['cpus']} CPUs for {fact['ranks']} ranks (sbatch --exclusive, or more --cpus-per-task)"
            findings.append(Finding(node, False, text))
        if uses_gpus:
            findings += _judge_gpus(node, fact)
    for section, fatal in (("versions", True), ("variables", False)):
        for name in sorted({name for fact in sound.values() for name in fact[section]}):
            findings += _differences(name, {node: fact[section].get(name) for node, fact in sound.items()}, fatal)
    if uses_gpus:
        for name, key, fatal in _COMPARED:
            kinds = {node: sorted({gpu[key] for gpu in fact["gpus"]}) for node, fact in sound.items() if fact["gpus"]}
            findings += _differences(name, {node: "/".join(values) for node, values in kinds.items()}, fatal)
        findings += _slow_gpus(sound)
    return findings


def _judge_disks(node: str, free_gb: dict[str, float | None]) -> Iterable[Finding]:
    for name, (too_little, little) in DISK_LIMITS_GB.items():
        free = free_gb.get(name)
        if free is None:
            yield Finding(node, name in ("run_dir", "cache"), f"{name}: does not exist there, or cannot be written")
        elif free < little:
            yield Finding(node, free < too_little, f"{name}: {free:.1f} GB free")


def _judge_gpus(node: str, fact: Facts) -> Iterable[Finding]:
    if len(fact["gpus"]) < fact["ranks"]:
        yield Finding(node, True, f"{len(fact['gpus'])} GPUs, {fact['ranks']} needed")
    for number, gpu in enumerate(fact["gpus"]):
        if _number(gpu, "ecc.errors.uncorrected.volatile.total"):
            count = gpu["ecc.errors.uncorrected.volatile.total"]
            yield Finding(node, True, f"GPU {number}: {count} uncorrected memory errors since its last reset")
        if _number(gpu, "memory.used") > _MEMORY_IN_USE_MIB:
            yield Finding(node, False, f"GPU {number}: {gpu['memory.used']} MiB in use by another process")
        active = [name.rpartition(".")[2] for name in _QUERY if "throttle" in name and gpu.get(name) == "Active"]
        if active:
            yield Finding(node, False, f"GPU {number}: slowed down ({', '.join(active)})")
        if gpu.get("mig.mode.current") == "Enabled":
            yield Finding(node, True, f"GPU {number}: MIG is on")


def _differences(name: str, values: dict[str, Any], fatal: bool) -> Iterable[Finding]:
    """A finding for each node whose value differs from the most common one."""
    counts = Counter(values.values()).most_common(1)
    for node, value in values.items():
        if value != counts[0][0]:
            yield Finding(node, fatal, f"{name} {value}, {counts[0][1]} nodes have {counts[0][0]}")


def _slow_gpus(facts: dict[str, Facts]) -> Iterable[Finding]:
    every = [value for fact in facts.values() for value in fact["throughput"]]
    if not every:
        return
    middle = median(every)
    for node, fact in facts.items():
        for number, value in enumerate(fact["throughput"]):
            if value < SLOW_SHARE * middle:
                text = f"GPU {number}: {value:.0f} TFLOP/s in bf16, the median GPU of the job {middle:.0f}"
                yield Finding(node, False, text)


def _number(gpu: dict[str, str], name: str) -> float:
    try:
        return float(gpu[name])
    except (KeyError, ValueError):
        # "[N/A]": not supported by the device.
        return 0.0


def _gpus() -> list[dict[str, str]]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [[value.strip() for value in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows]


def _throughput(count: int) -> list[float]:
    """TFLOP/s of each GPU over about a second of large bf16 matmuls, on all GPUs at once, as in training."""
    import torch

    starts, ends, products = [], [], 200
    for number in range(count):
        with torch.cuda.device(number):
            a = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
            for _ in range(20):
                torch.mm(a, a)
            starts.append(torch.cuda.Event(enable_timing=True))
            ends.append(torch.cuda.Event(enable_timing=True))
            starts[-1].record()
            for _ in range(products):
                torch.mm(a, a)
            ends[-1].record()
    for end in ends:
        end.synchronize()
    operations = 2 * _MATRIX**3 * products
    return [operations / (s.elapsed_time(e) * 1e-3) / 1e12 for s, e in zip(starts, ends, strict=True)]


def _free(path: Path) -> float | None:
    """Free GB at `path` or its nearest existing parent; None if it is not writable."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 1e9 if os.access(path, os.W_OK) else None


def gather(port: int, token: str, expected: int, deadline: float, address: str = "") -> dict[str, Facts]:
    """On the first node: receive the other nodes' facts, and measure their clock offsets.

    Args:
        port: to listen on.
        token: of the job; messages with another token are ignored.
        expected: number of the other nodes.
        deadline: on the monotonic clock; nodes that have not reported by then are left out.
        address: to listen on; empty for all interfaces.

    Returns:
        The facts by node, with the clock offset `skew` in seconds.
    """
    facts: dict[str, Facts] = {}
    with socket.create_server((address, port), backlog=expected) as server:
        while len(facts) < expected and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            with connection:
                connection.settimeout(10.0)
                try:
                    message = _receive(connection, token)
                except (OSError, ValueError):
                    # Anybody can connect to the port: one bad message must not end the checks.
                    continue
                if message is not None:
                    facts[message["node"]] = message
    return facts


def _receive(connection: socket.socket, token: str) -> Facts | None:
    """Receive a node's facts, and read its clock five times over the same connection; the fastest answer counts."""
    with connection.makefile("rw", encoding="utf-8") as lines:
        message = parse_json(lines.readline(_LONGEST_LINE))
        match message:
            case {"node": str(), "token": str(given)} if hmac.compare_digest(given.encode(), token.encode()):
                del message["token"]
            case _:
                return None
        answers = []
        for _ in range(5):
            asked = time.time()
            lines.write("time?\n")
            lines.flush()
            theirs, now = float(lines.readline()), time.time()
            # The other node read its clock halfway through the round trip, give or take half of it.
            answers.append((now - asked, theirs - (asked + now) / 2))
        lines.write("done\n")
        lines.flush()
        message["skew"] = min(answers)[1]
        return message


def send(address: tuple[str, int], facts: Facts, deadline: float, clock: Callable[[], float] = time.time) -> None:
    """On the other nodes: send the facts to the first.

    Raises:
        OSError: it cannot be reached before `deadline`.
    """
    while True:
        try:
            connection = socket.create_connection(address, timeout=10.0)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    # The first node serves connections one after the other.
    connection.settimeout(max(10.0, deadline - time.monotonic()))
    with connection, connection.makefile("rw", encoding="utf-8") as lines:
        lines.write(json.dumps(facts) + "\n")
        lines.flush()
        while lines.readline() == "time?\n":
            lines.write(f"{clock()!r}\n")
            lines.flush()


def _summary(facts: dict[str, Facts], expected: int, bad: int, findings: int) -> str:
    known = next((fact for fact in facts.values() if "versions" in fact), None)
    if known is None:
        return f"check: {expected} nodes, none fit"
    versions = known["versions"]
    counts = Counter(f"{gpu['name']} {gpu['memory.total']} MiB" for gpu in known["gpus"])
    gpus = " + ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
    gpus = gpus or f"{known['cpus']} CPUs, no GPUs"
    parts = [f"{expected} nodes with {gpus}"] + [f"driver {g['driver_version']}" for g in known["gpus"][:1]]
    parts += [f"{name} {versions[name]}" for name in ("nccl", "torch", "triton", "python") if versions.get(name)]
    if known["throughput"]:
        parts.append(f"{median(v for f in facts.values() for v in f.get('throughput', [])):.0f} TFLOP/s a GPU")
    skew = max(abs(fact.get("skew", 0.0)) for fact in facts.values())
    return f"check: {', '.join(parts)}, clocks within {skew * 1e3:.0f} ms; {findings} findings, {bad} nodes at fault"


def _collect(options: argparse.Namespace) -> Facts:
    try:
        facts = collect(options.run_dir, Path(os.environ["CACHE_DIR"]), options.ranks)
    except Exception as error:  # any error becomes a finding of this node
        facts = {"problem": f"{type(error).__name__}: {(str(error).splitlines() or ['no details'])[0]}"}
    return facts | {"node": os.environ["SLURMD_NODENAME"], "token": token("checks")}


def _judge_job(options: argparse.Namespace, own: Facts, port: int, deadline: float) -> int:
    expected = os.environ["NODE_NAMES"].split()
    token = own.pop("token")
    facts = {own["node"]: own} | gather(port, token, len(expected) - 1, deadline, own_address() or "")
    findings = judge(facts, expected, options.gpus)
    for finding in findings:
        print(finding.line, flush=True)
    bad = sorted({finding.node for finding in findings if finding.fatal})
    print(_summary(facts, len(expected), len(bad), len(findings)), flush=True)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    report = {"bad": bad, "findings": [finding.line for finding in findings], "facts": facts}
    options.report.write_text(json.dumps(report, indent=2))
    return 0 if len(expected) - len(bad) >= options.need else 1


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description="is every node of a Slurm job fit to train?")
    parser.add_argument("--ranks", type=int, required=True, help="on each node")
    parser.add_argument("--gpus", action="store_true", help="each rank needs one")
    parser.add_argument("--need", type=int, required=True, help="nodes to train on")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True, help="what was found, as JSON")
    options = parser.parse_args()
    deadline = time.monotonic() + float(os.environ.get("CHECK_SECONDS", SECONDS_TO_REPORT))
    own = _collect(options)
    # Not the ranks' port, which must be free when they start.
    port = int(os.environ["HEAD_PORT"]) + 1
    if os.environ["SLURM_PROCID"] == "0":
        return _judge_job(options, own, port, deadline)
    try:
        send((os.environ["HEAD_ADDRESS"], port), own, deadline)
    except OSError as error:
        address = f"{os.environ['HEAD_ADDRESS']}:{port}"
        print(Finding(own["node"], True, f"cannot reach the first node at {address}: {error}").line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
