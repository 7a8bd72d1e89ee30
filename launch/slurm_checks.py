"""Health check of a Slurm job's nodes, one task per node: `srun … python launch/slurm_checks.py --ranks R …`.

Each node sends its facts to the first over the network that the ranks will use. The first compares them with those of
most nodes, prints one line per finding, and ends with exit code 1 if too few healthy nodes remain to train. `--address`
only prints this node's address on CLUSTER_INTERFACE.

The batch script passes a new RENDEZVOUS_KEY for each start in the environment of its steps, which only the user and
root can read. The key itself is never sent; reports carry a token made with it.
"""

from __future__ import annotations

import argparse
import fcntl
import hmac
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zeco_train.errors import ConfigError
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.environment import installation
from zeco_train.system.small_files import parse_json

Facts = dict[str, Any]

# Time for a node to start Python, collect its facts and reach the first node.
SECONDS_TO_REPORT = 120.0
SKEW_LIMIT_SECONDS = 2.0
# Free GB below which a node is not used, and below which it is reported.
DISK_LIMITS_GB = {"run_dir": (1.0, 50.0), "cache": (0.5, 5.0), "/dev/shm": (0.05, 1.0)}
# Of the median GPU's throughput: one slower GPU holds up all others.
SLOW_SHARE = 0.9
_MEMORY_IN_USE_MIB = 2000
_ECC_ERRORS = "ecc.errors.uncorrected.volatile.total"
_THROTTLE = tuple(
    f"clocks_throttle_reasons.{name}"
    for name in ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
)
# Queries of nvidia-smi that nodes are compared by: (name in findings, whether a difference is fatal).
_COMPARED = {
    "name": ("GPU", True),
    "memory.total": ("GPU memory, MiB,", True),
    "driver_version": ("driver", True),
    "power.limit": ("power limit", False),
    "clocks.max.sm": ("max SM clock", False),
}
_QUERY = (*_COMPARED, "uuid", "memory.used", "mig.mode.current", _ECC_ERRORS, *_THROTTLE)
# Limit for a node's facts, far more than 16 GPUs need.
_LONGEST_LINE = 1 << 22
_SIOCGIFADDR = 0x8915


class Finding(NamedTuple):
    """`fatal`: the node must not be used."""

    node: str
    fatal: bool
    text: str

    @property
    def line(self) -> str:
        """For the user."""
        return f"check: {self.node}: {'error' if self.fatal else 'warning'}: {self.text}"


def own_address() -> str | None:
    """This node's IPv4 address on CLUSTER_INTERFACE, None if that is not set; `ConfigError` if it has none."""
    name = os.environ.get("CLUSTER_INTERFACE", "")
    if not name:
        return None
    try:
        # A struct ifreq of 64-bit Linux: 16 bytes of the name with its closing NUL, then the sockaddr.
        if len(os.fsencode(name)) > 15:
            raise OSError("longer than 15 bytes")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("40s", os.fsencode(name)))
    except OSError as error:
        problem = f"no interface with an IPv4 address on this node ({error.strerror or error})"
        raise ConfigError("CLUSTER_INTERFACE", name, problem) from error
    return socket.inet_ntoa(answer[20:24])


def _collect(run_dir: Path, cache: Path, ranks: int) -> Facts:
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
    """Findings about all `expected` nodes, from the facts of those that reported, by node."""
    findings = [Finding(node, True, "unreachable: did not report in time") for node in expected if node not in facts]
    findings += [Finding(node, True, fact["problem"]) for node, fact in facts.items() if "problem" in fact]
    sound = {node: fact for node, fact in facts.items() if "problem" not in fact}
    middle = median([value for fact in sound.values() for value in fact["throughput"]] or [0.0])
    compared = []
    for section, fatal in (("versions", True), ("variables", False)):
        for name in sorted({name for fact in sound.values() for name in fact[section]}):
            compared.append((name, fatal, {node: fact[section].get(name) for node, fact in sound.items()}))
    for node, fact in sound.items():
        findings += [Finding(node, *found) for found in _judge_node(fact)]
        findings += [Finding(node, *found) for found in (_judge_gpus(fact, middle) if uses_gpus else ())]
    for key, (name, fatal) in _COMPARED.items() if uses_gpus else ():
        kinds = {node: sorted({gpu[key] for gpu in fact["gpus"]}) for node, fact in sound.items() if fact["gpus"]}
        compared.append((name, fatal, {node: "/".join(values) for node, values in kinds.items()}))
    for name, fatal, by_node in compared:
        for usual, count in Counter(by_node.values()).most_common(1):
            text = f"{count} nodes have {usual}"
            findings += [Finding(n, fatal, f"{name} {value}, {text}") for n, value in by_node.items() if value != usual]
    return findings


