"""Writes thread stacks and recent communications of a rank to the run's `logs/` when the job fails.

`rank_R.log` gets the stack of every thread, also after a crash (SIGSEGV, SIGABRT and the like). The flight recorders
hold the last 2,000 communications with groups, sizes, states and call stacks: `START_gloo_rank_R.json`, and
`START_nccl_rank_R` in the format of torch's analyzer (`python -m torch.distributed.flight_recorder.fr_trace RUN/logs -p
START_nccl_rank_`). START is the time of the run's start, so that a restart does not overwrite earlier files.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch._C import _distributed_c10d

from zeco_train.system import background

logger = logging.getLogger(__name__)

_ENTRIES = "2000"
# A dump queries the device for the state of operations, which may block on a hung device.
_SECONDS_TO_DUMP = 5.0


def record_communication() -> None:
    """Enable torch's flight recorder; call before the rendezvous. Variables set by the user take precedence."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    # NCCL's own watchdog aborts the process on a timeout; make it dump first.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def last_communication() -> str:
    """This rank's last collective as text, such as `all_reduce of [[4]] over "scan forward"`; empty if unknown."""
    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries") if dump is not None else None
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["record_id"])
    name, group = last["profiling_name"].rpartition(":")[2], last["process_group"]
    return f'{name} of {last["input_sizes"]} over "{group[1] if group[1] != "undefined" else group[0]}"'


class Postmortem:
    """Writes the files of one rank, once.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._log: IO[bytes] | None = None
        self._prefix = Path()
        self._done = threading.Lock()

    def open(self, log: Path, start: str) -> None:
        """Prepare to write beside `log`, this rank's log file.

        Args:
            log: appended to; the flight records go to its folder.
            start: part of the file names, the same on every rank.
        """
        self._log, self._prefix = log.open("ab", buffering=0), log.parent / start
        faulthandler.enable(self._log)
        # Read by NCCL's watchdog on a timeout; the new and the old name of the variable.
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, f"{self._prefix}_nccl_rank_")

    def close(self) -> None:
        """Disable the postmortem at a regular shutdown."""
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
        # Not every torch build has both recorders. The analyzer fails on records of gloo groups (torch 2.13).
        recorders = {f"gloo_rank_{self._rank}.json": _gloo_record, f"nccl_rank_{self._rank}": _nccl_record}
        for name, record in recorders.items():
            background.start(self._save, name, record, name="flight recorder").join(_SECONDS_TO_DUMP)

    def _save(self, name: str, record: Callable[[], bytes | None]) -> None:
        path = Path(f"{self._prefix}_{name}")
        try:
            content = record()
            if content is not None:
                path.write_bytes(content)
        except (OSError, RuntimeError) as error:
            logger.info("no flight record in %s: %s", path, error)


def _gloo_record() -> bytes | None:
    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace", None)
    # Only the pickled form contains the stacks.
    return json.dumps(pickle.loads(dump()), indent=1).encode() if dump is not None else None


def _nccl_record() -> bytes | None:
    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump is not None else None
