"""metrics.jsonl, the plot of a run, and recorded utilisation."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from zeco_train.checkpoint.files import Progress
from zeco_train.config.schema import load_config, to_plain
from zeco_train.errors import DataError
from zeco_train.tracking.charts import plot_run
from zeco_train.tracking.loggers import ExperimentLogger
from zeco_train.tracking.metrics import LineWriter, StepMetrics, StepNumbers, peak_flops, read_metrics
from zeco_train.tracking.recorder import Recorder, StepResult


def metrics(step: int, loss: float = 5.0, **values: object) -> StepMetrics:
    rates = {"tokens_per_second": 12345.6, "tokens_per_second_per_device": 6172.8}
    columns = {"grad_norm": 1.5, "lr": 3e-4, "tokens": 1000 * step, "step_seconds": 0.081, "data_seconds": 0.001}
    return StepMetrics(**{"step": step, "loss": loss, **columns, **rates, **values})  # type: ignore[arg-type]


def write_rows(path: Path, *rows: StepMetrics) -> Path:
    with LineWriter(path) as writer:
        for row in rows:
            writer.append(row.as_dict())
    return path


def test_rows_keep_every_digit(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    path = write_rows(tmp_path / "new" / "metrics.jsonl", metrics(1, loss, val_loss=1 / 3, extra={"ids": [3, 4]}))
    (line,) = path.read_text().splitlines()
    row = json.loads(line)
    assert row["loss"] == loss
    assert row["val_loss"] == 1 / 3
    assert row["ids"] == [3, 4]
    assert "mfu" not in row
    assert list(row)[:9] == [
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tokens_per_second_per_device"),
        *("step_seconds", "data_seconds"),
    ]
    assert read_metrics(path) == [row]


def test_last_row_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, metrics(10, 5.0), metrics(20, 4.0), metrics(30, 3.0))
    write_rows(path, metrics(20, 4.5), metrics(30, 3.5), metrics(40, 2.5))
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(10, 5.0), (20, 4.5), (30, 3.5), (40, 2.5)]


@pytest.mark.parametrize("steps", [[1], []])
@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"{", b'{"step": 2}', b"x" * 200_000, b"\x00" * 100])
def test_torn_last_line_is_ignored_and_repaired(tmp_path: Path, torn: bytes, steps: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    write_rows(path, *map(metrics, steps))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [row["step"] for row in read_metrics(path)] == steps
    with LineWriter(path) as writer:
        assert path.read_bytes() == whole
        writer.append(metrics(2, 4.0).as_dict())
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [*((step, 5.0) for step in steps), (2, 4.0)]


def test_non_finite_values_are_stored_as_null(tmp_path: Path) -> None:
    row = metrics(1, float("nan"), grad_norm=float("inf"), extra={"norms": [1.0, float("-inf")]})
    path = write_rows(tmp_path / "metrics.jsonl", row)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads(path.read_text(), parse_constant=refuse)
    assert (parsed["loss"], parsed["grad_norm"], parsed["norms"]) == (None, None, [1.0, None])


def test_extra_may_not_override_columns() -> None:
    with pytest.raises(ValueError, match="lr, step"):
        metrics(1, extra={"step": 3, "lr": 1.0, "mine": 2}).as_dict()


def _write_rows_and_die(rank: int, world_size: int, path: str) -> None:
    writer = LineWriter(path)
    for step in range(1, 101):
        writer.append({"step": step, "loss": 5.0})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_killed_writer_loses_no_complete_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert run_distributed(_write_rows_and_die, 1, str(path), may_die=[0]) == [None]
    assert [row["step"] for row in read_metrics(path)] == [*range(1, 101)]


def test_unwritable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be written"):
        LineWriter(tmp_path / "file" / "metrics.jsonl")
    if Path("/dev/full").exists():
        (tmp_path / "full.jsonl").symlink_to("/dev/full")
        with pytest.raises(DataError, match="No space left"):
            write_rows(tmp_path / "full.jsonl", metrics(1))


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_plot_is_redrawn_with_new_rows(tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert plot_run(tmp_path) is None
    path = write_rows(tmp_path / "metrics.jsonl", metrics(1))
    sizes = []
    more = [metrics(step, 5 - step / 100, val_loss=4.0 if step % 50 == 0 else None) for step in range(1, 401)]
    for rows in ([], [metrics(2, float("nan"))], [metrics(2, 4.0), metrics(1, 4.9)], more):
        write_rows(path, *rows)
        picture = plot_run(tmp_path)
        assert picture == tmp_path / "loss.png"
        assert imread(picture).std() > 0.01
        sizes.append(picture.read_bytes())
    assert len(set(sizes)) == len(sizes)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_plot_without_finite_values(tmp_path: Path) -> None:
    nan = float("nan")
    write_rows(tmp_path / "metrics.jsonl", metrics(1, nan, tokens_per_second=nan))
    picture = plot_run(tmp_path)
    assert picture is not None
    picture.unlink()
    picture.mkdir()
    with pytest.raises(DataError, match=r"loss\.png: cannot be written"):
        plot_run(tmp_path)


def started(
    run_dir: Path, total_steps: int, rank: int = 0, world_size: int = 1, device: str = "cpu", **settings: Any
) -> tuple[Recorder, Progress]:
    """1,000 tokens a step."""
    mesh: Any = SimpleNamespace(rank=rank, world_size=world_size, is_main=rank == 0, device=torch.device(device))
    recorder, progress = Recorder(run_dir, mesh, ExperimentLogger(), total_steps, 1000, 3e9, **settings), Progress()
    recorder.start(progress, to_plain(load_config(["sp.size=1"])), {})
    return recorder, progress


def record(run_dir: Path, steps: list[StepResult], **settings: Any) -> list[dict[str, Any]]:
    """The rows of a run that logs every second step."""
    recorder, progress = started(run_dir, len(steps), **settings)
    for result in steps:
        progress.advance(4, 1000)
        recorder.add(result, progress)
        if progress.step % 2 == 0:
            recorder.write(progress, None)
            recorder.write(progress, None)  # no row without a new step
    recorder.close()
    return read_metrics(run_dir / "metrics.jsonl")


def step_result(seconds: float = 0.5, data_seconds: float = 0.0, exposed: float | None = None) -> StepResult:
    return StepResult(StepNumbers(loss=5.0, grad_norm=1.5), 3e-4, seconds, data_seconds, [0], exposed)


def test_rows_tell_the_time_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four steps of 0.5 s with two validations of 3 s and saves of 1 s: 4 s and 10 s for two steps."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recorder, progress = started(tmp_path, total_steps=4)
    for step in (1, 2, 3, 4):
        now[0] += 0.5
        progress.advance(4, 1000)
        recorder.add(step_result(), progress)
        if step % 2 == 0:
            with recorder.timing("validation_seconds"):
                now[0] += 3
            recorder.write(progress, None)
        for _ in range(step):
            with recorder.timing("save_seconds"):
                now[0] += 1
    summary = recorder.summarise()
    recorder.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["tokens_per_second"] for row in rows] == [2000, 2000]
    assert [row["job_tokens_per_second"] for row in rows] == [2000 / 5, 2000 / 9]
    assert [row["validation_seconds"] for row in rows] == [1.5, 1.5]
    assert [row["save_seconds"] for row in rows] == [0.5, 2.5]
    assert summary is not None
    assert " 222 tokens/s (2,000 within steps), " in summary


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        *(("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA H100 80GB HBM3", 989e12)),
        *(("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", None)),
    ],
)
def test_peak_flops_are_known_for_bf16_only(name: str, peak: float | None) -> None:
    assert peak_flops(name, torch.bfloat16) == peak
    for dtype in (torch.float32, torch.float64, None):
        assert peak_flops(name, dtype) is None


def test_device_memory_mfu_and_hfu_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12_500_000_000)
    settings = {"hardware_flops_per_token": 4e9, "device": "cuda"}
    for dtype in (torch.bfloat16, torch.float32):
        steps = [step_result(0.5), step_result(1.5)]
        (row,) = record(tmp_path / str(dtype), steps, dtype=dtype, **settings)
        assert row["memory_gb"] == 12.5
        if dtype is torch.bfloat16:
            # A thousand tokens a second.
            assert row["mfu"] == pytest.approx(1000 * 3e9 / 989e12)
            assert row["hfu"] == pytest.approx(1000 * 4e9 / 989e12)
        else:
            assert not {"mfu", "hfu"} & set(row)
    (row,) = record(tmp_path / "cpu", [step_result()] * 2, dtype=torch.bfloat16, hardware_flops_per_token=4e9)
    assert not {"mfu", "hfu", "memory_gb", "comm_exposed_seconds"} & set(row)


def rows_of_two_ranks(rank: int, world_size: int, run_dir: str) -> list[dict[str, Any]]:
    # A row has the mean over the measured steps, then the maximum over ranks.
    waits = {
        0: [(0.2, 0.01), (0.4, 0.03), (0.0, None), (0.0, None), (0.0, None), (0.0, None)],
        1: [(0.1, 0.05), (0.1, None), (0.6, 0.0), (0.2, 0.0), (0.0, None), (0.0, None)],
    }
    steps = [step_result(1.0, data, exposed) for data, exposed in waits[rank]]
    return record(Path(run_dir), steps, rank=rank, world_size=world_size)


def test_rows_have_longest_waits_of_all_ranks(tmp_path: Path) -> None:
    run_distributed(rows_of_two_ranks, 2, str(tmp_path))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["data_seconds"] for row in rows] == pytest.approx([0.3, 0.4, 0.0])
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row.get("comm_exposed_seconds") for row in rows] == [0.05, 0.0, None]
    assert all(row["tokens_per_second_per_device"] == 500 for row in rows)
