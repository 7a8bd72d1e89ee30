"""Experiment trackers; W&B for real, offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zeco_train.errors import ConfigError
from zeco_train.loggers import LoggerConfig, LoggerKind, LoggerMode, NoLogger, WandbLogger, build_logger

REPOSITORY = Path(__file__).resolve().parent.parent


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
    done = run_wandb(_ONLINE, tmp_path)
    assert done.stdout == "logger.mode=online: W&B knows no account here; wandb login, or mode offline\n", done.stderr
