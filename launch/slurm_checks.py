"""Health check of a Slurm job's nodes before each start, in parts: `python launch/slurm_checks.py PART [OPTION ...]`.

    address   this node's address on CLUSTER_INTERFACE
    clock     on the first node, meanwhile: answers each connection with its time
    node      on each node, by srun: inspects it, connects to the clock, and prints records of what it finds
    judge     reads all records, compares each node with most others, prints a line per finding and a summary, and ends
              with exit code 1 if too few healthy nodes remain to train

Records come back by srun, whose connections Slurm authenticates; the clock reads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zeco_train.errors import ConfigError, system_errors
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.environment import address_on, free_gb, installation, product_rates, query_gpus

# Kind, name, value. `error` (the node must not be used) and `warning` have their text as name; `same` values must, and
# `alike` ones should, equal most nodes' values. The last record of a node is its `end`.
Record = tuple[str, str, object]
# Values by kind and name.
Report = defaultdict[str, dict[str, str]]

# For a node to connect to the first one; srun waits longer for the last node.
SECONDS_TO_CONNECT = 60.0
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
# Queries of nvidia-smi by which nodes are compared, and their names in findings.
_COMPARED = {
    "name": ("same", "GPU"),
    "memory.total": ("same", "GPU memory, MiB,"),
    "driver_version": ("same", "driver"),
    "power.limit": ("alike", "power limit"),
    "clocks.max.sm": ("alike", "max SM clock"),
}
_QUERY = (*_COMPARED, "uuid", "memory.used", "mig.mode.current", _ECC_ERRORS, *_THROTTLE)


def inspect_node(run_dir: Path, ranks: int, uses_gpus: bool) -> Iterator[Record]:
    """Records of this node by itself; it needs CPUs, and a GPU for each rank if it `uses_gpus`."""
    folders = {"run_dir": run_dir, "cache": Path(os.environ["CACHE_DIR"]), "/dev/shm": Path("/dev/shm")}
    for name, (too_little, little) in DISK_LIMITS_GB.items():
        free = free_gb(folders[name])
        if free is None:
            severity = "warning" if name == "/dev/shm" else "error"
            yield severity, f"{name}: does not exist there, or cannot be written", ""
        elif free < little:
            yield "error" if free < too_little else "warning", f"{name}: {free:.1f} GB free", ""
    cpus = len(os.sched_getaffinity(0))
    yield "machine", "cpus", cpus
    if cpus < ranks:
        yield "warning", f"{cpus} CPUs for {ranks} ranks (sbatch --exclusive, or more --cpus-per-task)", ""
    if uses_gpus:
        gpus = query_gpus(_QUERY)
        yield from _inspect_gpus(gpus)
        if len(gpus) < ranks:
            yield "error", f"{len(gpus)} GPUs, {ranks} needed", ""
        if not gpus:
            # Not to be compared with nodes that have some.
            return
        import torch

        if torch.cuda.device_count() != len(gpus):
            raise RuntimeError(f"torch finds {torch.cuda.device_count()} GPUs, nvidia-smi {len(gpus)}")
        yield "same", "cuda", torch.version.cuda
        yield "same", "nccl", ".".join(map(str, torch.cuda.nccl.version()))
        yield from (("rate", f"GPU {number}", rate) for number, rate in enumerate(product_rates()))
    software = installation()
    versions = {"python": software["python"], **software["packages"], "source": software["commit"]}
    yield from (("same", name, version) for name, version in versions.items())
    variables = software["variables"].items()
    yield from (("alike", name, value) for name, value in variables if name.startswith(("NCCL_", "TORCH_")))


def _inspect_gpus(gpus: list[dict[str, str]]) -> Iterator[Record]:
    for query, (kind, name) in _COMPARED.items() if gpus else ():
        yield kind, name, "/".join(sorted({gpu[query] for gpu in gpus}))
    for number, gpu in enumerate(gpus):
        yield "gpu", f"GPU {number}", gpu
        # "[N/A]": not supported by the device.
        errors, used = (int(gpu[name]) if gpu[name].isdigit() else 0 for name in (_ECC_ERRORS, "memory.used"))
        if errors:
            yield "error", f"GPU {number}: {errors} uncorrected memory errors since its last reset", ""
        if used > _MEMORY_IN_USE_MIB:
            yield "warning", f"GPU {number}: {used} MiB in use by another process", ""
        if active := [name.rpartition(".")[2] for name in _THROTTLE if gpu[name] == "Active"]:
            yield "warning", f"GPU {number}: slowed down ({', '.join(active)})", ""
        if gpu["mig.mode.current"] == "Enabled":
            yield "error", f"GPU {number}: MIG is on", ""


def serve_clock(address: str, port: int) -> None:
    """Answer connections with this node's time, until this process is killed. Without an address: on all interfaces."""
    with socket.create_server((address, port), backlog=1024) as server:
        print("ready", flush=True)
        while True:
            # A client may be gone already.
            with suppress(OSError), server.accept()[0] as connection:
                connection.sendall(repr(time.time()).encode())


