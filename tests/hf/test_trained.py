"""Trained models are found in runs, checkpoints and exports, and load on any split."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from data.tokenizer import load_tokenizer
from models.mixer_registry import DEFAULT_CONFIG
from tests.data.test_prepare import hugging_face
from tests.support.distributed import run_distributed
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import Device, host_group
from zeco_train.errors import ConfigError, DataError
from zeco_train.export import ExportSettings, export
from zeco_train.hf.trained import Trained, find_trained, load_trained
from zeco_train.hf.weights import load_weights
from zeco_train.lifecycle.join import Launch
from zeco_train.training.build import build_model
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

__all__ = ["hugging_face"]


def _load_different(rank: int, world_size: int, checkpoints: str, exports: str) -> None:
    config = find_trained(f"{checkpoints}/latest").configure([])
    mesh = join_ranks(config, Launch(rank, world_size, rank))
    name = f"step_{rank + 1:08}"
    for folder, found in (
        (checkpoints, r"checkpoint=step_00000002: rank 1 differs, rank 0 has step_00000001"),
        (exports, r"export of step=2: rank 1 differs, rank 0 has 1"),
    ):
        with pytest.raises(ConfigError, match=rf"^{found}; name one step_… folder, or one export, for all ranks$"):
            load_trained(find_trained(f"{folder}/{name}"), mesh, dtype=Dtype.fp32, strategy=Strategy.ddp)
        # The same check in training with checkpoint.load.
        model = build_model(config.model, config.train, Strategy.ddp, mesh, seed=0)
        with pytest.raises(ConfigError, match=found):
            load_weights(Path(folder, name), model, mesh, host_group(mesh))


@pytest.mark.slow
def test_different_checkpoints_across_ranks_are_refused(run: Path, tmp_path: Path) -> None:
    for name in ("step_00000001", "step_00000002"):
        export(f"{run}/checkpoints/{name}", tmp_path / name, ExportSettings())
    run_distributed(_load_different, 2, f"{run}/checkpoints", str(tmp_path))


def test_overrides_apply_on_top_of_run_configuration(run: Path) -> None:
    trained = find_trained(str(run))
    config = trained.configure(["data.seq_len=128", "sp=zeco"])
    assert (config.data.seq_len, config.data.global_batch) == (128, 4)
    assert config.sp.backend.value == "zeco"
    assert trained.configure([]).sp.backend.value == "lasp2"
    assert trained.configure(["data=tokens", "data.path=other"]).data.seq_len == 64
    assert trained.configure(["data=tokens", "data.path=other", "data.seq_len=128"]).data.seq_len == 128
    # Settings of the training machine are reset.
    assert (config.sp.size, config.train.device) == (-1, Device.auto)
    # Torch's DDP trains only, and not in bf16.
    assert trained.config is not None
    by_torch = dataclasses.replace(trained.config.parallel, strategy=Strategy.torch_ddp)
    trained_by_torch = dataclasses.replace(trained, config=dataclasses.replace(trained.config, parallel=by_torch))
    assert trained_by_torch.configure(["train.dtype=bf16"]).parallel.strategy is Strategy.ddp
    with pytest.raises(ConfigError, match=r"model.num_layers=3: is decided by the trained model"):
        trained.configure(["model.num_layers=3"])
    with pytest.raises(ConfigError, match=r"data.seq_lne=3: unknown key; did you mean data.seq_len"):
        trained.configure(["data.seq_lne=3"])


def test_places_in_stored_configurations_are_dropped(run: Path, tmp_path: Path) -> None:
    """A stranger's configuration chooses no folder to write to, and no weights."""
    stranger = shutil.copytree(run, tmp_path / "run", symlinks=True)
    values = yaml.safe_load((stranger / "config.yaml").read_text())
    values["run_dir"] = values["data"]["cache_dir"] = values["checkpoint"]["load"] = "/home/user/thesis"
    (stranger / "config.yaml").write_text(yaml.safe_dump(values))
    exported = tmp_path / "exported"
    export(str(stranger), exported, ExportSettings())
    assert "thesis" not in (exported / "zeco_train.json").read_text()
    origin = json.loads((exported / "zeco_train.json").read_text())
    (exported / "zeco_train.json").write_text(json.dumps({**origin, "config": values}))
    for folder in (stranger, exported):
        trained = find_trained(str(folder))
        config = trained.configure([])
        assert (config.run_dir, config.data.cache_dir) == (str(trained.path), None)
        assert config.checkpoint.load is None
        assert trained.configure(["data.cache_dir=mine"]).data.cache_dir == "mine"


