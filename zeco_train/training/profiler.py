"""`train.profile=START:STOP`: profiles of these steps on the chosen ranks, in the run's folder.

    profile/rank_R_steps_A_B.json.gz         a trace of CPU and device for chrome://tracing, ui.perfetto.dev, …; each
                                             step has a label "step N"
    profile/rank_R_steps_A_B_memory.pickle   CUDA only: the allocator's history and state for pytorch.org/memory_viz;
                                             allocations from before step A have no stack

A and B are the first and last profiled step, also of a run that resumed or ended in between. Files of an earlier start
are kept; the new ones get a number.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zeco_train.errors import ConfigError, DataError
from zeco_train.system.files import write_errors

logger = logging.getLogger(__name__)

_REMEDY = "free space there or name another run_dir"

FOLDER = "profile"
# In the allocator's history, which keeps the newest events: tens of steps.
_MEMORY_EVENTS = 200_000


def parse_profile(text: str) -> tuple[int, int]:
    """START and STOP of `train.profile`, counted from 1, both included."""
    parts = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    start, stop = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    if not 1 <= start <= stop:
        allowed = "must be START:STOP, steps counted from 1 with START ≤ STOP, both included (in a YAML file in quotes)"
        raise ConfigError("train.profile", text, allowed)
    return start, stop


def check_profile(text: str | None, ranks: Sequence[int], total_steps: int) -> None:
    """Check `train.profile` and `train.profile_ranks`, except against the world size."""
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ConfigError("train.profile_ranks", list(ranks), "must be a list of different ranks ≥ 0, one at least")
    if text is not None and parse_profile(text)[1] > total_steps:
        raise ConfigError("train.profile", text, f"STOP must be ≤ train.steps={total_steps}")


def check_profile_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Raise `ConfigError` for a rank ≥ the world size."""
    for rank in ranks:
        if rank >= world_size:
            raise ConfigError("train.profile_ranks", list(ranks), f"rank {rank} must be < {world_size}, the world size")


class StepProfiler:
    """Profiles the chosen steps if this rank is one of the chosen ranks; otherwise does nothing.

    Use: `begin(step)` before a step, `end(step)` after it, `close` after the last step.

    Raises:
        DataError: the run's folder cannot be written. Later write errors are logged and the run continues.
    """

    def __init__(self, steps: str | None, ranks: Sequence[int], run_dir: Path, rank: int, device: torch.device) -> None:
        self._folder, self._rank, self._device = run_dir / FOLDER, rank, device
        self._start, self._stop = parse_profile(steps) if steps is not None and rank in ranks else (0, 0)
        self._profile: profile | None = None
        self._label = ExitStack()
        self._first = self._last = 0
        if self._stop:
            # Fail now, not after the profiled steps.
            with write_errors(self._folder, _REMEDY):
                self._folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> None:
        """Call before a step; the first profiled one synchronises the device, so that the trace has no earlier work."""
        if not self._start <= step <= self._stop:
            return
        if self._profile is None:
            self._begin_profile(step)
        self._last = step
        self._label.enter_context(record_function(f"step {step}"))

    def end(self, step: int) -> None:
        """Call after a step; the last profiled one synchronises the device and writes the files."""
        self._label.close()
        if step >= self._stop:
            self.close()

    def close(self) -> None:
        """Write the profile of an unfinished range, if there is one. May be called again."""
        self._label.close()
        ended, self._profile = self._profile, None
        if ended is None:
            return
        try:
            ended.stop()  # waits for the device
            self._write(ended)
        except (DataError, RuntimeError) as error:
            logger.warning("the profile of steps %d to %d is lost: %s", self._first, self._last, error)

    def _begin_profile(self, step: int) -> None:
        self._first = step
        # Otherwise Kineto prints each start and stop to the terminal. Read at its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        logger.info("profiling from step %d to step %d", step, self._stop)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)
            # Python frames only: C++ frames make the file several times as large.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)
        else:
            logger.info("no memory snapshot: only the allocator of CUDA devices keeps a history")
        self._profile = profile(activities=activities, record_shapes=False, with_stack=False)
        self._profile.start()

    def _write(self, ended: profile) -> None:
        name = f"rank_{self._rank}_steps_{self._first}_{self._last}"
        if self._device.type == "cuda":
            with _new_file(self._folder, f"{name}_memory", ".pickle") as partial:
                try:
                    torch.cuda.memory._dump_snapshot(str(partial))
                finally:
                    torch.cuda.memory._record_memory_history(enabled=None)
        with _new_file(self._folder, name, ".json.gz") as partial:
            # Not the profiler's own .gz export, which goes through /tmp: a trace may be larger than the space there.
            plain = partial.with_suffix(".json")
            try:
                ended.export_chrome_trace(str(plain))
                with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=6) as target:
                    shutil.copyfileobj(source, target)
            finally:
                # Including the file that Kineto leaves under another name when the disk is full.
                for left in self._folder.glob(f"{plain.name}*"):
                    left.unlink()


@contextmanager
def _new_file(folder: Path, name: str, suffix: str) -> Iterator[Path]:
    # A temporary path to write to; renamed afterwards to `folder/name` plus suffix, with a number if that exists.
    partial = folder / f".{name}.{os.getpid()}"
    path, number = folder / f"{name}{suffix}", 1
    with write_errors(path, _REMEDY):
        try:
            yield partial
            while path.exists():
                path, number = folder / f"{name}.{number}{suffix}", number + 1
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    logger.info("profile written: %s", path)
