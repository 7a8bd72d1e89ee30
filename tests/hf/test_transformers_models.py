"""Mamba-2, OLMo Hybrid and Qwen3.5 in transformers: import and export, compared with its own models on a CPU."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.spec import spec_of
from tests.hf.logits import error, our_logits
from tests.hf.test_config_json import small, written
from tests.support.commands import train_here
from tests.support.transformers_alone import in_transformers
from zeco_train.errors import CheckpointError
from zeco_train.export import main
from zeco_train.hf.config_json import from_config_json
from zeco_train.hf.folder import WEIGHTS_FILE, checked_model, stored_weights
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

TOKENS, VOCABULARY = 70, 61
# fp32: rounding of four layers in another order of sums.
TOLERANCE = 1e-5
_WRITE = """
import json, sys, torch, transformers
name, settings, ids = sys.argv[2], json.loads(sys.argv[3]), torch.tensor(json.loads(sys.argv[4]))
torch.manual_seed(0)
config = getattr(transformers, name.replace("ForCausalLM", "TextConfig" if "Qwen" in name else "Config"))(**settings)
model = getattr(transformers, name)(config).eval()
scale, noise = (1, 0.3) if "Mamba" in name else (6, 0.1)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(scale if parameter.ndim > 1 else 1).add_(noise * torch.randn_like(parameter))
    logits = model(ids).logits[0]
model.save_pretrained(sys.argv[1])
torch.save(logits, sys.argv[1] + "/logits.pt")
"""
_READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    logits = model.eval()(ids).logits[0]
torch.save(logits, sys.argv[3])
print(type(model).__name__, model.dtype)
"""
MAMBA: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "conv_kernel": 3}
WIDTH: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32}
SHAPE: dict[str, Any] = {
    **WIDTH,
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
    "mamba": ("MambaForCausalLM", {**WIDTH, "state_size": 6, "conv_kernel": 3, "num_hidden_layers": 2}),
    "mamba2, two groups": ("Mamba2ForCausalLM", {**WIDTH, **MAMBA, "num_hidden_layers": 2}),
    "olmo, no positions": ("OlmoHybridForCausalLM", OLMO),
    "qwen": ("Qwen3_5ForCausalLM", {**QWEN, "rms_norm_eps": 1e-3}),
}
# Earlier ones normalise all groups of channels together, unlike mamba_ssm.
NORMALISES_GROUPS = [int(part) for part in version("transformers").split(".")[:2]] >= [5, 23]


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow  # the first one imports transformers in a process of its own
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_model_of_transformers_gives_its_logits(case: str, tmp_path: Path) -> None:
    name, settings = CHECKPOINTS[case]
    if settings.get("n_groups") == 2 and not NORMALISES_GROUPS:
        pytest.skip("needs transformers 5.23.0 for several groups")
    in_transformers(_WRITE, str(tmp_path), name, json.dumps(settings), json.dumps(tokens().tolist()))
    expected = torch.load(tmp_path / "logits.pt")
    assert 1 < expected.abs().max() < 100
    assert error(our_logits(tmp_path, tokens()), expected) <= TOLERANCE
    if "Mamba" in name:
        # Rounding of weights and activations; measured 2.3e-2.
        assert error(our_logits(tmp_path, tokens(), Dtype.bf16, None), expected) <= 4e-2
    else:
        assert error(our_logits(tmp_path, tokens(), Dtype.fp64, None), expected) <= TOLERANCE


# Each model as its class has it, in our settings; layers of the hybrids 3:1.
SIZES = ["vocab_size=259", "hidden_size=32", "num_layers=4", "intermediate_size=40", "num_heads=2", "num_v_heads=4"]
COMMON = [*SIZES, "head_dim=8", "expand_v=1.5", "conv_size=3", "attn.every=4", "attn.num_heads=4", "attn.qk_norm=true"]
OURS: dict[str, list[str]] = {
    "mamba": [
        *("hidden_size=32", "num_layers=2", "intermediate_size=0", "state_size=6", "conv_kernel=3"),
        *("time_step_rank=5", "norm_eps=1e-4"),
    ],
    "mamba2": [
        *(f"{key}={value}" for key, value in MAMBA.items()),
        *("hidden_size=32", "num_layers=2", "intermediate_size=0", "time_step_limit=[0.01,0.5]", "norm_eps=1e-4"),
    ],
    "olmo_hybrid": [
        *(*COMMON, "o_norm_eps=1e-5", "allow_neg_eigval=true"),
        *("attn.qk_norm_all_heads=true", "attn.norm_after=true", "attn.rope_theta=null"),
    ],
    "qwen3_5_text": [
        *(*COMMON, "zero_centred_norms=true", "attn.gate=true", "attn.num_kv_heads=2"),
        *("attn.head_dim=16", "attn.rotary_dim=4", "attn.rope_theta=500"),
    ],
}
_PARITY = """
import sys
from zeco_train.hf.parity import main
print(main(sys.argv[1:]))
"""
CLASSES = {"mamba": "Mamba", "mamba2": "Mamba2", "olmo_hybrid": "OlmoHybrid", "qwen3_5_text": "Qwen3_5"}


