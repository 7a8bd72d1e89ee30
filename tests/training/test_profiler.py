"""`train.profile`: profiled steps and ranks, and the files written."""

from __future__ import annotations

import gzip
import json
import logging
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from zeco_train.errors import ConfigError, DataError
from zeco_train.training import profiler as profiler_module
from zeco_train.training.profiler import StepProfiler, check_profile, check_profile_ranks, parse_profile

CPU = torch.device("cpu")
SIZES = {step: 100 + step for step in range(1, 10)}


def run_steps(profiler: StepProfiler, *steps: int, device: torch.device = CPU) -> None:
    """Run steps that differ in the size of a product."""
    for step in steps:
        profiler.begin(step)
        x = torch.ones(SIZES[step], 3, device=device, requires_grad=True)
        (x @ x.T).sum().backward()
        profiler.end(step)


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def named(events: list[dict[str, Any]], start: str) -> list[str]:
    return sorted(e["name"] for e in events if e.get("ph") == "X" and e["name"].startswith(start))


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").iterdir())


@pytest.mark.parametrize("text", ["3", "", "3:", ":3", "0:3", "4:3", "-1:3", "1:2:3", "1.5:2", "a:b", " 1:2", "1:2\n"])
def test_invalid_step_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)train\.profile=.*: must be START:STOP") as caught:
        parse_profile(text)
    assert caught.value.field == "train.profile"


def test_step_ranges_and_ranks_are_checked() -> None:
    assert parse_profile("3:3") == (3, 3)
    assert parse_profile("1:12") == (1, 12)
    check_profile(None, [0], 5)
    check_profile("1:5", [0, 3], 5)
    with pytest.raises(ConfigError, match=r"train\.profile=2:6: STOP must be ≤ train\.steps=5"):
        check_profile("2:6", [0], 5)
    for ranks in ([], [1, 1], [0, -1]):
        with pytest.raises(ConfigError, match=r"train\.profile_ranks"):
            check_profile("1:5", ranks, 5)
    check_profile_ranks([0, 3], 4)
    with pytest.raises(ConfigError, match=r"train\.profile_ranks=\[0, 4\]: rank 4 must be < 4"):
        check_profile_ranks([0, 4], 4)


def test_trace_holds_chosen_steps_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    profiler = StepProfiler("3:4", [2], tmp_path, 2, CPU)
    run_steps(profiler, 1, 2)
    assert files(tmp_path) == []
    run_steps(profiler, 3)
    assert files(tmp_path) == []
    run_steps(profiler, 4)
    assert files(tmp_path) == ["rank_2_steps_3_4.json.gz"]
    run_steps(profiler, 5)
    profiler.close()
    profiler.close()
    assert files(tmp_path) == ["rank_2_steps_3_4.json.gz"]
    events = read_trace(tmp_path / "profile" / "rank_2_steps_3_4.json.gz")
    assert named(events, "step ") == ["step 3", "step 4"]
    # A step's products, forward and two backward, lie within its label.
    labels = {e["name"]: e for e in events if e.get("ph") == "X" and e["name"].startswith("step ")}
    products = [e for e in events if e.get("ph") == "X" and e["name"] == "aten::mm"]
    assert len(products) == 2 * 3
    for label in labels.values():
        assert sum(label["ts"] <= e["ts"] and e["ts"] + e["dur"] <= label["ts"] + label["dur"] for e in products) == 3
    assert [r.getMessage() for r in caplog.records if "snapshot" in r.getMessage()] == [
        "no memory snapshot: only the allocator of CUDA devices keeps a history"
    ]


@pytest.mark.parametrize(("steps", "rank"), [(None, 0), ("1:2", 1)])
def test_no_profile_without_setting_or_on_other_ranks(
    tmp_path: Path, steps: str | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "profile", None)
    profiler = StepProfiler(steps, [0], tmp_path, rank, CPU)
    run_steps(profiler, 1, 2, 3)
    profiler.close()
    assert not any(tmp_path.iterdir())


