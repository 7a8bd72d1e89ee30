"""Mamba-2 folders of transformers: import and export, compared with transformers' own model on a CPU."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from models.mixers.mamba2 import Mamba2Config
from tests.support.commands import train_here
from tests.support.transformers_alone import in_transformers
from zeco_train.distributed.config import Strategy
from zeco_train.errors import CheckpointError, ConfigError
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.hf.export import ExportSettings, export
from zeco_train.hf.folder import WEIGHTS_FILE, checked_model
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

TOKENS = 40
VOCABULARY = 61
# fp32; measured 3e-7.
TOLERANCE = 1e-5
_WRITE = """
import json, sys, torch
from transformers import Mamba2Config, Mamba2ForCausalLM
folder, settings, ids = sys.argv[1], json.loads(sys.argv[2]), torch.tensor([json.loads(sys.argv[3])])
torch.manual_seed(0)
model = Mamba2ForCausalLM(Mamba2Config(**settings)).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    logits = model(ids).logits[0]
model.save_pretrained(folder)
torch.save(logits, folder + "/logits.pt")
"""
_READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor([json.loads(sys.argv[2])])
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    logits = model.eval()(ids).logits[0]
torch.save(logits, sys.argv[3])
print(type(model).__name__, model.dtype)
"""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "conv_kernel": 3,
}


def tokens() -> list[int]:
    return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def our_logits(path: Path, dtype: Dtype = Dtype.fp32, strategy: Strategy | None = Strategy.zero2) -> Tensor:
    trained = find_trained(str(path))
    mesh = join_ranks(trained.configure(["data.seq_len=64", f"train.dtype={dtype.value}"]), Launch(0, 1, 0))
    model, scan = load_trained(trained, mesh, dtype=dtype, strategy=strategy), local_exchange()
    logits = model(torch.tensor([tokens()]), SequencePosition((0, TOKENS), exchange=scan))[0]
    wide = {name for name, parameter in model.named_parameters() if ".decay." in name}
    assert len(wide) == 3 * trained.model.num_layers
    for name, parameter in model.named_parameters():
        narrow = torch.bfloat16 if dtype is Dtype.bf16 else torch.float32
        assert parameter.dtype is (torch.float32 if name in wide else narrow), name
    dist.destroy_process_group()
    return logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# Earlier ones normalise all groups of channels together, unlike mamba_ssm.
NORMALISES_GROUPS = [int(part) for part in version("transformers").split(".")[:2]] >= [5, 23]
needs_groups = pytest.mark.skipif(not NORMALISES_GROUPS, reason="needs transformers 5.23.0 for several groups")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=needs_groups),
        {"time_step_limit": [0.5, 1.5], "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1},
    ],
    ids=["two groups", "clamped, no bias, tied"],
)
def test_model_of_transformers_gives_its_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    in_transformers(_WRITE, str(folder), json.dumps({**SHAPE, **settings}), json.dumps(tokens()))
    expected = torch.load(folder / "logits.pt")
    assert error(our_logits(folder), expected) <= TOLERANCE
    # Rounding of weights and activations; measured 2.3e-2.
    assert error(our_logits(folder, Dtype.bf16, None), expected) <= 4e-2
    stored = load_file(folder / WEIGHTS_FILE)
    names = checked_model(folder)
    assert {one.theirs[0] for one in names.tensors()} == stored.keys() - (
        {"lm_head.weight"} if names.model.tie_word_embeddings else set()
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba2") / "run"
    shape = [f"model.{key}={value}" for key, value in SHAPE.items() if key not in ("vocab_size", "num_hidden_layers")]
    settings = ["model=mamba2_tiny", *shape, "model.num_layers=2", "model.intermediate_size=0"]
    settings += [
        "model.time_step_limit=[0.01,0.5]",
        "model.norm_eps=1e-4",
        "optim.lr=0.01",
        "sched.warmup_steps=1",
        "data.seq_len=64",
        "train.steps=2",
    ]
    done = train_here(f"run_dir={folder}", *settings)
    assert done.code == 0, done
    return folder


@pytest.mark.slow
@needs_groups
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [None, Dtype.bf16])
def test_our_export_gives_our_logits_in_transformers(run: Path, dtype: Dtype | None, tmp_path: Path) -> None:
    out, logits = tmp_path / "out", tmp_path / "logits.pt"
    export(str(run), out, ExportSettings(dtype=dtype))
    name = in_transformers(_READ, str(out), json.dumps(tokens()), str(logits))
    assert name.split() == ["Mamba2ForCausalLM", "torch.bfloat16" if dtype else "torch.float32"]
    found = torch.load(logits)
    if dtype is None:
        assert error(found, our_logits(run)) <= TOLERANCE
        assert error(our_logits(out), our_logits(run)) == 0
    # Ours keep A_log, dt_bias and D in fp32, theirs round them.
    assert error(found, our_logits(out, Dtype.bf16, None)) <= 3e-2
    stored = load_file(out / WEIGHTS_FILE)
    for stem in ("A_log", "dt_bias", "D"):
        assert stored[f"backbone.layers.1.mixer.{stem}"].dtype is torch.float32
    assert stored["backbone.norm_f.weight"].dtype is (torch.bfloat16 if dtype else torch.float32)
    record = json.loads((out / "config.json").read_text())
    assert record["layer_norm_epsilon"] == record["norm_eps"] == 1e-4
    assert record["time_step_limit"] == record["dt_limit"] == [0.01, 0.5]
    card = (out / "README.md").read_text()
    assert "import fla" not in card
    assert "use transformers ≥ 5.23.0" in card


