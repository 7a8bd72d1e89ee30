"""OLMo Hybrid and Qwen3.5 folders of transformers: import and export, compared with its own models on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.attn import AttnConfig
from models.mixers.gated_deltanet import GatedDeltaNetConfig
from models.spec import spec_of
from tests.hf.test_mamba2 import error
from tests.support.commands import train_here
from tests.support.distributed import run_distributed
from tests.support.model_card import run_snippet
from tests.support.training import full
from tests.support.transformers_alone import in_transformers
from zeco_train.distributed.config import Strategy
from zeco_train.errors import CheckpointError, ConfigError
from zeco_train.export import main
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.hf.folder import WEIGHTS_FILE, checked_model, stored_weights
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

HERE = Path("model")
TOKENIZER: Any = SimpleNamespace(eos_id=2)
TOKENS, VOCABULARY = 70, 61
# fp32: rounding of four layers in another order of sums.
TOLERANCE = 1e-5
_WRITE = """
import json, sys, torch, transformers
name, settings, ids = sys.argv[2], json.loads(sys.argv[3]), torch.tensor([json.loads(sys.argv[4])])
torch.manual_seed(0)
config = getattr(transformers, name.replace("ForCausalLM", "TextConfig" if "Qwen" in name else "Config"))(**settings)
model = getattr(transformers, name)(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(6 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    logits = model(ids).logits[0]
model.save_pretrained(sys.argv[1])
torch.save(logits, sys.argv[1] + "/logits.pt")
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
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "pad_token_id": None,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
OLMO: dict[str, Any] = {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
QWEN: dict[str, Any] = {**SHAPE, "head_dim": 16, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo, no positions": ("OlmoHybridForCausalLM", OLMO),
    "olmo, rotated, equal widths, tied": (
        "OlmoHybridForCausalLM",
        {
            **OLMO,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-3,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 8,
            "linear_allow_neg_eigval": False,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen": ("Qwen3_5ForCausalLM", {**QWEN, "rms_norm_eps": 1e-3}),
    "qwen, all rotated, layers elsewhere, tied": (
        "Qwen3_5ForCausalLM",
        {
            **QWEN,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]},
            # As some versions of transformers write it.
            "partial_rotary_factor": 1.0,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
}


def tokens() -> list[int]:
    return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def our_logits(path: Path, dtype: Dtype = Dtype.fp32, strategy: Strategy | None = Strategy.zero2) -> Tensor:
    trained = find_trained(str(path))
    mesh = join_ranks(trained.configure(["data.seq_len=128", f"train.dtype={dtype.value}"]), Launch(0, 1, 0))
    model, scan = load_trained(trained, mesh, dtype=dtype, strategy=strategy), local_exchange()
    logits = model(torch.tensor([tokens()]), SequencePosition((0, TOKENS), exchange=scan))[0]
    dist.destroy_process_group()
    return logits


def written_by_transformers(case: str, folder: Path) -> Tensor:
    name, settings = CHECKPOINTS[case]
    in_transformers(_WRITE, str(folder), name, json.dumps(settings), json.dumps(tokens()))
    return torch.load(folder / "logits.pt")


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_model_of_transformers_gives_its_logits(case: str, tmp_path: Path) -> None:
    expected = written_by_transformers(case, tmp_path)
    assert 1 < expected.abs().max() < 100
    assert error(our_logits(tmp_path), expected) <= TOLERANCE
    assert error(our_logits(tmp_path, Dtype.fp64, None), expected) <= TOLERANCE


# Each model as its class has it, in our settings; layers 3:1.
SIZES = ["vocab_size=259", "hidden_size=32", "num_layers=4", "intermediate_size=40", "num_heads=2", "num_v_heads=4"]
COMMON = [*SIZES, "head_dim=8", "expand_v=1.5", "conv_size=3", "attn.every=4", "attn.num_heads=4", "attn.qk_norm=true"]
OURS: dict[str, list[str]] = {
    "olmo_hybrid": [
        "o_norm_eps=1e-5",
        "allow_neg_eigval=true",
        "attn.qk_norm_all_heads=true",
        "attn.norm_after=true",
        "attn.rope_theta=null",
    ],
    "qwen3_5_text": [
        "zero_centred_norms=true",
        "attn.gate=true",
        "attn.num_kv_heads=2",
        "attn.head_dim=16",
        "attn.rotary_dim=4",
        "attn.rope_theta=500",
    ],
}
CLASSES = {"olmo_hybrid": "OlmoHybridForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}


DATA = ["data.seq_len=64", "data.global_batch=1", "train.eval_sequences=0"]


def settings(kind: str) -> list[str]:
    return ["model=gated_deltanet_tiny", *(f"model.{setting}" for setting in (*COMMON, *OURS[kind])), *DATA]


@pytest.fixture(scope="module", params=["olmo_hybrid", pytest.param("qwen3_5_text", marks=pytest.mark.campaign)])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Format, run, and its export. No class is asked for: this one alone can express the model."""
    folder = tmp_path_factory.mktemp("exported")
    steps = ["optim.lr=0.05", "sched.warmup_steps=1", "train.steps=2"]
    outcome = train_here(f"run_dir={folder / 'run'}", *settings(request.param), *steps)
    assert outcome.code == 0, outcome
    assert main([str(folder / "run"), str(folder / "out")]) == 0
    return request.param, folder / "run", folder / "out"


@pytest.mark.slow
def test_our_export_gives_our_logits_in_transformers(exported: tuple[str, Path, Path], tmp_path: Path) -> None:
    kind, run, out = exported
    name = in_transformers(_READ, str(out), json.dumps(tokens()), str(tmp_path / "logits.pt"))
    assert name.split() == [CLASSES[kind], "torch.float32"]
    ours = our_logits(run)
    assert error(torch.load(tmp_path / "logits.pt"), ours) <= TOLERANCE
    assert error(our_logits(out), ours) == 0
    card = (out / "README.md").read_text()
    assert kind in card
    assert "import fla" not in card


@pytest.mark.campaign
def test_lines_of_the_model_card_run(exported: tuple[str, Path, Path]) -> None:
    """With the byte tokenizer, and without a GPU although fla is installed."""
    assert run_snippet(exported[2]).startswith("Once")


@pytest.mark.slow
def test_training_on_from_an_export_keeps_its_weights(exported: tuple[str, Path, Path], tmp_path: Path) -> None:
    """A step with a learning rate too small to change fp32 weights."""
    kind, _, out = exported
    load = [f"checkpoint.load=hf:{out}", "train.steps=1", "optim.lr=1e-20", "optim.weight_decay=0"]
    outcome = train_here(f"run_dir={tmp_path / 'run'}", *settings(kind), *load)
    assert outcome.code == 0, outcome
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), f"model_type={kind}"]) == 0
    first, second = (load_file(folder / WEIGHTS_FILE) for folder in (out, tmp_path / "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def random_folder(kind: str, folder: Path) -> dict[str, Tensor]:
    """An export without a run, of random weights; returns them."""
    folder.mkdir()
    record = to_config_json(small(kind), TOKENIZER, None, 64, "float32")
    (folder / "config.json").write_text(json.dumps(record))
    found, generator = from_config_json(record, folder), torch.Generator().manual_seed(0)
    model = spec_of(found.model)
    own = {name: torch.randn(shape, generator=generator) for name, shape in model.parameter_shapes.items()}
    tensors = {one.theirs[0]: one.join([own[name] for name in one.ours]) for one in found.written()}
    save_file(tensors, folder / WEIGHTS_FILE)
    return own


def small(kind: str, **change: Any) -> GatedDeltaNetConfig:
    common: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5}
    attn: dict[str, Any] = {"every": 4, "num_heads": 4, "qk_norm": True}
    if kind == "olmo_hybrid":
        own: dict[str, Any] = {"o_norm_eps": 1e-5}
        attn |= {"qk_norm_all_heads": True, "norm_after": True}
    else:
        own = {"zero_centred_norms": True}
        attn |= {"gate": True, "num_kv_heads": 2, "head_dim": 10, "rotary_dim": 6}
    attn |= change.pop("attn", {})
    return GatedDeltaNetConfig(**{**common, **own, "attn": AttnConfig(**attn), **change})


def _loaded(rank: int, world_size: int, folder: str) -> list[dict[str, Tensor]]:
    trained = find_trained(folder)
    mesh = join_ranks(trained.configure(["data.seq_len=63", "train.dtype=fp32"]), Launch(rank, world_size, rank))
    strategies = Strategy.zero3, Strategy.hsdp
    models = [load_trained(trained, mesh, dtype=Dtype.fp32, strategy=strategy) for strategy in strategies]
    return [{name: full(p).clone() for name, p in model.named_parameters()} for model in models]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [pytest.param("olmo_hybrid", marks=pytest.mark.campaign), "qwen3_5_text"])
def test_joined_rows_are_read_on_any_split(kind: str, tmp_path: Path) -> None:
    """On 3 ranks, whose shards end inside queries, keys and values."""
    own = random_folder(kind, folder := tmp_path / "folder")
    if kind == "olmo_hybrid":
        # As `save_pretrained` cuts the convolution's rows and names norms.
        stored, renamed = load_file(folder / WEIGHTS_FILE), {}
        for name, tensor in stored.items():
            renamed[name.replace("layers.3.post_attention_layernorm", "layers.3.feedforward_layer_norm")] = tensor
        for layer in range(3):
            names = [f"model.layers.{layer}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
            rows = torch.cat([stored[name] for name in names])
            renamed |= dict(zip(names, (x.clone() for x in rows.chunk(3)), strict=True))
        save_file(renamed, folder / WEIGHTS_FILE)
    for of_rank in run_distributed(_loaded, 3, str(folder)):
        for parameters in of_rank:
            assert parameters.keys() == own.keys()
            assert all(torch.equal(tensor, own[name]) for name, tensor in parameters.items())


@pytest.mark.parametrize("kind", OURS)
def test_configuration_survives_the_round_trip(kind: str) -> None:
    for change in ({}, {"num_v_heads": None, "attn": {"layers": [0, 2], "every": None}}, {"expand_v": 0.375}):
        model = small(kind, name="model", **change)
        record = json.loads(json.dumps(to_config_json(model, TOKENIZER, None, 128, "float32")))
        assert record["model_type"] == kind
        assert from_config_json(record, HERE).model == model.canonical()
    for rotated in range(2, 50, 2):
        if kind == "qwen3_5_text":
            model = small(kind, name="model", attn={"head_dim": 49, "rotary_dim": rotated})
            factor = to_config_json(model, TOKENIZER, None, 128, "float32")["rope_parameters"]["partial_rotary_factor"]
            assert int(49 * factor) == rotated


@pytest.mark.parametrize(
    ("kind", "change", "refused"),
    [
        ("olmo_hybrid", {"o_norm_eps": None}, "o_norm_eps=null"),
        ("olmo_hybrid", {"use_gate": False}, "use_gate=false"),
        ("olmo_hybrid", {"zero_centred_norms": True}, "zero_centred_norms=true"),
        ("olmo_hybrid", {"attn": {"norm_after": False}}, "attn.norm_after=false"),
        ("olmo_hybrid", {"attn": {"window": 8}}, "attn.window=8"),
        ("olmo_hybrid", {"attn": {"rotary_dim": 2}}, "attn.rotary_dim=2"),
        ("olmo_hybrid", {"attn": {"every": None}}, "attn.layers=null"),
        ("qwen3_5_text", {"zero_centred_norms": False}, "zero_centred_norms=false"),
        ("qwen3_5_text", {"allow_neg_eigval": True}, "allow_neg_eigval=true"),
        ("qwen3_5_text", {"o_norm_eps": 1e-5}, "o_norm_eps=1e-05"),
        ("qwen3_5_text", {"attn": {"gate": False}}, "attn.gate=false"),
        ("qwen3_5_text", {"attn": {"rope_theta": None, "rotary_dim": None}}, "attn.rope_theta=null"),
    ],
    ids=lambda value: f"{value!s:.30}",
)
def test_what_a_class_cannot_say_is_not_exported(kind: str, change: dict[str, Any], refused: str) -> None:
    model = small(kind, **change)
    with pytest.raises(ConfigError) as caught:
        to_config_json(model, TOKENIZER, None, 128, "float32", kind)
    assert caught.value.line.startswith(f"error: model.{refused}: ")
    assert caught.value.line.endswith("so this model cannot be exported")


def test_a_model_of_no_class_is_refused_with_every_reason() -> None:
    model = small("qwen3_5_text", allow_neg_eigval=True)
    with pytest.raises(ConfigError) as caught:
        to_config_json(model, TOKENIZER, None, 128, "float32")
    for reason in (
        "as gated_deltanet: model.zero_centred_norms",
        "as olmo_hybrid: ",
        "as qwen3_5_text: model.allow_neg",
    ):
        assert reason in caught.value.line
    assert "\n" not in caught.value.line
    with pytest.raises(ConfigError, match="model_type=kda: a model with gated_deltanet can be: gated_deltanet, olmo_"):
        to_config_json(model, TOKENIZER, None, 128, "float32", "kda")


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("olmo_hybrid", {"attention_bias": True}, "attention_bias=True: biases in softmax layers: not supported"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act=gelu: another activation: not supported, only silu"),
        ("olmo_hybrid", {"layer_types": None}, "layer_types=None: must be a list of linear_attention and full_att"),
        ("olmo_hybrid", {"layer_types": ["full_attention"]}, "one a layer and both among them"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}, "one a layer and both among them"),
        ("qwen3_5_text", {"layer_types": [[], "full_attention", "a", "b"]}, "layer_types=[]: must be a list of"),
        ("olmo_hybrid", {"linear_num_key_heads": None}, "linear_num_key_heads=None: must be a whole number"),
        ("olmo_hybrid", {"linear_key_head_dim": 0}, "is of no model that can be built: model.head_dim=0: must be"),
        ("olmo_hybrid", {"linear_value_head_dim": -1}, "model.expand_v=-0.125: must be finite and > 0"),
        ("olmo_hybrid", {"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number ≥ 1"),
        ("olmo_hybrid", {"rope_parameters": None}, "rope_parameters=None: must be a mapping with rope_theta"),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": 1e9, "factor": 2}}, "rope_parameters.factor=2: not supp"),
        (
            "olmo_hybrid",
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
            "factor=0.5: not supported, only 1",
        ),
        ("qwen3_5_text", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope_type=yarn: another rotation: not"),
        ("qwen3_5_text", {"rope_parameters": ROPE}, "partial_rotary_factor=None: must be above 0 and at most 1"),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_theta": None, "partial_rotary_factor": 0.5}},
            "rope_parameters.rope_theta=None: must be finite and > 1",
        ),
        (
            "qwen3_5_text",
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.3}},
            "model.attn.rotary_dim=3: must be even",
        ),
        ("qwen3_5_text", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: not supported beside rope_param"),
        (
            "qwen3_5_text",
            {"rope_scaling": {"factor": 2}},
            "rope_scaling={'factor': 2}: not supported beside rope_param",
        ),
        ("qwen3_5_text", {"architectures": ["Qwen3_5ForConditionalGeneration"]}, "only Qwen3_5ForCausalLM can be read"),
        ("qwen3_5_text", {"model_type": "qwen3_5"}, "model_type=qwen3_5: only 'gla'"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_unsupported_settings_are_refused_by_name(kind: str, change: dict[str, Any], problem: str) -> None:
    record = to_config_json(small(kind), TOKENIZER, None, 128, "float32")
    with pytest.raises(ConfigError) as caught:
        from_config_json({**record, **change}, HERE)
    assert problem in caught.value.line
    assert "\n" not in caught.value.line


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    random_folder("olmo_hybrid", folder := tmp_path / "olmo")
    stored, name = load_file(folder / WEIGHTS_FILE), "model.layers.0.linear_attn.k_conv1d.weight"
    save_file({**stored, name: stored[name][:-1].clone()}, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"v_conv1d.weight have 79 rows, config.json makes them 80"):
        checked_model(folder)
    save_file({**stored, name: stored[name][:, :, :2].clone()}, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"k_conv1d.weight is \[16, 1, 2\], config.json makes it \[16, 1, 4\]"):
        checked_model(folder)
    norm = "model.layers.0.input_layernorm.weight"
    save_file({**stored, norm: torch.ones(32)}, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"are the same weights"):
        checked_model(folder)
    random_folder("qwen3_5_text", folder := tmp_path / "qwen")
    stored, name = load_file(folder / WEIGHTS_FILE), "model.layers.3.self_attn.q_proj.weight"
    assert stored_weights(folder)[name].shape == (80, 32)
    del stored[name]
    save_file(stored, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"layers.3.self_attn.q_proj.weight is missing"):
        checked_model(folder)
