"""What `train.py` runs: compose the configuration, build, train, and turn every expected failure into one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from models.gla import num_parameters
from zeco_train.build import Parts, build, init, open_run
from zeco_train.config import Config, describe, load_config
from zeco_train.errors import OutOfMemoryError, ZecoError
from zeco_train.mesh import Launch, ProcessMesh
from zeco_train.progress import compact
from zeco_train.signals import die_with_launcher
from zeco_train.trainer import Trainer
from zeco_train.watchdog import Watchdog, is_communication_failure, launcher_store

logger = logging.getLogger(__name__)

# A launcher kills all ranks once one has ended, so the others leave rank 0 the time to speak: until it has imported
# what it needs on a busy machine, or, once all work together, for a moment.
_SECONDS_TO_IMPORT = 20.0
_SECONDS_AMONG_RANKS = 2.0


def main(arguments: list[str]) -> int:
    """Run `train.py` with Hydra overrides as arguments; returns the process's exit code."""
    launch = Launch.from_environment()
    if launch.world_size > 1:
        die_with_launcher()
    try:
        if {"-h", "--help"} & set(arguments):
            if launch.rank == 0:
                print(describe([a for a in arguments if a not in ("-h", "--help")]))
            return 0
        return _train(load_config(arguments), arguments, launch)
    except ZecoError as error:
        return _end(error, launch, _SECONDS_TO_IMPORT, lambda: True)


def _train(config: Config, arguments: list[str], launch: Launch) -> int:
    # Before the ranks join, so that one that does not come is named, too.
    watchdog = Watchdog(launch, launcher_store(launch))
    closing = ExitStack()
    try:
        watchdog.enter("joining the other ranks")
        mesh = init(config, launch)
        watchdog.guard(mesh.timeout, lambda error: _abandon(error, watchdog))
        code = _run(config, arguments, mesh, watchdog, closing)
    except Exception as error:
        if is_communication_failure(error):
            _abandon(error, watchdog)
        expected = _as_expected(error, launch, watchdog.activity)
        if expected is None:
            watchdog.report_failure(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            raise
        logger.info("ending", exc_info=error)
        watchdog.report_failure(str(expected))
        patience = _SECONDS_AMONG_RANKS if dist.is_initialized() else _SECONDS_TO_IMPORT
        _end(expected, launch, patience, watchdog.may_speak)
        # After the user has been told: a tracker may take its time to finish.
        closing.close()
        os._exit(expected.exit_code)
    closing.close()
    # A launcher that sees one rank end with a signal's code terminates the others: all end together.
    dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()
    return code


def _run(config: Config, arguments: list[str], mesh: ProcessMesh, watchdog: Watchdog, closing: ExitStack) -> int:
    """Open, build and train; `closing` gets what has to be closed at the end, whatever the end is.

    Returns:
        The exit code: 0, or 128 and the signal that ended the run before its time.
    """
    watchdog.enter("opening data and the run's folder")
    run = open_run(config, arguments, mesh)
    closing.callback(run.release)
    watchdog.enter("building the model")
    parts = build(config, run, mesh, watchdog)
    recorder, progress = parts.recorder, parts.progress
    closing.callback(recorder.close)
    closing.callback(parts.loader.close)
    if progress.step >= config.train.steps:
        recorder.exit_code = 0
        recorder.note(f"the run in {run.path} has finished its {progress.step} steps; nothing to do")
        return 0
    recorder.note(_banner(config, parts))
    stopped_by = Trainer(config, parts).train()
    parts.scan.drain()
    summary = recorder.summarise()
    if stopped_by is not None:
        done = f"after step {progress.step}: saved" if progress.step else "before the first step was done"
        summary = f"{stopped_by.name} {done}; the same command goes on from there"
    if summary is not None and mesh.is_main:
        print(summary, flush=True)
    return 0 if stopped_by is None else 128 + stopped_by


def _banner(config: Config, parts: Parts) -> str:
    """What is about to run, in one line."""
    mesh, model = parts.mesh, config.model
    start = f"from step {parts.progress.step}" if parts.progress.step else "from the start"
    return (
        f"{config.name}: {model.name} ({compact(num_parameters(model))} parameters, {config.train.dtype.value}) with "
        f"sp={config.sp.backend.value}, {mesh.dp_size} × {mesh.sp_size} ranks (dp × sp) on {mesh.device.type}, "
        f"{config.parallel.strategy.value}; {config.data.global_batch} sequences of {config.data.seq_len:,} tokens "
        f"a step, {start}"
    )


def _as_expected(error: Exception, launch: Launch, activity: str) -> ZecoError | None:
    """The error as one whose message is written for the user; None for a fault of this program."""
    if isinstance(error, ZecoError):
        return error
    # On CPUs torch raises a plain RuntimeError.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return OutOfMemoryError(launch.rank, activity, (str(error).splitlines() or ["no details"])[0])
    return None


def _end(error: ZecoError, launch: Launch, patience: float, may_speak: Callable[[], bool]) -> int:
    """Say what is wrong, once. Mostly every rank has the error, and rank 0 speaks; the others hold back meanwhile.

    One that is still there after that is alone with its error, and speaks itself.
    """
    if launch.rank != 0:
        time.sleep(patience)
    if may_speak():
        _say(error)
    return error.exit_code


def _say(error: ZecoError) -> None:
    # Above a progress bar, if there is one.
    tqdm.write("error: " + " ".join(str(error).split()), file=sys.stderr)
    sys.stderr.flush()


def _abandon(error: Exception, watchdog: Watchdog) -> NoReturn:
    """Leave after a peer is lost: name it, save nothing, wait for nobody."""
    if threading.current_thread() is threading.main_thread():
        # A launcher that has seen the peer die terminates this process at once, too.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # At a level that only the log file takes: the terminal gets one line, below.
    logger.info("communication failed", exc_info=error)
    explained = watchdog.diagnose(error)
    logger.info("%s", explained)
    watchdog.report_leaving()
    if watchdog.may_speak():
        _say(explained)
    sys.stdout.flush()
    # Not sys.exit: shutting the process groups down would wait for the lost peer.
    os._exit(explained.exit_code)
