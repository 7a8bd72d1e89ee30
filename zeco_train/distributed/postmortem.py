"""What a rank leaves in the run's `logs/` when the job is lost: where its threads are, and what it communicated.

`rank_R.log` gets the stack of every thread, also after a crash (SIGSEGV, SIGABRT and the like). The flight recorders
hold the last 2,000 communications, with their groups, sizes, states, and where in the program they were asked for:
`START_gloo_rank_R.json`, and, as torch's analyzer reads them (`python -m torch.distributed.flight_recorder.fr_trace
RUN/logs -p START_nccl_rank_`), `START_nccl_rank_R`. START is when the run was started, so that no start overwrites what
another one has left.
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
# A recorder asks the device about its operations, and a device that hangs may not answer.
_SECONDS_TO_DUMP = 5.0


def record_communication() -> None:
    """Have torch record what is communicated. To be called before the ranks join; what the user has set counts."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    # NCCL's own watchdog ends a process that waits for too long; it dumps first.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def last_communication() -> str:
    """This rank's last collective in words, such as `all_reduce of [[4]] over "scan forward"`; empty if unknown."""
    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries") if dump is not None else None
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["record_id"])
    name, group = last["profiling_name"].rpartition(":")[2], last["process_group"]
    return f'{name} of {last["input_sizes"]} over "{group[1] if group[1] != "undefined" else group[0]}"'


class Postmortem:
    """Writes the files, once.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._log: IO[bytes] | None = None
        self._prefix = Path()
        self._done = threading.Lock()

    def open(self, log: Path, start: str) -> None:
        """From now on, write beside `log`, this rank's log file.

        Args:
            start: part of the files' names, the same on every rank.
        """
        self._log, self._prefix = log.open("ab", buffering=0), log.parent / start
        faulthandler.enable(self._log)
        # Read when NCCL's watchdog gives up; by its new and by its old name.
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, f"{self._prefix}_nccl_rank_")

    def close(self) -> None:
        """A regular end: nothing is written any more."""
        if self._log is not None:
            faulthandler.disable()
            self._log.close()
            self._log = None

    def write(self) -> None:
        """Write all there is; only the first call does, and it takes a few seconds at most."""
        if self._log is None or not self._done.acquire(blocking=False):
            return
        faulthandler.dump_traceback(self._log)
        # torch builds differ in which of them they have. The analyzer fails on records of gloo groups (torch 2.13).
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
    # Only the pickled form has the stacks.
    return json.dumps(pickle.loads(dump()), indent=1).encode() if dump is not None else None


def _nccl_record() -> bytes | None:
    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump is not None else None