def test_resumed_run_profiles_remaining_steps(tmp_path: Path) -> None:
    run_steps(StepProfiler("2:4", [0], tmp_path, 0, CPU), 3, 4, 5)
    assert files(tmp_path) == ["rank_0_steps_3_4.json.gz"]
    assert named(read_trace(tmp_path / "profile" / "rank_0_steps_3_4.json.gz"), "step ") == ["step 3", "step 4"]
    past = StepProfiler("2:4", [0], tmp_path, 0, CPU)
    run_steps(past, 5, 6)
    past.close()
    assert files(tmp_path) == ["rank_0_steps_3_4.json.gz"]


def test_early_end_writes_steps_profiled_so_far(tmp_path: Path) -> None:
    profiler = StepProfiler("2:9", [0], tmp_path, 0, CPU)
    run_steps(profiler, 1, 2, 3)
    profiler.begin(4)
    profiler.close()
    profiler.close()
    assert files(tmp_path) == ["rank_0_steps_2_4.json.gz"]
    assert named(read_trace(tmp_path / "profile" / "rank_0_steps_2_4.json.gz"), "step ") == [
        *("step 2", "step 3", "step 4")
    ]


def test_existing_profiles_are_not_overwritten(tmp_path: Path) -> None:
    for _ in range(3):
        run_steps(StepProfiler("1:1", [0], tmp_path, 0, CPU), 1)
    names = ["rank_0_steps_1_1.1.json.gz", "rank_0_steps_1_1.2.json.gz", "rank_0_steps_1_1.json.gz"]
    assert files(tmp_path) == names
    times = [(tmp_path / "profile" / name).stat().st_mtime_ns for name in names]
    assert times[2] < times[0] < times[1]


def test_unwritable_folder_is_refused_or_loses_profile_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"profile: cannot be written"):
        StepProfiler("1:1", [0], tmp_path / "file", 0, CPU)
    StepProfiler(None, [0], tmp_path / "file", 0, CPU)
    # In the middle of a run, and at its end, where the warning must not hide another error.
    for steps in ((1, 2, 3), (1,)):
        profiler = StepProfiler("1:2", [0], tmp_path, 0, CPU)
        shutil.rmtree(tmp_path / "profile")
        run_steps(profiler, *steps)
        profiler.close()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 2
    for last, line in zip((2, 1), lines, strict=True):
        trace = tmp_path / "profile" / f"rank_0_steps_1_{last}.json.gz"
        assert line.startswith(f"the profile of steps 1 to {last} is lost: {trace}: cannot be written (No such file")


def test_full_disk_loses_profile_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run continues, and the partial trace is removed."""
    profiler = StepProfiler("1:1", [0], tmp_path, 0, CPU)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        run_steps(profiler, 1, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("the profile of steps 1 to 1 is lost: ")
    assert files(tmp_path) == []


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("is_full", [False, True])
def test_memory_history_ends_with_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_full: bool
) -> None:
    calls: list[str] = []

    def dump(path: str) -> None:
        calls.append("dump")
        if is_full:
            raise OSError(28, "No space left on device")
        Path(path).write_text("a snapshot")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **options: calls.append(f"record {enabled}")
    )
    profiler = StepProfiler("2:3", [0], tmp_path, 0, torch.device("cuda", 0))
    run_steps(profiler, 1)
    assert calls == []
    run_steps(profiler, 2)
    assert calls == ["synchronize", "record all"]
    run_steps(profiler, 3, 4)
    if is_full:
        assert "rank_0_steps_2_3_memory.pickle: cannot be written (No space left" in caplog.records[-1].getMessage()
        assert files(tmp_path) == []
    else:
        assert files(tmp_path) == ["rank_0_steps_2_3.json.gz", "rank_0_steps_2_3_memory.pickle"]
        assert (tmp_path / "profile" / "rank_0_steps_2_3_memory.pickle").read_text() == "a snapshot"
    assert calls == ["synchronize", "record all", "dump", "record None"]
