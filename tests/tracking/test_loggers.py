"""Experiment trackers: W&B and TensorBoard; lab/campaigns/cases/test_wandb_server.py has a run tracked online."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.commands import REPOSITORY, check_line, train_here
from tests.support.waiting import ENOUGH
from zeco_train.errors import ConfigError
from zeco_train.tracking.loggers import (
    ExperimentLogger,
    LoggerConfig,
    LoggerKind,
    LoggerMode,
    TensorBoardLogger,
    WandbLogger,
    build_logger,
)
from zeco_train.tracking.metrics import Layout, Start, length_name

LAYOUT = Layout("zeco", "gla_tiny", 1 << 20, 4, 8, "zero2", 1, "fp32", "a CPU")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"project": "a/b"}, "logger.project=a/b: must have"),
        ({"project": ""}, "logger.project=: must have"),
        ({"tags": ["fine", "x" * 65]}, "logger.tags"),
        ({"group": ""}, "logger.group=: must have"),
        ({"job_type": "x" * 129}, "logger.job_type="),
        ({"timeout_seconds": 0.0}, "logger.timeout_seconds=0.0: must be from 1 to 3600"),
    ],
)
def test_invalid_settings_are_refused_if_tracker_is_on(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoggerConfig(kind=LoggerKind.wandb, **values).validate()
    LoggerConfig(**values).validate()


@pytest.mark.parametrize("kind", [LoggerKind.wandb, LoggerKind.tensorboard])
def test_missing_package_is_named(kind: LoggerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder of this name, as an offline run creates, is not the package.
    (tmp_path / kind.value).mkdir()
    monkeypatch.delitem(sys.modules, kind.value, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=rf"logger={kind.value}: package {kind.value} is not installed; pip install"):
        LoggerConfig(kind=kind).validate()


def test_logger_timeout_must_be_below_parallel_timeout() -> None:
    outcome = train_here("logger=wandb", "logger.timeout_seconds=300", "parallel.timeout_seconds=300")
    check_line(outcome, 2, "logger.timeout_seconds=300.0: must be < parallel.timeout_seconds=300")


def test_only_rank_0_tracks(tmp_path: Path) -> None:
    for kind, expected in ((LoggerKind.wandb, WandbLogger), (LoggerKind.tensorboard, TensorBoardLogger)):
        assert isinstance(build_logger(LoggerConfig(kind=kind), tmp_path, 0), expected)
        assert type(build_logger(LoggerConfig(kind=kind), tmp_path, 1)) is ExperimentLogger
    untracked = build_logger(LoggerConfig(), tmp_path, 0)
    assert untracked.begin({}, Start(0, LAYOUT, {}), "kept") == "kept"
    untracked.log(1, {"loss": 1.0})
    untracked.finish()
    assert not [*tmp_path.iterdir()]


def test_tracker_errors_do_not_end_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, row: dict) -> None:
            raise RuntimeError("server on fire")

        add_text = add_scalar = close = log

    wandb, board = WandbLogger(LoggerConfig(kind=LoggerKind.wandb), tmp_path), TensorBoardLogger(tmp_path)
    for tracker in (wandb, board):
        tracker._run = tracker._writer = Broken()  # type: ignore[attr-defined]
        for step in (1, 2, 3):
            tracker.log(step, {"loss": 1.0})
    board.finish()
    first, second = caplog.records
    assert (first.name, second.name) == ("zeco_train.tracking.loggers",) * 2
    assert "step 1: RuntimeError: server on fire" in first.getMessage()
    assert "step 1: TypeError" in second.getMessage()


def test_layout_tags_and_group() -> None:
    assert LAYOUT.tags == ["sp=zeco", "sp.size=4", "seq_len=1M", "model=gla_tiny", "strategy=zero2", "devices=8"]
    assert LAYOUT.group == "gla_tiny-1M"
    assert LAYOUT.tokens_per_device == 1 << 18
    assert [length_name(n) for n in (1, 1000, 1024, 16384, 3 << 19, 1 << 23)] == [
        *("1", "1000", "1k", "16k", "1536k", "8M"),
    ]
    assert all(len(tag) <= 64 for tag in Layout("zeco", "m" * 100, 1, 1, 1).tags)


# Runs in a separate interpreter, since W&B starts a process and keeps state. The second start finds the run's id only
# in its folder, as after a kill before the first checkpoint.
_OFFLINE = """
import sys; from zeco_train.tracking.loggers import *; from zeco_train.tracking.metrics import *
layout = Layout("zeco", "gla_tiny", 1 << 20, 4, 8, "zero2", 1, "fp32", "a CPU")
ids = []
for first, last in ((1, 5), (3, 6)):
    tracker = build_logger(LoggerConfig(kind=LoggerKind.wandb, tags=["a", "sp=zeco"]), sys.argv[1], 0)
    start = Start(first - 1, layout, {"commit": "abc+", "dirty": True})
    ids.append(tracker.begin({"sp": {"size": 2}, "model": {"name": "gla_tiny"}}, start, None))
    for step in range(first, last):
        tracker.log(step, {"loss": 1.0 / step, "tokens_per_second_per_device": 10.0 * step, "val_loss": float("nan")})
    tracker.finish(75 if first == 1 else 0)
    tracker.finish(1)