def test_settings_that_only_another_version_has_are_named(
    run: Path, export_of_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = shutil.copytree(export_of_run, tmp_path / "out") / "zeco_train.json"
    origin = json.loads(file.read_text())
    origin["config"]["train"]["gone"] = origin["config"]["\x1bold"] = {"key": 1}
    file.write_text(json.dumps({**origin, "version": "0.2.0"}))
    assert find_trained(str(tmp_path / "out")).config == find_trained(str(run)).config
    (message,) = (record.getMessage() for record in caplog.records if record.name == "zeco_train.hf.trained")
    assert message.endswith("left out: train.gone, \\x1bold")


def test_every_text_of_a_stored_configuration_is_known() -> None:
    """A new key that names a place must be dropped by `_without_places`, or read as data are."""
    stores = {"data.path", "data.validation_path", "data.stores.path", "data.stores.validation_path"}
    dropped = {"run_dir", "data.cache_dir", "checkpoint.load"}
    # Of a training, whose configuration is the user's.
    unread = {"data.synthetic.tokenizer", "logger.project", "logger.entity", "logger.group", "logger.job_type"}
    no_places = {"name", "train.nonfinite", "train.profile", "data.stores.name", "logger.tags", "sp.all_scan.blocks"}
    no_places |= {"model.name", "model.mixer"}
    assert set(_texts(Config)) == stores | dropped | unread | no_places


def _texts(section: type, prefix: str = "") -> Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        parts = [part for part in (kind, *typing.get_args(kind)) if isinstance(part, type)]
        if str in parts:
            yield f"{prefix}{name}"
        for part in filter(dataclasses.is_dataclass, parts):
            yield from _texts(part, f"{prefix}{name}.")


@pytest.mark.parametrize("digest", ["0" * 64, pytest.param(None, marks=pytest.mark.slow)])
def test_tokenizer_elsewhere_is_taken_by_its_digest_only(hugging_face: Path, digest: str | None) -> None:
    """A stranger's run names a tokenizer of the user, which an export would publish."""
    elsewhere = hugging_face / "whole"
    info = {"kind": "huggingface", "path": str(elsewhere)} | ({} if digest is None else {"sha256": digest})
    run = Trained(Path("run"), DEFAULT_CONFIG(), None, None, info, (Path("run"),))
    with pytest.raises(DataError, match=r"whole: is not the tokenizer of the training \(its SHA-256 differs\); put"):
        _ = run.tokenizer
    own = {**info, "sha256": load_tokenizer(str(elsewhere)).info["sha256"]}
    assert dataclasses.replace(run, tokenizer_info=own).tokenizer.info == own


def test_folders_without_usable_model_are_refused(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "step_00000001"
    shutil.copytree(run / "checkpoints" / "step_00000001", moved)
    empty = tmp_path / "empty"
    empty.mkdir()
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "config.yaml", begun)
    file = tmp_path / "file"
    file.touch()
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "config.yaml").write_text("model: {num_layers: many}")
    for path, problem in {
        tmp_path / "nothing": "no such folder; name a run's folder",
        file: "is a file; name a run's folder",
        empty: "holds no model",
        begun: "is a run without a complete checkpoint",
        moved: "has no config.yaml of its run",
        broken: "cannot be read as a run's configuration",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            find_trained(str(path))