def settings(kind: str) -> list[str]:
    data = ["data.seq_len=64", "data.global_batch=1", "train.eval_sequences=0"]
    preset = {"mamba": "mamba1_tiny", "mamba2": "mamba2_tiny"}.get(kind, "gated_deltanet_tiny")
    return [f"model={preset}", *(f"model.{setting}" for setting in OURS[kind]), *data]


@pytest.fixture(
    scope="module", params=["mamba", "mamba2", "olmo_hybrid", pytest.param("qwen3_5_text", marks=pytest.mark.campaign)]
)
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
    logits = str(tmp_path / "logits.pt")
    name = in_transformers(_READ, str(out), json.dumps(tokens().tolist()), logits)
    assert name.split() == [f"{CLASSES[kind]}ForCausalLM", "torch.float32"]
    ours = our_logits(run, tokens())
    assert error(torch.load(logits), ours) <= TOLERANCE
    assert error(our_logits(out, tokens()), ours) == 0
    # Without a GPU.
    *_, fp32, _, _ = in_transformers(_PARITY, str(out), "tokens=64", "new_tokens=8").splitlines()
    assert (fp32.split()[0], fp32.count("8 of 8"), fp32.split()[-1]) == ("fp32", 2, "ok")
    card = (out / "README.md").read_text()
    assert kind in card
    assert "import fla" not in card
    if kind != "mamba2":
        return
    assert "use transformers ≥ 5.23.0" in card
    assert main([str(run), str(tmp_path / "bf16"), "dtype=bf16"]) == 0
    name = in_transformers(_READ, str(tmp_path / "bf16"), json.dumps(tokens().tolist()), logits)
    assert name.split() == ["Mamba2ForCausalLM", "torch.bfloat16"]
    # Ours keep A_log, dt_bias and D in fp32, theirs round them.
    assert error(torch.load(logits), our_logits(tmp_path / "bf16", tokens(), Dtype.bf16, None)) <= 3e-2
    for folder, dtype in ((out, torch.float32), (tmp_path / "bf16", torch.bfloat16)):
        stored = load_file(folder / WEIGHTS_FILE)
        wide = {stored[f"backbone.layers.1.mixer.{stem}"].dtype for stem in ("A_log", "dt_bias", "D")}
        assert (wide, stored["backbone.norm_f.weight"].dtype) == ({torch.float32}, dtype)
    record = json.loads((out / "config.json").read_text())
    assert record["layer_norm_epsilon"] == record["norm_eps"] == 1e-4
    assert record["time_step_limit"] == record["dt_limit"] == [0.01, 0.5]
    save_file({name: x for name, x in load_file(out / WEIGHTS_FILE).items() if not name.endswith("1.mixer.D")}, logits)
    Path(logits).replace(tmp_path / "bf16" / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"backbone\.layers\.1\.mixer\.D is missing"):
        checked_model(tmp_path / "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "exported", ["olmo_hybrid", pytest.param("qwen3_5_text", marks=pytest.mark.campaign)], indirect=True
)
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
    record = written(small(kind))
    (folder / "config.json").write_text(json.dumps(record))
    found, generator = from_config_json(record, folder), torch.Generator().manual_seed(0)
    model = spec_of(found.model)
    own = {name: torch.randn(shape, generator=generator) for name, shape in model.parameter_shapes.items()}
    tensors = {one.theirs[0]: one.join([own[name] for name in one.ours]) for one in found.written()}
    save_file(tensors, folder / WEIGHTS_FILE)
    return own


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
