"""One log file per rank with all Python logs and warnings; on the terminal only this project's warnings."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from tqdm import tqdm

from zeco_train.errors import ConfigError
from zeco_train.system.terminal import visible

LOG_FOLDER = "logs"
# The packages of this repository; modules log to `logging.getLogger(__name__)`.
_OWN_LOGGERS = ("zeco_train", "models", "data")

_installed: list[tuple[logging.Logger, logging.Handler]] = []


def setup_logging(run_dir: str | Path, rank: int, level: int = logging.INFO) -> Path:
    """Send logging and Python's warnings to `run_dir/logs/rank_{rank}.log`, appending; returns the file.

    Rank 0 also shows this project's warnings and errors on stderr, one line each. Torch's loggers have stderr handlers
    and are redirected unless the user has set `TORCH_LOGS`; stderr of C++ code is not captured. The newest call counts.

    Raises:
        ConfigError: it cannot be written.
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
    root.setLevel(level)
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
