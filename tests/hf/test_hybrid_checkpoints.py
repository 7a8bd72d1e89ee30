"""Hybrids with fla's key `attn`: logits of its own classes, round trips, and what either side does not know."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from models.attn import AttnConfig
from models.formats.format import ModelFormat
from models.formats.format_registry import FORMATS
from models.mixers.gla import GLAConfig
from models.mixers.mamba2 import Mamba2Config
from tests.hf.test_fla_checkpoints import error, fla_model, our_logits, their_logits
from tests.support.commands import train_here
from zeco_train.config.schema import to_plain
from zeco_train.errors import ConfigError
from zeco_train.export import main
from zeco_train.hf.card import _memory, _softmax
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.hf.trained import check_continuation
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

HERE = Path("model")
TOKENIZER: Any = SimpleNamespace(eos_id=2)
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 7, "rope_theta": 500.0}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("gla", {"num_heads": 4, "attn": {"layers": [0, 2], "num_heads": 6}}),
    "gla, window and groups": ("gla", {"num_heads": 4, "attn": ATTENTION}),
    "retnet": ("retnet", {"num_heads": 4, "attn": {**ATTENTION, "layers": [2, 1]}}),
    "hgrn2 in a list": ("hgrn2", {"expand_ratio": 12, "attn": [ATTENTION]}),
}


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """What flash-attn documents: [B, T, H, D], window_size (keys before a query, keys after it), −1: all."""
    assert causal
    assert window_size[1] in (0, -1)
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    visible = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's layer without flash-attn, which it asks for when it is made."""
    import fla.layers.attn as fla_layer

    monkeypatch.setattr(fla_layer, "flash_attn_func", _flash_attention)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.usefixtures("with_attention")
def test_hybrid_of_fla_gives_its_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = fla_model(*CHECKPOINTS[name])
    theirs.save_pretrained(tmp_path)
    # fla's operator of GLA is fp32 here.
    dtypes = [(Dtype.fp32, 1e-5)] if name.startswith("gla") else [(Dtype.fp32, 1e-5), (Dtype.fp64, 1e-12)]
    for dtype, tolerance in dtypes:
        expected = their_logits(theirs, dtype, monkeypatch)
        assert 1 < expected.abs().max() < 100
        assert (found := error(our_logits(tmp_path, dtype), expected)) <= tolerance, (dtype, found)
    # A window of one key less, or other frequencies, are another model.
    record = json.loads((tmp_path / "config.json").read_text())
    (attention,) = record["attn"] if isinstance(record["attn"], list) else [record["attn"]]
    change = {"rope_theta": 400.0} if attention["window_size"] is None else {"window_size": 6}
    (tmp_path / "config.json").write_text(json.dumps({**record, "attn": {**attention, **change}}))
    assert error(our_logits(tmp_path, Dtype.fp32), expected) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("with_attention")
def test_export_of_a_hybrid_keeps_all_bits_and_is_read_by_fla(tmp_path: Path) -> None:
    """From fla's own checkpoint through a step that changes nothing."""
    from fla.models import GLAForCausalLM

    theirs = fla_model("gla", {"num_heads": 4, "vocab_size": 259, "intermediate_size": 32, "attn": ATTENTION})
    theirs.save_pretrained(tmp_path / "theirs")
    shape = ["model=gla_tiny", "model.hidden_size=48", "model.num_layers=3", "model.num_heads=4"]
    shape += ["model.intermediate_size=32", "model.attn.every=3", "model.attn.offset=1", "model.attn.num_kv_heads=2"]
    shape += ["model.attn.window=7", "model.attn.rope_theta=500"]
    load = [f"checkpoint.load=hf:{tmp_path / 'theirs'}", "train.steps=1", "optim.lr=1e-20", "optim.weight_decay=0"]
    data = ["data.seq_len=64", "data.global_batch=1", "train.eval_sequences=0"]
    outcome = train_here(f"run_dir={tmp_path / 'run'}", *shape, *load, *data)
    assert outcome.code == 0, outcome
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    found, info = GLAForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert found.config.attn == theirs.config.attn
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "| softmax attention | layers 1, counted from 0: 4 heads of 12, 2 of keys and values, window of 7 tokens |"
        in card
    )
    assert "'transformers<5.24' flash-attn (" in card


@pytest.mark.parametrize("form", [one for one in FORMATS if one.library == "fla"], ids=lambda form: form.model_type)
def test_configuration_of_a_hybrid_survives_the_round_trip(form: ModelFormat) -> None:
    attn = AttnConfig(every=2, offset=0, num_heads=4, num_kv_heads=4, head_dim=32, window=1 << 30, rope_theta=1e7)
    model = form.mixer.config_class(name="model", num_layers=5, attn=attn)
    record = json.loads(json.dumps(to_config_json(model, TOKENIZER, None, 128, "float32")))
    assert record["attn"] == {
        "layers": [0, 2, 4],
        "num_heads": 4,
        "num_kv_heads": 4,
        "qkv_bias": False,
        "rope_theta": 1e7,
        "window_size": 1 << 30,
    }
    assert from_config_json(record, HERE).model == model.canonical()
    assert model.canonical().attn == AttnConfig(layers=[0, 2, 4], num_heads=4, window=1 << 30, rope_theta=1e7)
    assert model.canonical().canonical() == model.canonical()