def compare_clock(host: str, port: int, timeout: float) -> Iterator[Record]:
    """Records of how far this node's clock is ahead of the first one's, or that the first cannot be reached."""
    asked = time.time()
    try:
        with socket.create_connection((host, port), timeout) as connection, connection.makefile() as answer:
            theirs = float(answer.read(64))
    except (OSError, ValueError) as error:  # ValueError: another server's answer, no time
        yield "error", f"cannot reach the first node at {host}:{port}: {error}", ""
        return
    # The other clock was read halfway through the connection, give or take half of it.
    doubt = (time.time() - asked) / 2
    skew = asked + doubt - theirs
    yield "machine", "skew", skew
    if abs(skew) > SKEW_LIMIT_SECONDS + doubt:
        yield "warning", f"its clock is {skew:+.1f} s off the first node's", ""


def gather(lines: Iterable[str], nodes: list[str]) -> dict[str, Report]:
    """The reports of all nodes that have come to their end, from what srun printed; prints what are no records."""
    reports: dict[str, Report] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        match line.removesuffix("\n").split("\t"):
            case [node, kind, name, value] if node in nodes:
                reports[node][kind][name] = value
            case _:
                print(line, end="")
    return {node: report for node, report in reports.items() if "end" in report}


def judge(reports: dict[str, Report], expected: list[str]) -> list[tuple[str, str, str]]:
    """Findings about all `expected` nodes: the node, `error` or `warning`, and the text."""
    findings = [(node, "error", "unreachable: did not report in time") for node in expected if node not in reports]
    middle = median(_rates(reports) or [0.0])
    for node, report in reports.items():
        findings += [(node, kind, text) for kind in ("error", "warning") for text in report[kind]]
        slow = {gpu: float(rate) for gpu, rate in report["rate"].items() if float(rate) < SLOW_SHARE * middle}
        text = f"TFLOP/s in bf16, the median GPU of the job {middle:.0f}"
        findings += [(node, "warning", f"{gpu}: {rate:.0f} {text}") for gpu, rate in slow.items()]
    sound = {node: report for node, report in reports.items() if report["same"]}
    for kind, severity in (("same", "error"), ("alike", "warning")):
        for name in sorted({name for report in sound.values() for name in report[kind]}):
            values = {node: report[kind].get(name) for node, report in sound.items()}
            usual, count = Counter(values.values()).most_common(1)[0]
            text = f"{count} nodes have {usual}"
            findings += [(n, severity, f"{name} {value}, {text}") for n, value in values.items() if value != usual]
    return findings


def _rates(reports: dict[str, Report]) -> list[float]:
    return [float(rate) for report in reports.values() for rate in report["rate"].values()]


def _summary(reports: dict[str, Report], expected: int) -> str:
    known = next((report for report in reports.values() if report["same"]), None)
    if known is None:
        return f"{expected} nodes, none fit"
    same, has = known["same"], f"{known['machine']['cpus']} CPUs, no GPUs"
    if known["gpu"]:
        has = f"{len(known['gpu'])} × {same['GPU']} {same['GPU memory, MiB,']} MiB"
    parts = [f"{expected} nodes with {has}"]
    names = ("driver", "nccl", "torch", "triton", "python")
    parts += [f"{name} {same[name]}" for name in names if name in same]
    parts += [f"{median(rates):.0f} TFLOP/s a GPU" for rates in [_rates(reports)] if rates]
    skew = max(abs(float(report["machine"].get("skew", 0.0))) for report in reports.values())
    return f"{', '.join(parts)}, clocks within {skew * 1e3:.0f} ms"


@errors_in_a_line
def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description="is every node of a Slurm job fit to train?")
    parser.add_argument("part", choices=["address", "clock", "node", "judge"])
    parser.add_argument("--ranks", type=int, default=1, help="on each node")
    parser.add_argument("--gpus", action="store_true", help="each rank needs one")
    parser.add_argument("--need", type=int, default=1, help="nodes to train on")
    parser.add_argument("--run-dir", type=Path, default=Path())
    parser.add_argument("--report", type=Path, default=Path("checks.json"), help="what was found, as JSON")
    options = parser.parse_args()
    if options.part == "address":
        print(address_on("CLUSTER_INTERFACE") or "")
        return 0
    if options.part == "judge":
        expected = os.environ["NODE_NAMES"].split()
        reports = gather(sys.stdin, expected)
        findings = judge(reports, expected)
        bad = sorted({node for node, kind, _ in findings if kind == "error"})
        lines = [f"check: {node}: {kind}: {text}" for node, kind, text in findings]
        total = f"{len(findings)} findings, {len(bad)} nodes at fault"
        print(*lines, f"check: {_summary(reports, len(expected))}; {total}", sep="\n", flush=True)
        options.report.write_text(json.dumps({"bad": bad, "findings": lines, "facts": reports}, indent=2))
        return int(len(expected) - len(bad) < options.need)
    # Not the ranks' port, which must be free when they start.
    port = int(os.environ["HEAD_PORT"]) + 1
    if options.part == "clock":
        with system_errors(lambda reason: ConfigError("PORT", port, reason)):
            serve_clock(address_on("CLUSTER_INTERFACE") or "", port)
    seconds = float(os.environ.get("CHECK_SECONDS", SECONDS_TO_CONNECT))
    try:
        records = [*inspect_node(options.run_dir, options.ranks, options.gpus)]
    except Exception as error:  # any error becomes a finding of this node
        records = [("error", f"{type(error).__name__}: {(str(error).splitlines() or ['no details'])[0]}", "")]
    for record in (*records, *compare_clock(os.environ["HEAD_ADDRESS"], port, seconds), ("end", "", "")):
        # Fields are separated by tabs.
        print(os.environ["SLURMD_NODENAME"], *(" ".join(str(value).split()) for value in record), sep="\t", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