print(*ids)
"""


def run_python(command: list[str], home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the user's W&B account and with a temporary home folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"NETRC": str(home / "netrc"), "HOME": str(home), "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=ENOUGH)


_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7


def records(path: Path) -> Iterator[Any]:
    """The messages (`wandb_internal_pb2.Record`) of a run-*.wandb file: a log in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content.startswith(b":W&B"), path
    position, message = _FILE_HEADER, b""
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        message += content[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        # 1: whole record; 2, 3, 4: its first, middle and last part.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def history(path: Path) -> list[dict[str, Any]]:
    rows = [record.history for record in records(path) if record.HasField("history")]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def run_record(path: Path) -> Any:
    return next(record.run for record in records(path) if record.HasField("run"))


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """The id of an offline run, and the files of its two starts."""
    run_dir = tmp_path_factory.mktemp("runs") / "a-run"
    run_dir.mkdir()
    done = run_python(["-c", _OFFLINE, str(run_dir)], tmp_path_factory.mktemp("home"))
    assert (done.returncode, done.stderr) == (0, "")
    run_id, again = done.stdout.split()
    assert run_id == again
    return run_id, sorted(run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))


@pytest.mark.processes
@pytest.mark.slow
def test_wandb_offline_runs_share_id_and_layout(offline: tuple[str, list[Path]]) -> None:
    run_id, (first, second) = offline
    run = run_record(second)
    assert (run.run_id, run.run_group, run.job_type, run.display_name) == (run_id, "gla_tiny-1M", "train", "a-run")
    assert list(run.tags) == ["a", *LAYOUT.tags]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["sp"] == {"size": 2}
    assert config["layout"] == LAYOUT.as_dict()
    assert config["environment"] == {"commit": "abc+", "dirty": True}

    # The first start was preempted (exit code 75).
    assert [any(r.HasField("preempting") for r in records(path)) for path in (first, second)] == [True, False]
    ends = [[r.exit.exit_code for r in records(path) if r.HasField("exit")] for path in (first, second)]
    assert ends == [[75], [0]]

    rows = history(second)
    assert [row["step"] for row in rows] == [3, 4, 5]
    # The median excludes the first row of a start, which includes compilation.
    assert [row["tokens_per_second_per_device_median"] for row in rows] == [30.0, 40.0, 45.0]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    tags: dict[str, Any] = events.Tags()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}


def test_tensorboard_of_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    # As if killed in step 5: training resumes from the checkpoint of step 4.
    for before, last in ((0, 5), (4, 7)):
        board = build_logger(LoggerConfig(kind=LoggerKind.tensorboard), tmp_path, 0)
        assert board.begin({"seed": 0}, Start(before, LAYOUT, {}), "kept") == "kept"
        for step in range(before + 1, last + 1):
            board.log(step, {"step": step, "loss": step + before, "mfu": 0.5, "nonfinite": "text"})
        board.finish()
    shown = scalars(tmp_path / "tensorboard")
    assert shown == {
        "loss": [(1, 1), (2, 2), (3, 3), (4, 4), (5, 9), (6, 10), (7, 11)],
        "mfu": [(n, 0.5) for n in range(1, 8)],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "refused"), [("returned error 403: no", True), ("no route to host", False)])
def test_a_refusal_ends_the_start_and_a_lost_server_does_not(
    problem: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    begin = mock.Mock(side_effect=[wandb.errors.CommError(problem), mock.MagicMock()])
    for name, stub in (("setup", mock.Mock()), ("login", lambda **_: True), ("teardown", mock.Mock()), ("init", begin)):
        monkeypatch.setattr(wandb, name, stub)
    tracker = WandbLogger(LoggerConfig(kind=LoggerKind.wandb, mode=LoggerMode.online), tmp_path)
    if refused:
        with pytest.raises(ConfigError, match=r"^logger.mode=online: W&B cannot start \(returned error 403: no\)"):
            tracker.begin({}, Start(0, LAYOUT, {}), None)
    else:
        tracker.begin({}, Start(0, LAYOUT, {}), None)
    assert [call.kwargs["mode"] for call in begin.call_args_list] == (["online"] if refused else ["online", "offline"])