def test_no_layers_are_no_hybrid() -> None:
    plain = GLAConfig(name="model")
    record = to_config_json(plain, TOKENIZER, None, 128, "float32")
    assert record["attn"] is None
    assert from_config_json({**record, "attn": {"layers": [], "num_heads": 4}}, HERE).model == plain
    assert dataclasses.replace(plain, attn=AttnConfig(gate=True)).canonical() == plain
    assert _softmax(plain) == {}
    assert "state of one size: it knows no longest sequence" in _memory(plain)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"qk_norm": True}, "qk_norm=true"),
        ({"gate": True}, "gate=true"),
        ({"norm_after": True}, "norm_after=true"),
        ({"head_dim": 64}, "head_dim=64"),
        ({"rotary_dim": 2}, "rotary_dim=2"),
        ({"rope_theta": None}, "rope_theta=null"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_fla_cannot_say_is_not_exported(change: dict[str, Any], refused: str) -> None:
    model = GLAConfig(attn=AttnConfig(**{"every": 2, **change}))
    with pytest.raises(ConfigError) as caught:
        to_config_json(model, TOKENIZER, None, 128, "float32")
    assert caught.value.line.startswith(f"error: model.attn.{refused}: ")
    assert caught.value.line.endswith("so this model cannot be exported")


def test_models_of_transformers_have_no_softmax_layers() -> None:
    model = Mamba2Config(attn=AttnConfig(every=2, num_heads=4))
    with pytest.raises(ConfigError, match=r"model\.attn\.layers=\[1, 3\]: transformers' Mamba2 knows null only"):
        to_config_json(model, TOKENIZER, None, 128, "float32")
    record = to_config_json(Mamba2Config(), TOKENIZER, None, 128, "float32")
    with pytest.raises(ConfigError, match=r"attn=.*layers of softmax attention: not supported, only None"):
        from_config_json({**record, "attn": {"layers": [1], "num_heads": 4}}, HERE)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"qk_norm": True}, "attn.qk_norm=True: not supported, only layers, num_heads, "),
        ({"qkv_bias": True}, "attn.qkv_bias=True: biases of queries, keys and values: not supported, only False"),
        ({"layers": None}, "attn.layers=None: must be a list of layers"),
        ({"layers": [1, 1]}, "must be ascending numbers of layers, from 0 to 3"),
        ({"layers": [-1]}, "attn.layers=-1: must be a whole number ≥ 0"),
        ({"layers": [4]}, "must be ascending numbers of layers, from 0 to 3"),
        ({"layers": [True]}, "attn.layers=True: must be a whole number ≥ 0"),
        ({"num_heads": None}, "attn.num_heads=None: must be a whole number ≥ 1"),
        ({"num_kv_heads": 3}, "must divide the 4 heads of queries"),
        ({"window_size": 0}, "attn.window_size=0: must be a whole number ≥ 1"),
        ({"rope_theta": None}, "attn.rope_theta=None: must be finite and > 1"),
        ({"rope_theta": float("nan")}, "attn.rope_theta=nan: must be finite and > 1"),
        # Of a hostile file.
        ({"rope_theta": 10**400}, "must be finite and > 1"),
        ({"window_size": 10**400}, "must be a whole number ≥ 1"),
        ({"x" * 10**6: 1}, "not supported, only layers"),
        ({"a\nb\x1b[2J": 1}, "not supported, only layers"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_unsupported_softmax_layers_are_refused_by_name(change: dict[str, Any], problem: str) -> None:
    record = to_config_json(GLAConfig(), TOKENIZER, None, 128, "float32")
    with pytest.raises(ConfigError) as caught:
        from_config_json({**record, "attn": {"layers": [1], "num_heads": 4, **change}}, HERE)
    assert problem in caught.value.line
    assert len(caught.value.line) < 500
    assert "\n" not in caught.value.line


@pytest.mark.parametrize("value", [[{"layers": [1], "num_heads": 4}, {"layers": [2], "num_heads": 2}], "all", 3])
def test_several_shapes_of_softmax_layers_are_refused(value: Any) -> None:
    record = to_config_json(GLAConfig(), TOKENIZER, None, 128, "float32")
    with pytest.raises(ConfigError, match="must be null or one mapping: all softmax layers have one shape"):
        from_config_json({**record, "attn": value}, HERE)


@pytest.mark.usefixtures("with_attention")
def test_continuation_compares_layers_and_names_overrides(tmp_path: Path) -> None:
    fla_model("gla", {"num_heads": 4, "attn": ATTENTION}).save_pretrained(tmp_path)
    found = from_config_json(json.loads((tmp_path / "config.json").read_text()), tmp_path).model
    every = AttnConfig(every=3, offset=1, num_kv_heads=2, window=7, rope_theta=500.0)
    check_continuation(tmp_path, dataclasses.replace(found, attn=every))
    with pytest.raises(ConfigError) as caught:
        check_continuation(tmp_path, dataclasses.replace(found, attn=AttnConfig()))
    assert "it takes: model.attn.layers=[1] model.attn.num_heads=4 model.attn.num_kv_heads=2" in caught.value.line
    assert to_plain(found)["attn"]["layers"] == [1]
