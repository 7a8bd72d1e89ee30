"""What a rank writes about itself: its log, and after a failure of the job a postmortem.

The log file has all Python logs and warnings; the terminal only this project's warnings. The postmortem has the stacks
of all threads, and torch's flight records: the last collectives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch._C import _distributed_c10d
from tqdm import tqdm

from zeco_train.errors import ConfigError
from zeco_train.system import background
from zeco_train.system.terminal import visible

logger = logging.getLogger(__name__)

LOG_FOLDER = "logs"
# For a flight recorder's dump, which queries the device for the state of operations and may block on a hung one; there
# are two.
DUMP_SECONDS = 5.0
# The packages of this repository; modules log to `logging.getLogger(__name__)`.
_OWN_LOGGERS = ("zeco_train", "models", "data")

_installed: list[tuple[logging.Logger, logging.Handler]] = []


def setup_logging(run_dir: str | Path, rank: int) -> Path:
    """Send logging and Python's warnings to `run_dir/logs/rank_{rank}.log`, appending; returns the file.

    Rank 0 also shows this project's warnings and errors on stderr, one line each. Torch's loggers have stderr handlers
    and are redirected unless the user has set `TORCH_LOGS`; stderr of C++ code is not captured. The newest call counts.
    Raises ConfigError if the file cannot be written.
    """
    close_logging()
    path = Path(run_dir) / LOG_FOLDER / f"rank_{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError("run_dir", run_dir, f"cannot be written ({error.strerror}); name another folder") from error
    file.setFormatter(_Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    _install(root, file)
    if rank == 0:
        terminal = _TerminalHandler(logging.WARNING)
        for name in _OWN_LOGGERS:
            _install(logging.getLogger(name), terminal)
    logging.captureWarnings(True)
    if not os.environ.get("TORCH_LOGS"):
        _redirect_torch()
    return path


def close_logging() -> None:
    """Undo `setup_logging` and close the file (torch's loggers stay quiet)."""
    logging.captureWarnings(False)
    while _installed:
        logger, handler = _installed.pop()
        logger.removeHandler(handler)
        handler.close()


def _install(logger: logging.Logger, handler: logging.Handler) -> None:
    logger.addHandler(handler)
    _installed.append((logger, handler))


def _redirect_torch() -> None:
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] != "torch" or not isinstance(logger, logging.Logger):
            continue
        for handler in list(logger.handlers):
            # Not its subclasses, which write to files that the user has requested.
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)
                logger.propagate = True


class _Formatter(logging.Formatter):
    # Escapes control characters, since log files are read in terminals.
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _LogFile(logging.FileHandler):
    # Ignores I/O errors: a full disk truncates the log, but does not end the run.
    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _TerminalHandler(logging.Handler):
    # Writes `warning: message` to stderr as one line, without a traceback (the file has it), above a progress bar.
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = visible(" ".join(record.getMessage().split()))
            # tqdm.write clears the bar, prints, and redraws the bar, whichever stream it is on.
            tqdm.write(f"{record.levelname.lower()}: {text}", file=sys.stderr)
            sys.stderr.flush()
        except OSError:
            # The terminal is gone; the record is in the file.
            return
        except Exception:
            # The contract of logging handlers: a bad format string must not end the program.
            self.handleError(record)


class Postmortem:
    """Writes the stacks and flight records of one rank, once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._log: IO[bytes] | None = None
        self._prefix = Path()
        self._done = threading.Lock()

    def open(self, log: Path, start: str) -> None:
        """Prepare to write beside `log`, this rank's log file; names begin with `start`, the same on every rank."""
        self._log, self._prefix = log.open("ab", buffering=0), log.parent / start
        faulthandler.enable(self._log)
        # Read by NCCL's watchdog on a timeout; the new and the old name of the variable.
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, f"{self._prefix}_nccl_rank_")

    def close(self) -> None:
        if self._log is not None:
            faulthandler.disable()
            self._log.close()
            self._log = None

    def write(self) -> None:
        """Write the stacks and records; only the first call has an effect, and takes a few seconds at most."""
        # Never released: later callers return at once.
        if self._log is None or not self._done.acquire(blocking=False):
            return
        faulthandler.dump_traceback(self._log)
        for name, recorder in (
            (f"gloo_rank_{self._rank}.json", "_dump_fr_trace"),
            (f"nccl_rank_{self._rank}", "_dump_nccl_trace"),
        ):
            # Not every torch build has both.
            if (dump := getattr(_distributed_c10d, recorder, None)) is not None:
                background.start(self._save, name, dump, name="flight recorder").join(DUMP_SECONDS)

    def _save(self, name: str, dump: Callable[[], bytes]) -> None:
        path = Path(f"{self._prefix}_{name}")
        try:
            content = dump()
            if path.suffix == ".json":
                # The analyzer fails on records of gloo groups (torch 2.13), of which only the pickle has the stacks.
                content = json.dumps(pickle.loads(content), indent=1).encode()
            path.write_bytes(content)
        except (OSError, RuntimeError) as error:
            logger.info("no flight record in %s: %s", path, error)


def last_communication() -> str:
    """This rank's last collective as text, such as `all_reduce of [[4]] over "scan forward"`; empty if unknown."""
    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries") if dump is not None else None
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["record_id"])
    name, group = last["profiling_name"].rpartition(":")[2], last["process_group"]
    return f'{name} of {last["input_sizes"]} over "{group[1] if group[1] != "undefined" else group[0]}"'
