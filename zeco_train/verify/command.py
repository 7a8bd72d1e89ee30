"""What `python -m zeco_train.verify` runs: settings in, table out, every expected failure in one line."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zeco_train.config import Device
from zeco_train.errors import CommunicationError, ConfigError, DataError, OutOfMemoryError, ZecoError
from zeco_train.mesh import Launch
from zeco_train.signals import die_with_launcher
from zeco_train.verify import report
from zeco_train.verify.cases import Verification
from zeco_train.verify.config import VerifyConfig, describe, load_config
from zeco_train.verify.report import Row
from zeco_train.watchdog import Watchdog, is_communication_failure, launcher_store

# A launcher ends all ranks once one has: the others leave rank 0 the time to speak, see `zeco_train.cli`.
_SECONDS_TO_IMPORT, _SECONDS_AMONG_RANKS = 20.0, 2.0
_REMEDY = "the rows so far stand, the others are unknown"


def main(arguments: list[str]) -> int:
    """Verify; returns the process's exit code: 0, 1 where a result is off, others for errors."""
    launch = Launch.from_environment()
    if launch.world_size > 1:
        die_with_launcher()
    if {"-h", "--help"} & set(arguments):
        if launch.rank == 0:
            print(describe())
        return 0
    watchdog = Watchdog(launch, launcher_store(launch), _REMEDY, "timeout")
    try:
        config = load_config(arguments)
        device = find_device(config.device, launch)
        config = config.resolve(device, launch.world_size)
        return _verify(config, launch, device, watchdog)
    except Exception as error:
        if is_communication_failure(error):
            _abandon(error, watchdog)
        expected = _as_expected(error, launch, watchdog.activity)
        watchdog.report_failure(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        if expected is None:
            raise
        return _end(expected, launch, watchdog)


def find_device(wanted: Device, launch: Launch) -> torch.device:
    """This rank's device, made the current one.

    Raises:
        ConfigError: there are fewer CUDA devices than ranks on this machine.
    """
    available = torch.cuda.device_count()
    if wanted is Device.cpu or (wanted is Device.auto and not available):
        return torch.device("cpu")
    if launch.local_world_size > available:
        problem = f"{launch.local_world_size} ranks on this machine, {available} CUDA devices; or device=cpu"
        raise ConfigError("device", wanted.value, problem)
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _verify(config: VerifyConfig, launch: Launch, device: torch.device, watchdog: Watchdog) -> int:
    # What one device computes is a reference, too.
    torch.set_float32_matmul_precision("highest")
    started = time.monotonic()
    watchdog.enter("joining the other ranks")
    verification = Verification(config, launch, device, watchdog.enter)
    watchdog.guard(timedelta(seconds=config.timeout), lambda error: _abandon(error, watchdog))
    machine = describe_machine(launch, device)
    if launch.rank == 0:
        print(", ".join(f"{key} {value}" for key, value in machine.items()) + "\n\n" + report.header(), flush=True)
    rows: list[Row] = []
    for row in verification.rows():
        rows.append(row)
        if launch.rank == 0:
            print(report.line(row), flush=True)
    verification.drain()
    if launch.rank == 0:
        print(f"\n{report.summary(rows)}, {time.monotonic() - started:.0f} s", flush=True)
        if config.out is not None:
            _write(Path(config.out), machine, config, rows)
    # A launcher that sees one rank end with a code ≠ 0 kills the others: all end together.
    dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()
    return 1 if any(row.failures for row in rows) else 0


def describe_machine(launch: Launch, device: torch.device) -> dict[str, str]:
    """Where the results are from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "ranks": str(launch.world_size),
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _write(path: Path, machine: dict[str, str], config: VerifyConfig, rows: list[Row]) -> None:
    settings = {name: getattr(value, "value", value) for name, value in asdict(config).items()}
    results: dict[str, Any] = {"machine": machine, "config": settings, "rows": [row.as_dict() for row in rows]}
    try:
        # NaN and infinities are not JSON; as text they stay readable.
        path.write_text(json.dumps(report.without_infinities(results), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise DataError(path, f"cannot be written ({error.strerror})") from error


def _as_expected(error: Exception, launch: Launch, activity: str) -> ZecoError | None:
    """The error as one whose message is written for the user; None for a fault of this program."""
    if isinstance(error, ZecoError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        problem = (str(error).splitlines() or ["no details"])[0]
        return OutOfMemoryError(launch.rank, activity, problem, "fewer tokens or heads need less")
    return None


def _end(error: ZecoError, launch: Launch, watchdog: Watchdog) -> int:
    """Say what is wrong, once. Mostly every rank has the error, and rank 0 speaks; the others hold back meanwhile."""
    joined = dist.is_initialized()
    if launch.rank != 0:
        time.sleep(_SECONDS_AMONG_RANKS if joined else _SECONDS_TO_IMPORT)
    if watchdog.may_speak():
        _say(error)
    if joined:
        # Not sys.exit: shutting the process groups down would wait for whoever is lost.
        _leave(error.exit_code)
    return error.exit_code


def _abandon(error: Exception, watchdog: Watchdog) -> NoReturn:
    """Leave after a peer is lost: name it, wait for nobody."""
    if threading.current_thread() is threading.main_thread():
        # A launcher that has seen the peer die terminates this process at once, too.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    explained = watchdog.diagnose(error)
    watchdog.report_leaving()
    if watchdog.may_speak():
        _say(explained)
    _leave(explained.exit_code if isinstance(explained, CommunicationError) else 1)


def _say(error: ZecoError) -> None:
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)
