"""Terminal output and log files of a run."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH
from tests.tracking.test_metrics import metrics
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.logs import close_logging, setup_logging
from zeco_train.system.numbers import compact
from zeco_train.tracking import recorder
from zeco_train.tracking.recorder import ProgressDisplay, summary_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_lines_without_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    display = ProgressDisplay(100)
    display.advance(1)
    display.report(metrics(1, step_seconds=2.0).as_dict())
    # 40 s for 10 steps, including validation and checkpoints: the 89 remaining steps take 356 s.
    now[0] = 40.0
    row = metrics(11, val_loss=5.1, job_tokens_per_second=195.0, memory_gb=3.26, mfu=0.412, hfu=0.4567)
    display.report(row.as_dict(), "of 16 sequences, 1,008 tokens")
    display.note("checkpoint → step 11")
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "step   1/100  loss 5.0000  grad_norm 1.5  lr 3.00e-04  12.3k tokens/s  ETA 0:03:18",
        "step  11/100  loss 5.0000  val_loss 5.1000 (of 16 sequences, 1,008 tokens)  grad_norm 1.5  lr 3.00e-04"
        "  12.3k tokens/s (job 195)  3.3 GB  mfu 41.2%  hfu 45.7%  ETA 0:05:56",
        "checkpoint → step 11",
    ]


def test_progress_bar_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    display = ProgressDisplay(100, step=40)
    display.report(metrics(41, 3.21, mfu=0.412, hfu=0.456).as_dict())
    display.note("a line of its own")
    display.advance(100)
    display.report(metrics(100, 3.0).as_dict())
    display.close()
    shown = stream.getvalue()
    assert "40/100" in shown
    assert "\ra line of its own\n" in shown
    assert "100/100, loss 3.0000  12.3k tokens/s  ETA 0:00:00" in shown.splitlines()[-1]
    assert "mfu 41.2%" in shown
    for name in ("grad_norm", "hfu"):
        assert name not in shown


def test_disabled_display_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(10, enabled=False)
    display.report(metrics(1).as_dict())
    display.note("x")
    display.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.processes
@pytest.mark.slow
def test_closed_pipe_does_not_end_run() -> None:
    script = (
        "import sys; from zeco_train.tracking.recorder import ProgressDisplay\n"
        "display = ProgressDisplay(10000)\n"
        "for step in range(1, 10001): display.report({'step': step, 'loss': 5.0, 'step_seconds': 0.1})\n"
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


@pytest.mark.processes
@pytest.mark.slow
def test_warnings_appear_above_progress_bar(tmp_path: Path) -> None:
    script = (
        "import logging, sys; from zeco_train.lifecycle.logs import setup_logging\n"
        "from zeco_train.tracking.recorder import ProgressDisplay\n"
        "setup_logging(sys.argv[1], 0)\n"
        "display = ProgressDisplay(2)\n"
        "display.report({'step': 1, 'loss': 5.0, 'step_seconds': 0.1})\n"
        "logging.getLogger('zeco_train.x').warning('watch\\n out')\n"
        "display.report({'step': 2, 'loss': 5.0, 'step_seconds': 0.1})\n"
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
        pass  # Linux reports a closed terminal as an error
    os.close(controller)
    assert process.wait(timeout=ENOUGH) == 0
    assert b"\rwarning: watch out\r\n" in shown
    assert b"2/2, loss 5.0000" in shown


def test_summary_line_has_steps_losses_and_folder() -> None:
    rows = [metrics(1, 5.561).as_dict(), metrics(50, 4.0).as_dict(), metrics(100, 3.009).as_dict()]
    assert summary_line(rows, "runs/quickstart", 4321.0) == (
        "100 steps, loss 5.56 → 3.01, 4,321 tokens/s (12,346 within steps), results in runs/quickstart"
    )
    rows[-1]["val_loss"] = 3.1
    assert "loss 5.56 → 3.01 (validation 3.10), " in summary_line(rows, "x", 1.0)
    assert "(validation 3.10 of 2 sequences, 9 tokens), " in summary_line(rows, "x", 1.0, "of 2 sequences, 9 tokens")
    assert "loss nan → 3.01" in summary_line([{**rows[0], "loss": None}, *rows[1:]], "x", 1.0)
    assert summary_line(rows[:1], "x", 1.0).startswith("1 step, loss 5.56 → 5.56")
    assert summary_line([], "x", 0.0) == "no step was logged, results in x"


def test_compact_number_format() -> None:
    shown = {0: "0", 999.4: "999", 999.9: "1.00k", 9994: "9.99k", 9996: "10.0k", 999_700: "1.00M", 2.5e6: "2.50M"}
    assert {value: compact(value) for value in shown} == shown


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    close_logging()
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("_logging_as_before")
def test_rank_0_prints_own_warnings_and_logs_everything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
def test_other_ranks_log_to_file_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for message in ("one", "two"):
        path = setup_logging(tmp_path, 3)
        logging.getLogger("zeco_train").error(message)
    assert capfd.readouterr() == ("", "")
    assert [line.split("rank 3 ")[1] for line in path.read_text().splitlines()] == [
        "ERROR zeco_train: one",
        "ERROR zeco_train: two",
    ]


@pytest.mark.usefixtures("_logging_as_before")
def test_unwritable_log_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*cannot be written"):
        setup_logging(tmp_path, 0)