def test_config_of_transformers_is_read_with_its_defaults() -> None:
    model = from_config_json({"model_type": "mamba2"}, Path("model")).model
    assert isinstance(model, Mamba2Config)
    assert (model.num_heads, model.head_dim, model.hidden_size, model.num_layers) == (128, 64, 4096, 64)
    assert (model.n_groups, model.norm_eps, model.initializer_range, model.intermediate_size) == (8, 1e-5, 0.1, 0)
    assert model.time_step_limit == (0.0, float("inf"))
    for limit in ([0.0, {"__float__": "Infinity"}], [0.0, float("inf")], [0, float("inf")]):
        assert from_config_json({"model_type": "mamba2", "time_step_limit": limit}, Path("model")).model == model
    # fla's model of the same name has other names for these.
    assert from_config_json({"model_type": "mamba2", "norm_eps": 1e-3}, Path("model")).model.norm_eps == 1e-3


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("use_bias", True, "biases of the projections: not supported"),
        ("hidden_act", "gelu", "another activation: not supported"),
        ("n_groups", 3, "must divide num_heads=128"),
        ("head_dim", 32, "must equal expand · hidden_size"),
        ("expand", 1.5, "must be a whole number"),
        ("conv_kernel", 1, "must be a whole number ≥ 2"),
        ("time_step_limit", [0.0], "must be a list of two numbers"),
        ("time_step_limit", {"__float__": "Infinity"}, "must be a list of two numbers"),
        ("time_step_limit", [{"__float__": "Infinity"}, 1.0], "must be a number"),
        ("time_step_limit", [0.0, "inf"], "must be a number"),
        ("time_step_limit", [1.0, 0.5], "0 ≤ least < most"),
        ("residual_in_fp32", 1, "must be true or false"),
        ("intermediate_size", 64, "another one than transformers' layer has"),
        ("rmsnorm", False, "layers without a norm: not supported"),
        ("norm_before_gate", True, "a norm before the gate: not supported"),
        ("D_has_hdim", True, "a skip connection by channel: not supported"),
        ("norm_eps", 1e-3, "differs from layer_norm_epsilon=1e-05"),
        ("quantization_config", {"bits": 4}, "quantised weights: not supported"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_unsupported_settings_are_refused_by_name(key: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as found:
        from_config_json({"model_type": "mamba2", "layer_norm_epsilon": 1e-5, key: value}, Path("model"))
    assert f"{key}=" in str(found.value)
    assert problem in str(found.value)


def test_model_with_mlps_cannot_be_exported() -> None:
    with pytest.raises(ConfigError, match=r"intermediate_size=16.*knows 0 only"):
        to_config_json(Mamba2Config(intermediate_size=16), SimpleNamespace(eos_id=2), None, 64, "float32")


@pytest.mark.slow
def test_missing_weight_is_named_as_in_the_file(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    out = tmp_path / "out"
    export(str(run), out, ExportSettings())
    stored = load_file(out / WEIGHTS_FILE)
    save_file({name: x for name, x in stored.items() if not name.endswith("1.mixer.D")}, out / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"backbone\.layers\.1\.mixer\.D is missing"):
        checked_model(out)
