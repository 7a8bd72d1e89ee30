"""A run that is stopped between segments goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from signal import Signals
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.training import largest_difference, train
from zeco_train.training import trainer

pytestmark = pytest.mark.campaign


SEGMENTED = [
    "train.dtype=fp64",
    "train.segments=4",
    "train.steps=4",
    "train.eval_sequences=1",
    "data.seq_len=384",
    "data.global_batch=2",
]


# Passes per optimizer step: two micro-batches, each with three forward passes and four forward and backward. The first
# stop is in the middle of the first forward passes, the second before the last pass of the step.
PASSES, STOPS = 14, (2, 14)


class _StopAt:
    """A `StopRequest` that signals before the pass of a number, counted from the start of the run."""

    def __init__(self, number: int | None) -> None:
        self._left = number

    def __enter__(self) -> _StopAt:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    @property
    def signal(self) -> Signals | None:
        if self._left is None:
            return None
        self._left -= 1
        return Signals.SIGTERM if self._left <= 0 else None


def _stop_and_resume(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {"unbroken": train(rank, world_size, f"{folder}/unbroken", *SEGMENTED)}
    for stop in STOPS:
        # The signal reaches one rank only, in the third step.
        with mock.patch.object(trainer, "StopRequest", lambda n=stop: _StopAt(2 * PASSES + n if rank == 1 else None)):
            results[f"stopped {stop}"] = train(rank, world_size, f"{folder}/{stop}", *SEGMENTED)
    in_segments, at_once = STOPS
    results["in segments"] = train(rank, world_size, f"{folder}/{in_segments}", *SEGMENTED, "train.recompute=full")
    results["at once"] = train(rank, world_size, f"{folder}/{at_once}", *SEGMENTED, "train.segments=1")
    return results


def test_stop_between_segments_discards_step_and_resumes(tmp_path: Path) -> None:
    """A stopped step is discarded; the resumed run equals the unbroken one, bit for bit with the same segments."""
    results = run_distributed(_stop_and_resume, 2, str(tmp_path))[0]
    unbroken = results["unbroken"]
    for stop in STOPS:
        stopped = results[f"stopped {stop}"]
        assert [row["step"] for row in stopped["rows"]] == [1, 2]
        assert stopped["sequence_ids"] == unbroken["sequence_ids"][:2]
    for name in ("in segments", "at once"):
        assert results[name]["sequence_ids"] == unbroken["sequence_ids"][2:]
        assert [row["step"] for row in results[name]["rows"]] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "val_loss"):
        in_segments = [row.get(key) for row in results["in segments"]["rows"]]
        assert in_segments == [row.get(key) for row in unbroken["rows"]], key
        assert largest_difference(results["at once"]["rows"], unbroken["rows"], key) <= 1e-9, key
    for name, value in unbroken["parameters"].items():
        assert torch.equal(results["in segments"]["parameters"][name], value), name
