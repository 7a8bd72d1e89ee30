"""metrics.jsonl, trackers, progress, log files and the picture of a run."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zeco_train.errors import ConfigError, DataError
from zeco_train.loggers import LoggerConfig, LoggerKind, LoggerMode, NoLogger, WandbLogger, build_logger
from zeco_train.logs import close_logging, setup_logging
from zeco_train.metrics import MetricsWriter, StepMetrics, read_metrics
from zeco_train.plot import plot_run
from zeco_train.progress import ProgressDisplay, compact, summary_line

REPOSITORY = Path(__file__).resolve().parent.parent


def metrics(step: int, loss: float = 5.0, **values: object) -> StepMetrics:
    row = StepMetrics(step, loss, 1.5, 3e-4, 1000 * step, 12345.6, 6172.8, 0.081, 0.001)
    return replace(row, **values)  # type: ignore[arg-type]


def write_rows(path: Path, *rows: StepMetrics) -> Path:
    with MetricsWriter(path) as writer:
        for row in rows:
            writer.write(row)
    return path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- metrics.jsonl ---


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


def test_rows_are_readable_before_close(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write(metrics(step))
        assert [row["step"] for row in read_metrics(writer.path)] == [*range(1, step + 1)]
    writer.close()
    writer.close()


def test_last_row_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, metrics(10, 5.0), metrics(20, 4.0), metrics(30, 3.0))
    write_rows(path, metrics(20, 4.5), metrics(30, 3.5), metrics(40, 2.5))
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(10, 5.0), (20, 4.5), (30, 3.5), (40, 2.5)]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"{", b'{"step": 2}', b"x" * 200_000, b"\x00" * 100])
def test_torn_last_line_is_ignored_and_repaired(tmp_path: Path, torn: bytes) -> None:
    path = write_rows(tmp_path / "metrics.jsonl", metrics(1))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [row["step"] for row in read_metrics(path)] == [1]
    with MetricsWriter(path) as writer:
        assert path.read_bytes() == whole
        writer.write(metrics(2, 4.0))
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 5.0), (2, 4.0)]


def test_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1')
    assert read_metrics(path) == []
    MetricsWriter(path).close()
    assert path.read_bytes() == b""


def test_non_finite_values_are_null(tmp_path: Path) -> None:
    row = metrics(1, float("nan"), grad_norm=float("inf"), extra={"norms": [1.0, float("-inf")]})
    path = write_rows(tmp_path / "metrics.jsonl", row)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads(path.read_text(), parse_constant=refuse)
    assert (parsed["loss"], parsed["grad_norm"], parsed["norms"]) == (None, None, [1.0, None])


def test_extra_may_not_hide_a_column() -> None:
    with pytest.raises(ValueError, match="lr, step"):
        metrics(1, extra={"step": 3, "lr": 1.0, "mine": 2}).as_dict()


def test_a_killed_writer_loses_no_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import os, signal, sys; from tests.test_metrics import *\n"
        "writer = MetricsWriter(sys.argv[1])\n"
        "for step in range(1, 101): writer.write(metrics(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=REPOSITORY, timeout=60)
    assert done.returncode == -9
    assert [row["step"] for row in read_metrics(path)] == [*range(1, 101)]


def test_foreign_lines_are_refused_by_number(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "metrics.jsonl", metrics(1))
    with path.open("a") as file:
        file.write("[1, 2]\n")
    with pytest.raises(DataError, match="line 2 is not a row"):
        read_metrics(path)
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_unwritable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be written"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")
    if Path("/dev/full").exists():
        (tmp_path / "full.jsonl").symlink_to("/dev/full")
        with pytest.raises(DataError, match="No space left"):
            write_rows(tmp_path / "full.jsonl", metrics(1))


# --- progress ---


def test_plain_lines() -> None:
    stream, now = io.StringIO(), [0.0]
    display = ProgressDisplay(100, stream=stream, clock=lambda: now[0])
    display.advance(1)
    display.report(metrics(1, step_seconds=2.0).as_dict())
    # 40 s for 10 steps, validation and checkpoints included: the 89 steps left take 356 s.
    now[0] = 40.0
    display.report(metrics(11, val_loss=5.1, memory_gb=3.26, mfu=0.412).as_dict())
    display.note("checkpoint → step 11")
    display.close()
    assert stream.getvalue().splitlines() == [
        "step   1/100  loss 5.0000  grad_norm 1.5  lr 3.00e-04  12.3k tokens/s  ETA 0:03:18",
        "step  11/100  loss 5.0000  val_loss 5.1000  grad_norm 1.5  lr 3.00e-04  12.3k tokens/s  3.3 GB  mfu 41.2%"
        "  ETA 0:05:56",
        "checkpoint → step 11",
    ]


def test_bar_on_a_terminal() -> None:
    stream = Terminal()
    display = ProgressDisplay(100, step=40, stream=stream)
    display.report(metrics(41, 3.21).as_dict())
    display.note("a line of its own")
    display.advance(100)
    display.report(metrics(100, 3.0).as_dict())
    display.close()
    shown = stream.getvalue()
    assert "40/100" in shown
    assert "\ra line of its own\n" in shown
    assert "100/100, loss 3.0000  12.3k tokens/s  ETA 0:00:00" in shown.splitlines()[-1]
    assert "grad_norm" not in shown


def test_other_ranks_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(10, enabled=False)
    display.report(metrics(1).as_dict())
    display.note("x")
    display.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_poor_encodings_do_not_end_a_run(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    ProgressDisplay(10, stream=stream).note("5.00 → 3.00")
    assert stream.buffer.getvalue() == b"5.00 ? 3.00\n"  # type: ignore[attr-defined]


def test_a_closed_pipe_does_not_end_a_run() -> None:
    script = (
        "from tests.test_metrics import *\n"
        "display = ProgressDisplay(10000)\n"
        "for step in range(1, 10001): display.report(metrics(step).as_dict())\n"
        "print('the last line of a run')\n"
        "print('done', file=sys.stderr)"
    )
    command = f'{sys.executable} -c "$SCRIPT" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, env={**os.environ, "SCRIPT": script}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step     1/10000")
    assert done.stderr.splitlines()[-1] == "done"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_real_terminal_gets_warnings_above_the_bar(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.test_metrics import *\n"
        "setup_logging(sys.argv[1], 0)\n"
        "display = ProgressDisplay(2)\n"
        "display.report(metrics(1).as_dict())\n"
        "logging.getLogger('zeco_train.x').warning('watch\\n out')\n"
        "display.report(metrics(2).as_dict())\n"
        "display.close()\n"
    )
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:
        pass  # how Linux says that the other end of a terminal is closed
    os.close(controller)
    assert process.wait(timeout=60) == 0
    assert b"\rwarning: watch out\r\n" in shown
    assert b"2/2, loss 5.0000" in shown


def test_summary_line() -> None:
    rows = [metrics(1, 5.561).as_dict(), metrics(50, 4.0).as_dict(), metrics(100, 3.009).as_dict()]
    assert summary_line(rows, "runs/quickstart") == (
        "100 steps, loss 5.56 → 3.01, 12,346 tokens/s, results in runs/quickstart"
    )
    rows[-1]["val_loss"] = 3.1
    assert "loss 5.56 → 3.01 (validation 3.10), " in summary_line(rows, "x")
    assert "loss nan → 3.01" in summary_line([{**rows[0], "loss": None}, *rows[1:]], "x")
    assert summary_line(rows[:1], "x").startswith("1 step, loss 5.56 → 5.56")
    assert summary_line([], "x") == "no step was logged, results in x"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.4, "999"), (999.9, "1.00k"), (9994, "9.99k"), (9996, "10.0k"), (99960, "100k"), (2.5e6, "2.50M")],
)
def test_compact(value: float, text: str) -> None:
    assert compact(value) == text


# --- log files ---


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    close_logging()
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("_logging_as_before")
def test_log_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own, other, torch_like = (logging.getLogger(name) for name in ("zeco_train.test", "other", "torch.zeco_test"))
    handler = logging.StreamHandler(sys.stderr)
    torch_like.addHandler(handler)
    torch_like.propagate = False
    path = setup_logging(tmp_path, 0)
    try:
        own.info("quiet")
        own.warning("first\nsecond")
        other.warning("chatter")
        torch_like.warning("from torch")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("deprecated", stacklevel=1)
    finally:
        torch_like.removeHandler(handler)
    assert capfd.readouterr() == ("", "warning: first second\n")
    text = path.read_text()
    assert path == tmp_path / "logs" / "rank_0.log"
    for expected in ("rank 0 INFO zeco_train.test: quiet", "first\nsecond", "chatter", "from torch", ": deprecated"):
        assert text.count(expected) == 1


@pytest.mark.usefixtures("_logging_as_before")
def test_other_ranks_log_to_their_file_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for message in ("one", "two"):
        path = setup_logging(tmp_path, 3)
        logging.getLogger("zeco_train").error(message)
    assert capfd.readouterr() == ("", "")
    assert [line.split("rank 3 ")[1] for line in path.read_text().splitlines()] == [
        "ERROR zeco_train: one",
        "ERROR zeco_train: two",
    ]


@pytest.mark.usefixtures("_logging_as_before")
def test_unwritable_log_folder_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*cannot be written"):
        setup_logging(tmp_path, 0)


# --- the picture ---


def test_plot(tmp_path: Path) -> None:
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


def test_plot_of_nothing_finite(tmp_path: Path) -> None:
    nan = float("nan")
    write_rows(tmp_path / "metrics.jsonl", metrics(1, nan, tokens_per_second=nan))
    picture = plot_run(tmp_path)
    assert picture is not None
    picture.unlink()
    picture.mkdir()
    with pytest.raises(DataError, match=r"loss\.png: cannot be written"):
        plot_run(tmp_path)


# --- trackers ---


@pytest.mark.parametrize("name", ["none", "wandb"])
def test_yaml_fits_the_schema(name: str) -> None:
    composed = OmegaConf.merge(
        OmegaConf.structured(LoggerConfig), OmegaConf.load(REPOSITORY / "configs" / "logger" / f"{name}.yaml")
    )
    config = OmegaConf.to_object(composed)
    assert isinstance(config, LoggerConfig)
    config.validate()
    assert config.kind is LoggerKind[name]
    assert config.mode is LoggerMode.offline


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"project": "a/b"}, "logger.project=a/b: must have"),
        ({"project": ""}, "logger.project=: must have"),
        ({"tags": ["fine", "x" * 65]}, "logger.tags"),
    ],
)
def test_refused_settings(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoggerConfig(kind=LoggerKind.wandb, **values).validate()
    LoggerConfig(**values).validate()


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only a folder of this name is there, as an offline run leaves it.
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"logger=wandb: package wandb is not installed; pip install wandb==0.31"):
        LoggerConfig(kind=LoggerKind.wandb).validate()


def test_only_rank_0_tracks(tmp_path: Path) -> None:
    config = LoggerConfig(kind=LoggerKind.wandb)
    assert isinstance(build_logger(config, tmp_path, 0), WandbLogger)
    assert isinstance(build_logger(config, tmp_path, 1), NoLogger)
    untracked = build_logger(LoggerConfig(), tmp_path, 0)
    assert untracked.start({}, "kept") == "kept"
    untracked.log(1, {"loss": 1.0})
    untracked.finish()


def test_tracker_errors_do_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, row: dict) -> None:
            raise RuntimeError("server on fire")

    tracker = WandbLogger(LoggerConfig(kind=LoggerKind.wandb), tmp_path)
    tracker._run = Broken()
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    (record,) = caplog.records
    assert record.name == "zeco_train.loggers"
    assert "step 1: RuntimeError: server on fire" in record.getMessage()


# W&B starts a process and keeps state in the interpreter: these run in one of their own.
_OFFLINE = """
import sys; from zeco_train.loggers import *
ids = []
for run_id in (None, "from-checkpoint"):
    tracker = build_logger(LoggerConfig(kind=LoggerKind.wandb, tags=["a"], group="g"), sys.argv[1], 0)
    ids.append(tracker.start({"sp": {"size": 2}}, run_id))
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0 / step, "val_loss": float("nan")})
    tracker.finish()
    tracker.finish(1)
print(*ids)
"""

_ONLINE = """
import sys; from zeco_train.loggers import *; from zeco_train.errors import ConfigError
try:
    WandbLogger(LoggerConfig(kind=LoggerKind.wandb, mode=LoggerMode.online), Path(sys.argv[1])).start({}, None)
except ConfigError as error:
    print(error)
"""


def run_wandb(script: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    # No account of the machine's user, and nothing written to the home folder.
    environment |= {"NETRC": str(run_dir / "netrc"), "HOME": str(run_dir / "home"), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", script, str(run_dir)], env=environment, capture_output=True, text=True, timeout=100
    )


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = run_wandb(_OFFLINE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.split()
    assert second == "from-checkpoint"
    files = sorted(path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert files == sorted([f"run-{first}.wandb", "run-from-checkpoint.wandb"])
    for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        content = path.read_bytes()
        assert b"val_loss" in content
        assert tmp_path.name.encode() in content


def test_wandb_online_without_an_account(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = run_wandb(_ONLINE, tmp_path)
    assert done.stdout == "logger.mode=online: W&B knows no account here; wandb login, or mode offline\n", done.stderr