def _judge_node(fact: Facts) -> Iterator[tuple[bool, str]]:
    for name, (too_little, little) in DISK_LIMITS_GB.items():
        free = fact["free_gb"].get(name)
        if free is None:
            yield name in ("run_dir", "cache"), f"{name}: does not exist there, or cannot be written"
        elif free < little:
            yield free < too_little, f"{name}: {free:.1f} GB free"
    if abs(fact.get("skew", 0.0)) > SKEW_LIMIT_SECONDS:
        yield False, f"its clock is {fact['skew']:+.1f} s off the first node's"
    if fact["cpus"] < fact["ranks"]:
        yield False, f"{fact['cpus']} CPUs for {fact['ranks']} ranks (sbatch --exclusive, or more --cpus-per-task)"


def _judge_gpus(fact: Facts, median_throughput: float) -> Iterator[tuple[bool, str]]:
    if len(fact["gpus"]) < fact["ranks"]:
        yield True, f"{len(fact['gpus'])} GPUs, {fact['ranks']} needed"
    for number, gpu in enumerate(fact["gpus"]):
        # "[N/A]": not supported by the device.
        errors, used = (int(gpu[name]) if gpu[name].isdigit() else 0 for name in (_ECC_ERRORS, "memory.used"))
        if errors:
            yield True, f"GPU {number}: {errors} uncorrected memory errors since its last reset"
        if used > _MEMORY_IN_USE_MIB:
            yield False, f"GPU {number}: {used} MiB in use by another process"
        if active := [name.rpartition(".")[2] for name in _THROTTLE if gpu.get(name) == "Active"]:
            yield False, f"GPU {number}: slowed down ({', '.join(active)})"
        if gpu.get("mig.mode.current") == "Enabled":
            yield True, f"GPU {number}: MIG is on"
    for number, rate in enumerate(fact["throughput"]):
        if rate < SLOW_SHARE * median_throughput:
            text = f"{rate:.0f} TFLOP/s in bf16, the median GPU of the job {median_throughput:.0f}"
            yield False, f"GPU {number}: {text}"


