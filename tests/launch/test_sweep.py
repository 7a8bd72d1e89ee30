"""`launch/sweep.py` without Slurm: submitted commands, refused options, skipped runs."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from launch.sweep import main, tokens
from tests.support.bench_settings import error_line
from tests.support.commands import SMALL
from zeco_train.config.schema import load_config

SETTINGS = [*(s for s in SMALL if not s.startswith("data.seq_len")), "train.steps=3"]


def dry_run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[list[str]], list[str]]:
    """The commands of a dry run, as lists of words, and the rows of its table."""
    code = main(["--dry-run", "--folder", str(folder), *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    lines = captured.out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("backend "))
    return [shlex.split(line) for line in lines[:head]], lines[head + 1 :]


def test_one_job_per_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--backends", "dp", "zeco:chain", "--lengths", "1k", "2k", "--nodes", "4", "--ranks-per-node", "2"]
    options = ["--sbatch", "--partition 'a b' --time 9", "--at-once", "2", "--", "sp.size=2", "data.global_batch=8"]
    commands, rows = dry_run(tmp_path, capsys, *grid, *options)
    assert len(commands) == len(rows) == 4
    configs = []
    for number, command in enumerate(commands):
        assert command[0] == "sbatch"
        assert command[command.index("--partition") + 1] == "a b"
        waits = [word for word in command if word.startswith("--dependency=")]
        assert waits == ([f"--dependency=afterany:JOB{number - 1}"] if number >= 2 else [])
        configs.append(load_config(command[command.index("--") + 1 :]))
    # dp keeps sequences whole, so sp.size=2 does not apply to it.
    assert [(c.sp.backend.value, c.sp.size, c.data.seq_len) for c in configs] == [
        *(("dp", -1, length) for length in (1024, 2048)),
        *(("zeco", 2, length) for length in (1024, 2048)),
    ]
    assert {c.sp.all_scan.algorithm.value for c in configs[2:]} == {"chain"}
    assert len({c.run_dir for c in configs}) == 4
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_sp_size_of_experiment_does_not_apply_to_dp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--backends", "dp", "lasp2", "--lengths", "64k", "--ranks-per-node", "8"]
    commands, _ = dry_run(tmp_path, capsys, *grid, "--", "+experiment=gla_1b_16k", "data.global_batch=8")
    sizes = [load_config(command[command.index("--") + 1 :]).sp.size for command in commands]
    assert sizes == [-1, load_config(["+experiment=gla_1b_16k"]).sp.size]
    assert sizes[1] > 1


def test_finished_runs_are_skipped_and_partial_runs_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for backend, steps in (("lasp1", 3), ("lasp2", 2)):
        folder = tmp_path / f"{backend}-1k-1n"
        folder.mkdir()
        rows = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    grid = ["--backends", "lasp1", "lasp2", "zeco", "--lengths", "1k", "--ranks-per-node", "2"]
    commands, rows = dry_run(tmp_path, capsys, *grid, "--", *SETTINGS)
    assert [word for command in commands for word in command if word.startswith("name=")] == [
        "name=lasp2-1k-1n",
        "name=zeco-1k-1n",
    ]
    states = [row.rpartition("1n")[2].strip() for row in rows]
    assert states == ["finished", "would go from step 2", "would go from the start"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--lengths", "2x"], "error: --lengths=2x: must be a number of tokens"),
        (["--lengths", "1k", "--", "sp=dp"], "error: sp=dp: is what the sweep sets"),
        (["--lengths", "1k", "--", "train.stepz=5"], "error: dp-1k-1n: train.stepz"),
        (["--lengths", "1k", "--nodes", "3", "--", "data.global_batch=5"], "error: dp-1k-3n: data.global_batch=5"),
        (["--lengths", "1k", "1", "--backends", "zeco"], "error: zeco-1-1n: data.seq_len=1: must be ≥ "),
        (["--lengths", "1k", "--backends", "ring"], "error: ring-1k-1n: sp=ring"),
        (["--lengths", "1k", "--local", "--nodes", "2"], "error: --nodes=2: must be 1 with --local"),
        (["--lengths", "1k", "--nodes", "0"], "error: --nodes=0: must be ≥ 1"),
        (["--lengths", "1k", "--ranks-per-node", "0"], "error: --ranks-per-node=0: must be ≥ 1"),
        (["--lengths", "1k", "--at-once", "-1"], "error: --at-once=-1: must be ≥ 0"),
        (["--lengths", "1k", "--backends", "dp", "zeco", "dp"], "error: --backends=dp: comes twice"),
        (["--lengths", "1k", "--sbatch", "--comment 'x"], "error: --sbatch=--comment 'x: cannot be split into words"),
    ],
)
def test_invalid_options_are_refused_before_submission(
    options: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_line(["--folder", str(tmp_path / "sweep"), *options], capsys, main, 2).startswith(line)
    assert not (tmp_path / "sweep").exists()


def test_folder_names_are_quoted_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folder names with special characters are passed on exactly; only an interpolation is refused."""
    for name in ('a "b', "a $b%j=,b", "it's", "a\\'b"):
        commands, _ = dry_run(tmp_path / name, capsys, "--lengths", "1k", "--backends", "dp")
        config = load_config(commands[0][commands[0].index("--") + 1 :])
        assert config.run_dir == str(tmp_path / name / "dp-1k-1n")
    folder = tmp_path / "${seed}"
    assert main(["--dry-run", "--lengths", "1k", "--folder", str(folder)]) == 2
    line = f"error: --folder={folder}: must have no ${{ in its path; name another folder\n"
    assert capsys.readouterr() == ("", line)


def test_interrupted_local_sweep_waits_for_current_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal sends Ctrl-C to the run as well: wait until it has saved, and start no further run."""
    start = mock.MagicMock()
    process = start.return_value.__enter__.return_value
    start.return_value.__exit__.return_value = False
    process.wait.side_effect = [KeyboardInterrupt, 130]
    monkeypatch.setattr(subprocess, "Popen", start)
    assert main(["--local", "--lengths", "1k", "2k", "--ranks-per-node", "1", "--folder", str(tmp_path)]) == 130
    assert process.wait.call_count == 2
    assert start.call_count == 1


def test_missing_slurm_or_folder_and_bad_record_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sbatch on the PATH; a folder that cannot be created; an invalid sweep.json."""
    monkeypatch.setenv("PATH", "")
    options = ["--lengths", "1k", "--backends", "dp", "--ranks-per-node", "1"]
    assert main([*options, "--folder", str(tmp_path / "sweep")]) == 1
    assert "not submitted: sbatch: No such file or directory" in capsys.readouterr().out
    assert main([*options, "--folder", "/proc/sweep"]) == 2
    assert capsys.readouterr().err.startswith("error: --folder=/proc/sweep: cannot be made (")
    (tmp_path / "sweep" / "sweep.json").touch()
    assert main([*options, "--folder", str(tmp_path / "sweep")]) == 3
    assert capsys.readouterr().err.endswith("is not what a sweep has left; remove it, or take another --folder\n")


def test_length_suffixes_are_powers_of_1024() -> None:
    assert [tokens(text) for text in ("16k", "1M", "3000")] == [1 << 14, 1 << 20, 3000]
