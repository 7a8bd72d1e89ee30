"""Training from an export, damaged folders, and commands that are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.prepare import PrepareOptions, prepare_store
from models.mixers.gla import FeatureMap
from tests.data.test_prepare import hugging_face
from tests.support.commands import check_line, train_here
from tests.support.stores import edit_json, write_lines
from zeco_train.errors import CheckpointError, ConfigError, DataError
from zeco_train.export import ExportSettings, export, main
from zeco_train.hf import parity
from zeco_train.hf.folder import WEIGHTS_FILE, checked_model
from zeco_train.hf.trained import check_continuation, find_trained, other_tokenizer

pytestmark = pytest.mark.numeric

__all__ = ["hugging_face"]


@pytest.fixture
def exported(export_of_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(export_of_run, tmp_path / "exported")


@pytest.mark.slow
def test_other_models_and_tokenizers_are_named(exported: Path) -> None:
    other = dataclasses.replace(find_trained(str(exported)).model, num_layers=2, feature_map=FeatureMap.relu)
    with pytest.raises(ConfigError) as caught:
        check_continuation(exported, other)
    assert caught.value.line == (
        f"error: model.num_layers=2: the model in {exported} is another one; it takes: model.num_layers=1 "
        "model.feature_map=null"
    )
    (exported / "tokenizer.json").write_text("{}")
    told = other_tokenizer(exported, {"kind": "huggingface", "sha256": "of the data"})
    assert told is not None
    assert told.startswith(f"the tokenizer in {exported} could not be compared with the data's: ")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (exported / name).unlink()
    told = other_tokenizer(exported, {})
    assert told == f"{exported} has no tokenizer, so its vocabulary could not be compared with the data's"


def change_bytes(change: Callable[[bytearray], object], folder: Path) -> None:
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    change(data)
    (folder / WEIGHTS_FILE).write_bytes(data)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object], folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


NORM, MORE = "model.norm.weight", "model.layers.0.attn.q_conv1d.weight"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "model.safetensors: damaged: ": partial(change_bytes, lambda data: data.pop()),
    "model.safetensors is missing (there is pytorch_model.bin: convert it with transformers, save_pretrained)": (
        lambda folder: (folder / WEIGHTS_FILE).rename(folder / "pytorch_model.bin")
    ),
    "consolidated.safetensors is none of the files that it should have; move it away": (
        lambda folder: shutil.copy(folder / WEIGHTS_FILE, folder / "consolidated.safetensors")
    ),
    f"{NORM} is missing, which config.json asks for": partial(change_tensors, lambda found: found.pop(NORM)),
    f"has {MORE}, which config.json does not describe": partial(
        change_tensors, lambda found: found.update({MORE: torch.ones(4)})
    ),
    f"{NORM} is [33], config.json makes it [32]": partial(
        change_tensors, lambda found: found.update({NORM: torch.ones(33)})
    ),
    f"{NORM} is I8; only F64, F32, F16, BF16 can be read": partial(
        change_tensors, lambda found: found.update({NORM: torch.ones(32, dtype=torch.int8)})
    ),
    "config.json: cannot be read: ": lambda folder: (folder / "config.json").write_text("{"),
    "zeco_train.json: cannot be read: ": lambda folder: (folder / "zeco_train.json").write_text('{"step": 3}'),
}


@pytest.mark.parametrize("expected", DAMAGES)
def test_damaged_model_folders_are_refused(expected: str, exported: Path) -> None:
    DAMAGES[expected](exported)
    with pytest.raises(CheckpointError) as error:
        find_trained(str(exported))
    assert str(error.value).startswith(str(exported))
    assert expected in str(error.value)
    if not expected.startswith("zeco_train.json"):
        with pytest.raises(CheckpointError):
            checked_model(exported)


def test_layers_are_compared_with_the_files_before_a_model_is_built(exported: Path) -> None:
    edit_json(exported / "config.json", num_hidden_layers=1 << 20)
    with pytest.raises(CheckpointError, match="tensors are no model of the 1048576 layers"):
        find_trained(str(exported))


def test_training_starts_from_an_export_and_refuses_another_bit(exported: Path, tmp_path: Path) -> None:
    steps = [f"run_dir={tmp_path / 'on'}", "train.steps=1"]
    outcome = train_here(f"checkpoint.load=hf:{exported}", *steps)
    assert (outcome.code, outcome.err) == (0, "")
    steps[0] += "_again"
    change_bytes(lambda data: data.__setitem__(-100, data[-100] ^ 1), exported)
    outcome = train_here(f"checkpoint.load=hf:{exported}", *steps)
    problem = "model.safetensors is not what was written (SHA-256)"
    assert (outcome.code, outcome.errors) == (4, [f"{exported}: damaged: {problem}; name another checkpoint"])
    # An export is not a run folder: without the prefix `hf:` it is refused.
    outcome = train_here(f"checkpoint.load={exported}", f"run_dir={tmp_path / 'never'}")
    check_line(outcome, 2, f"checkpoint.load={exported}: holds no complete checkpoint; name a run's folder", "hf:PATH")
    assert not (tmp_path / "never").exists()


def test_invalid_export_commands_are_refused(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    broken = shutil.copytree(run, tmp_path / "broken")
    file = broken / "checkpoints" / "step_00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    (tmp_path / "file").touch()
    out = str(tmp_path / "new")
    for arguments, problem in {
        (str(run),): "must be: python -m zeco_train.export RUN OUT [KEY=VALUE ...]",
        (str(run), str(taken)): f"OUT={taken}: exists; name a new folder",
        (str(run), str(tmp_path / "file" / "out")): f"out: cannot be written ({tmp_path / 'file'} is a file)",
        (str(exported), out): f"RUN={exported}: is an export already",
        (str(broken), out): "damaged: __0_0.distcp is not what was written (SHA-256)",
        (str(run), out, "dtype=fp16"): "dtype=fp16: must be one of bf16, fp32, fp64 or null",
        (str(run), out, "shard_mb=0"): "shard_mb=0: must be ≥ 1",
    }.items():
        assert main(list(arguments)) != 0
        errors = capsys.readouterr().err
        assert problem in errors
        assert errors.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert parity.main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: EXPORT={run}: is none; make one with: ")
    monkeypatch.setattr(parity, "pick_device", lambda wanted: torch.device("cpu"))
    assert parity.main([str(exported)]) == 2
    assert capsys.readouterr().err.startswith("error: device=cpu: fla's model")
    assert main([str(run), out, "dtype=bf16"]) == 0
    rounded, stored = load_file(Path(out) / WEIGHTS_FILE), load_file(exported / WEIGHTS_FILE)
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in rounded.items())
    assert json.loads((Path(out) / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_run_and_export_keep_tokenizer_without_store(hugging_face: Path, tmp_path: Path) -> None:
    """The run keeps a copy of the tokenizer files, and the export contains them unchanged."""
    words = " ".join(f"w{index}" for index in range(200))
    source = write_lines(tmp_path / "a.jsonl", [{"text": words}] * 3)
    copy = shutil.copytree(hugging_face / "whole", tmp_path / "tokenizer")
    prepare_store(PrepareOptions((source,), tmp_path / "store", tokenizer=str(copy), validation_fraction=0))
    data = ["data=tokens", f"data.path={tmp_path / 'store'}", "data.seq_len=64", "data.global_batch=4"]
    run = tmp_path / "run"
    assert train_here(*data, f"run_dir={run}", "train.steps=1", "model.vocab_size=70003").code == 0
    shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "store")
    assert find_trained(str(run)).tokenizer.encode(["w7 w70000"])[0].tolist() == [9, 70002]
    export(str(run), tmp_path / "out", ExportSettings())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run / "tokenizer" / name).read_bytes()
    exported = find_trained(str(tmp_path / "out"))
    assert exported.tokenizer.decode(exported.tokenizer.encode(["w7 w70000"])[0]) == "w7 w70000"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(DataError, match=r"no such token store|no tokenizer there"):
        _ = find_trained(str(run)).tokenizer