def _gpus() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [[value.strip() for value in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows]


def _throughput(count: int) -> list[float]:
    # TFLOP/s of each GPU over about a second of large bf16 matmuls, on all GPUs at once, as in training.
    import torch

    size, warm_up, products = 8192, 20, 200
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for number, (start, end) in enumerate(events):
        with torch.cuda.device(number):
            a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
            for product in range(warm_up + products):
                if product == warm_up:
                    start.record()
                torch.mm(a, a)
            end.record()
    for _, end in events:
        end.synchronize()
    return [2e-12 * size**3 * products / (1e-3 * start.elapsed_time(end)) for start, end in events]


def _free(path: Path) -> float | None:
    # Free GB at `path` or its nearest existing parent; None if it is not writable.
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 1e9 if os.access(path, os.W_OK) else None


def gather(port: int, token: str, expected: int, deadline: float, address: str = "") -> dict[str, Facts]:
    """On the first node: the facts of other nodes, with `skew`, the offset of each one's clock in seconds.

    Nodes that are late by the monotonic clock are left out, messages without the job's token ignored. Without an
    address it listens on all interfaces.
    """
    facts: dict[str, Facts] = {}
    with socket.create_server((address, port), backlog=expected) as server:
        while len(facts) < expected and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            # Anybody can connect to the port: one bad message must not end the checks.
            with suppress(OSError, ValueError), server.accept()[0] as connection:
                connection.settimeout(10.0)
                message = _receive(connection, token)
                facts[message["node"]] = message
    return facts


def _receive(connection: socket.socket, token: str) -> Facts:
    with connection.makefile("rw", encoding="utf-8") as lines:
        match message := parse_json(lines.readline(_LONGEST_LINE)):
            case {"node": str(), "token": str(given)} if hmac.compare_digest(given.encode(), token.encode()):
                del message["token"]
            case _:
                raise ValueError("not a report of this job")
        answers = []
        for _ in range(5):
            asked = time.time()
            print("time?", file=lines, flush=True)
            theirs, now = float(lines.readline()), time.time()
            # The other node read its clock halfway through the round trip, give or take half of it.
            answers.append((now - asked, theirs - (asked + now) / 2))
        print("done", file=lines, flush=True)
    # The fastest answer counts.
    return message | {"skew": min(answers)[1]}


def send(address: tuple[str, int], facts: Facts, deadline: float, clock: Callable[[], float] = time.time) -> None:
    """On the other nodes: send the facts to the first. Raises OSError if it cannot be reached before `deadline`."""
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
        print(json.dumps(facts), file=lines, flush=True)
        while lines.readline() == "time?\n":
            print(repr(clock()), file=lines, flush=True)


def _summary(facts: dict[str, Facts], expected: int, bad: int, findings: int) -> str:
    known = next((fact for fact in facts.values() if "versions" in fact), None)
    if known is None:
        return f"check: {expected} nodes, none fit"
    versions, counts = known["versions"], Counter(f"{gpu['name']} {gpu['memory.total']} MiB" for gpu in known["gpus"])
    gpus = " + ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
    parts = [f"{expected} nodes with " + (gpus or f"{known['cpus']} CPUs, no GPUs")]
    parts += [f"driver {gpu['driver_version']}" for gpu in known["gpus"][:1]]
    parts += [f"{name} {versions[name]}" for name in ("nccl", "torch", "triton", "python") if versions.get(name)]
    if known["throughput"]:
        parts.append(f"{median(v for f in facts.values() for v in f.get('throughput', [])):.0f} TFLOP/s a GPU")
    skew = max(abs(fact.get("skew", 0.0)) for fact in facts.values())
    return f"check: {', '.join(parts)}, clocks within {skew * 1e3:.0f} ms; {findings} findings, {bad} nodes at fault"


@errors_in_a_line
def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description="is every node of a Slurm job fit to train?")
    parser.add_argument("--ranks", type=int, required=True, help="on each node")
    parser.add_argument("--gpus", action="store_true", help="each rank needs one")
    parser.add_argument("--need", type=int, required=True, help="nodes to train on")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True, help="what was found, as JSON")
    if sys.argv[1:] == ["--address"]:
        print(own_address() or "")
        return 0
    options = parser.parse_args()
    deadline = time.monotonic() + float(os.environ.get("CHECK_SECONDS", SECONDS_TO_REPORT))
    try:
        own = _collect(options.run_dir, Path(os.environ["CACHE_DIR"]), options.ranks)
    except Exception as error:  # any error becomes a finding of this node
        own = {"problem": f"{type(error).__name__}: {(str(error).splitlines() or ['no details'])[0]}"}
    own["node"] = node = os.environ["SLURMD_NODENAME"]
    token = hmac.digest(os.environ["RENDEZVOUS_KEY"].encode(), b"checks", "sha256").hex()
    # Not the ranks' port, which must be free when they start.
    first = os.environ["HEAD_ADDRESS"], int(os.environ["HEAD_PORT"]) + 1
    if os.environ["SLURM_PROCID"] != "0":
        try:
            send(first, own | {"token": token}, deadline)
        except OSError as error:
            text = f"cannot reach the first node at {first[0]}:{first[1]}: {error}"
            print(Finding(node, True, text).line, flush=True)
        return 0
    expected = os.environ["NODE_NAMES"].split()
    facts = {node: own} | gather(first[1], token, len(expected) - 1, deadline, own_address() or "")
    findings = judge(facts, expected, options.gpus)
    bad = sorted({finding.node for finding in findings if finding.fatal})
    lines = [finding.line for finding in findings]
    print(*lines, _summary(facts, len(expected), len(bad), len(findings)), sep="\n", flush=True)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps({"bad": bad, "findings": lines, "facts": facts}, indent=2))
    return 0 if len(expected) - len(bad) >= options.need else 1


if __name__ == "__main__":
    sys.exit(main())
