"""Import of Hugging Face folders: supported models are read, others refused by name; training from an import."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from data.prepare import PrepareOptions, prepare_store
from models.mixers.gla import FeatureMap, GLAConfig
from models.spec import spec_of
from tests.data.test_prepare import hugging_face
from tests.models.test_model import reference_logits
from tests.support.commands import train_here
from tests.support.stores import write_lines
from zeco_train.distributed.config import Strategy
from zeco_train.errors import CheckpointError, ConfigError, DataError
from zeco_train.export import main
from zeco_train.hf import parity
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.hf.export import ExportSettings, export
from zeco_train.hf.folder import WEIGHTS_FILE, checked_model
from zeco_train.hf.trained import check_continuation, find_trained, load_trained, other_tokenizer
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

__all__ = ["hugging_face"]
# config.json of fla-hub's 1.3B models of 2024, without keys of later versions.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GLAForCausalLM"], "attn_mode": "chunk", "bos_token_id": 1, "clamp_min": None, "conv_size": 4,
    "elementwise_affine": True, "eos_token_id": 2, "expand_k": 0.5, "expand_v": 1, "feature_map": None,
    "fuse_cross_entropy": True, "fuse_norm": True, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": None, "max_position_embeddings": 2048, "model_type": "gla",
    "norm_eps": 1e-06, "num_heads": 4, "num_hidden_layers": 24, "num_kv_heads": None, "share_conv_kernel": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.38.2", "use_cache": True,
    "use_gk": True, "use_gv": False, "use_output_gate": True, "use_short_conv": False, "vocab_size": 32000,
}  # fmt: skip
HERE = Path("model")


def test_published_fla_config_is_read() -> None:
    model = from_config_json(PUBLISHED, HERE).model
    assert (model.head_k_dim, model.head_v_dim, model.intermediate_size) == (256, 512, 5632)
    assert from_config_json({"model_type": "gla"}, HERE).model == model
    assert from_config_json({**PUBLISHED, "num_kv_heads": 4}, HERE).model == model
    assert from_config_json({**PUBLISHED, "feature_map": "swish"}, HERE).model.feature_map is FeatureMap.silu


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model_type", "gsa", "only 'gla', "),
        ("architectures", ["GLAForSequenceClassification"], "only GLAForCausalLM can be read"),
        ("use_short_conv", True, "short convolutions before the operator: not supported"),
        ("attnres_block_size", 4, "residuals over blocks of layers: not supported"),
        ("elementwise_affine", False, "norms without weights: not supported"),
        ("hidden_act", "powlu", "another activation of the MLP and the output gate: not supported"),
        ("feature_map", "gelu", "not supported, only relu, sqrelu, silu, sigmoid, swish"),
        ("gate_low_rank_dim", 32, "another one than fla's layer has: not supported, only 16"),
        ("quantization_config", {"bits": 4}, "quantised weights: not supported"),
        ("hidden_size", "2048", "must be a whole number"),
        ("expand_k", True, "must be a number"),
        ("num_heads", 7, "must divide"),
        ("num_kv_heads", 3, "must divide num_heads=4: 1, 2, 4"),
        ("clamp_min", 0.5, "must be finite and < 0"),
        ("use_output_gate", 1, "must be true or false"),
        # Of a hostile file.
        ("model_type", ["gla"], "only 'gla', "),
        ("architectures", 5, "only GLAForCausalLM can be read"),
        ("feature_map", ["relu"], "not supported, only relu"),
        ("feature_map", "x" * 10**6, "not supported, only relu"),
        ("norm_eps", 10**350, "must be a number from −1,048,576 to 1,048,576"),
        ("clamp_min", -(10**350), "must be a number from −1,048,576 to 1,048,576"),
        ("expand_k", 1e30, "must be a number from −1,048,576 to 1,048,576"),
        ("hidden_ratio", 10**350, "must be a whole number from −1,048,576 to 1,048,576"),
        ("vocab_size", 10**18, "must be a whole number from −1,048,576 to 1,048,576"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_unsupported_fla_settings_are_refused_by_name(key: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_config_json({**PUBLISHED, key: value}, HERE)
    assert len(error.value.line) < 500
    assert "config.json" in str(error.value)
    assert f"{key}=" in str(error.value)
    assert problem in str(error.value)


def test_largest_numbers_of_fla_config_make_a_model() -> None:
    """Sizes of tensors stay below 2^63 bytes, beyond which torch raises."""
    largest = dict.fromkeys(["hidden_size", "vocab_size", "expand_k", "expand_v", "hidden_ratio"], 1 << 20)
    shapes = spec_of(from_config_json({**PUBLISHED, **largest, "num_hidden_layers": 1}, HERE).model).parameter_shapes
    assert max(map(max, shapes.values())) == 1 << 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"fuse_norm": False, "num_kv_heads": 2, "feature_map": "sqrelu"},
        {"use_output_gate": False, "clamp_min": -0.3, "tie_word_embeddings": True},
    ],
    ids=["plain norms", "no gate"],
)
def test_model_saved_by_fla_gives_reference_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    """Names and shapes agree; in fp64 our logits equal the reference recurrence with the stored tensors."""
    from fla.models import GLAConfig as FlaConfig
    from fla.models import GLAForCausalLM as FlaModel

    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 48, "num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40}
    theirs = FlaModel(FlaConfig(**shape, **settings))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "fla")
    stored = load_file(tmp_path / "fla" / WEIGHTS_FILE)

    trained = find_trained(str(tmp_path / "fla"))
    assert (trained.config, trained.step, trained.model.name) == (None, None, "fla")
    mesh = join_ranks(trained.configure(["data.seq_len=64", "train.dtype=fp64"]), Launch(0, 1, 0))
    ours = load_trained(trained, mesh, dtype=Dtype.fp64, strategy=Strategy.zero2)
    dist.destroy_process_group()
    names = {name.replace("g_norm_swish_gate", "g_norm") if "fuse_norm" in settings else name for name in stored}
    assert names == stored.keys()
    parameters = {name: tensor.double() for name, tensor in stored.items()}
    if "fuse_norm" in settings:
        parameters = {name.replace("g_norm.", "g_norm_swish_gate."): value for name, value in parameters.items()}
    ids = torch.randint(61, (40,), generator=torch.Generator().manual_seed(1))
    logits = ours(ids[None], SequencePosition((0, 40), exchange=(scan := local_exchange())))[0]
    scan.drain()
    expected = reference_logits(parameters, trained.model, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    export(str(run), run.with_name("out"), ExportSettings())
    return run.with_name("out")


@pytest.fixture
def exported(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "exported")


@pytest.mark.slow
def test_training_starts_from_export(run: Path, exported: Path, tmp_path: Path) -> None:
    """Import, a step with a learning rate too small to change fp32 weights, and export: the same weights."""
    load = [f"checkpoint.load=hf:{exported}", "train.steps=1", "optim.lr=1e-20", "optim.weight_decay=0"]
    outcome = train_here(*load, f"run_dir={tmp_path / 'on'}")
    assert (outcome.code, outcome.err) == (0, "")
    assert main([str(tmp_path / "on"), str(tmp_path / "again")]) == 0
    first, again = (load_file(folder / WEIGHTS_FILE) for folder in (exported, tmp_path / "again"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    # An export is not a run folder: without the prefix `hf:` it is refused.
    outcome = train_here(f"checkpoint.load={exported}", f"run_dir={tmp_path / 'other'}")
    assert outcome.errors == [
        f"checkpoint.load={exported}: holds no complete checkpoint; name a run's folder, a step_… folder, or hf:PATH "
        "for a Hugging Face model"
    ]
    assert not (tmp_path / "other").exists()


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


def flip(folder: Path) -> str:
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[-100] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(data)
    return "model.safetensors is not what was written (SHA-256)"


def cut(folder: Path) -> str:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[:-2])
    return f"{folder / WEIGHTS_FILE}: damaged: "


def pickled(folder: Path) -> str:
    (folder / WEIGHTS_FILE).rename(folder / "pytorch_model.bin")
    return "model.safetensors is missing (there is pytorch_model.bin: convert it with transformers, save_pretrained)"


def doubled(folder: Path) -> str:
    shutil.copy(folder / WEIGHTS_FILE, folder / "consolidated.safetensors")
    return "consolidated.safetensors is none of the files that it should have; move it away"


def edited(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return edit


def without_norm(folder: Path) -> str:
    edited(lambda tensors: tensors.pop("model.norm.weight"))(folder)
    return "model.norm.weight is missing, which config.json asks for"


def with_more(folder: Path) -> str:
    edited(lambda tensors: tensors.update({"model.layers.0.attn.q_conv1d.weight": torch.ones(4)}))(folder)
    return "has model.layers.0.attn.q_conv1d.weight, which config.json does not describe"


def other_shape(folder: Path) -> str:
    edited(lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)}))(folder)
    return "model.norm.weight is [33], config.json makes it [32]"


def whole_numbers(folder: Path) -> str:
    edited(lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))(folder)
    return "model.norm.weight is I8; only F64, F32, F16, BF16 can be read"


def not_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return f"{folder / 'config.json'}: cannot be read: "


def other_origin(folder: Path) -> str:
    (folder / "zeco_train.json").write_text(json.dumps({"step": 3}))
    return f"{folder / 'zeco_train.json'}: cannot be read: "


@pytest.mark.parametrize(
    "damage",
    [cut, pickled, doubled, without_norm, with_more, other_shape, whole_numbers, not_json, other_origin],
    ids=lambda damage: damage.__name__,
)
def test_damaged_model_folders_are_refused(damage: Callable[[Path], str], exported: Path) -> None:
    expected = damage(exported)
    with pytest.raises(CheckpointError) as error:
        find_trained(str(exported))
    assert expected in str(error.value)
    if damage is not other_origin:
        with pytest.raises(CheckpointError):
            checked_model(exported)


def test_layers_are_compared_with_the_files_before_a_model_is_built(exported: Path) -> None:
    record = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**record, "num_hidden_layers": 1 << 20}))
    with pytest.raises(CheckpointError, match="tensors are no model of the 1048576 layers"):
        find_trained(str(exported))


def test_training_refuses_export_with_flipped_bit(exported: Path, tmp_path: Path) -> None:
    problem = flip(exported)
    outcome = train_here(f"checkpoint.load=hf:{exported}", f"run_dir={tmp_path / 'on'}")
    assert outcome.errors == [f"{exported}: damaged: {problem}; name another checkpoint"]
    assert outcome.code == 4


def test_invalid_export_commands_are_refused(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert main([str(run), out, "dtype=bf16"]) == 0
    rounded, stored = load_file(Path(out) / WEIGHTS_FILE), load_file(exported / WEIGHTS_FILE)
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in rounded.items())
    assert json.loads((Path(out) / "config.json").read_text())["dtype"] == "bfloat16"


def test_settings_unknown_to_fla_block_export() -> None:
    with pytest.raises(ConfigError) as caught:
        to_config_json(GLAConfig(gate_logit_normalizer=8), SimpleNamespace(eos_id=1), None, 64, "float32")
    assert caught.value.line == (
        "error: model.gate_logit_normalizer=8: fla's GLA knows 16 only, so this model cannot be exported"
    )


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
