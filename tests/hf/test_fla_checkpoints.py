"""Models that fla's own classes have saved, hybrids among them: logits, training on from them, and exports."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from models.attn import AttnConfig
from models.formats.format_registry import FORMATS as ALL_FORMATS
from models.mixers.retnet import RetNetConfig
from tests.hf.logits import error, our_logits
from tests.support.commands import train_here
from tests.support.few import one_of
from tests.support.fla_reference import use_decay_references, use_delta_references, use_fp64
from zeco_train.config.schema import to_plain
from zeco_train.errors import ConfigError
from zeco_train.export import main
from zeco_train.hf.config_json import from_config_json
from zeco_train.hf.folder import INDEX_FILE
from zeco_train.hf.trained import check_continuation
from zeco_train.training.config import Dtype

# Importing fla takes 8 s of CPU time.
pytestmark = [pytest.mark.numeric, pytest.mark.slow]

TOKENS, VOCABULARY = 40, 61
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3}
FORMATS = {one.model_type: one for one in ALL_FORMATS if one.library == "fla"}
UNFUSED = {"fuse_norm": False, "fuse_swiglu": False, "norm_eps": 1e-3, "intermediate_size": 40}
GATED: dict[str, Any] = {"num_heads": 2, "head_dim": 8, "num_v_heads": 4, "expand_v": 1.5, "conv_size": 3}
DELTA = {"gated_deltanet", "delta_net", "kda"}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 7, "rope_theta": 500.0}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "retnet of other widths, unfused": (
        "retnet",
        {"num_heads": 4, "num_kv_heads": 4, "expand_k": 0.5, "expand_v": 1.5, "attn_mode": "parallel", **UNFUSED},
    ),
    "retnet": ("retnet", {"num_heads": 4}),
    "gated_deltanet": ("gated_deltanet", {**GATED, "fuse_norm": False, "norm_eps": 1e-3}),
    "hgrn2 by width": ("hgrn2", {"expand_ratio": 12}),
    "hybrid of gla, window and groups": ("gla", {"num_heads": 4, "attn": ATTENTION}),
}


def fla_classes(name: str) -> tuple[Any, Any]:
    """fla's classes of configuration and model."""
    package, architecture = importlib.import_module("fla.models"), FORMATS[name].architecture
    return getattr(package, architecture.replace("ForCausalLM", "Config")), getattr(package, architecture)


def fla_model(name: str, settings: Mapping[str, Any]) -> Any:
    """fla's model with weights larger than initialised and none at 0 or 1, so that every path matters."""
    kind, model_class = fla_classes(name)
    torch.manual_seed(0)
    model = model_class(kind(**{**SMALL, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    return model


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def their_logits(name: str, model: Any, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """With fla's kernels replaced by its plain references."""
    with monkeypatch.context() as patch, torch.no_grad():
        (use_delta_references if name in DELTA else use_decay_references)(patch)
        if dtype is Dtype.fp64:
            use_fp64(patch)
        model.to(dtype.compute)
        for module in model.modules():
            # `to` rounds the frequencies, or keeps their rounding.
            if hasattr(module, "inv_freq"):
                module.reset_parameters()
        return model(tokens(), use_cache=False).logits[0]


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """What flash-attn documents: [B, T, H, D], window_size (keys before a query, keys after it), −1: all."""
    assert causal
    assert window_size[1] in (0, -1)
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    visible = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)


@pytest.fixture(autouse=True)
def with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's layers without flash-attn and the kernel of the gate, which they ask for when they are made."""
    import fla.layers.attn as fla_layer
    from fla.modules.activations import ACT2FN

    monkeypatch.setattr(fla_layer, "flash_attn_func", _flash_attention)
    monkeypatch.setitem(ACT2FN, "swish", F.silu)


@pytest.mark.parametrize(
    "case", one_of(CHECKPOINTS, "retnet of other widths, unfused", "gated_deltanet", "hybrid of gla, window and groups")
)
def test_checkpoint_of_fla_gives_its_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, settings = CHECKPOINTS[case]
    theirs = fla_model(name, settings)
    theirs.save_pretrained(tmp_path)
    # The references of GLA and of the delta rules compute in fp32.
    dtypes = [(Dtype.fp32, 1e-5)] + ([] if name in {"gla", *DELTA} else [(Dtype.fp64, 1e-12)])
    for dtype, tolerance in dtypes:
        expected = their_logits(name, theirs, dtype, monkeypatch)
        assert expected.dtype is dtype.compute
        assert 1 < expected.abs().max() < 100
        assert (found := error(our_logits(tmp_path, tokens(), dtype), expected)) <= tolerance, (dtype, found)
    if "attn" in settings:
        # A window of one key less, or other frequencies, are another model.
        record = json.loads((tmp_path / "config.json").read_text())
        (attention,) = record["attn"] if isinstance(record["attn"], list) else [record["attn"]]
        change = {"rope_theta": 400.0} if attention["window_size"] is None else {"window_size": 6}
        (tmp_path / "config.json").write_text(json.dumps({**record, "attn": {**attention, **change}}))
        assert error(our_logits(tmp_path, tokens()), expected) > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["retnet", "hgrn2 by width"])
def test_bf16_checkpoint_in_several_files_gives_its_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounded weights are computed with in fp64 on both sides."""
    name, settings = CHECKPOINTS[case]
    theirs = fla_model(name, settings).bfloat16()
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / INDEX_FILE).is_file()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    expected = their_logits(name, theirs, Dtype.fp64, monkeypatch)
    assert error(our_logits(tmp_path, tokens(), Dtype.fp64), expected) <= 1e-12
    # Rounding of activations.
    assert error(our_logits(tmp_path, tokens(), Dtype.bf16), expected) <= 4e-2


# fla's settings, and ours of the same model.
TRAINED_ON: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gla": (
        {"num_heads": 4, "attn": ATTENTION},
        ["num_heads=4", "attn.every=3", "attn.offset=1", "attn.num_kv_heads=2", "attn.window=7", "attn.rope_theta=500"],
    ),
    "gated_deltanet": (GATED, [f"{key}={value}" for key, value in GATED.items()]),
}


@pytest.mark.parametrize("name", TRAINED_ON)
def test_training_from_checkpoint_of_fla_and_export_keep_its_weights(name: str, tmp_path: Path) -> None:
    """A step with a learning rate too small to change fp32 weights; fla's class loads the export."""
    settings, own = TRAINED_ON[name]
    theirs = fla_model(name, {**settings, "vocab_size": 259, "intermediate_size": 32})
    theirs.save_pretrained(tmp_path / "theirs")
    shape = [f"model={name}_tiny", "model.hidden_size=48", "model.num_layers=3", *(f"model.{one}" for one in own)]
    shape += ["model.allow_neg_eigval=true"] if "allow_neg_eigval" in settings else []
    load = [f"checkpoint.load=hf:{tmp_path / 'theirs'}", "train.steps=1", "optim.lr=1e-20", "optim.weight_decay=0"]
    outcome = train_here(f"run_dir={tmp_path / 'run'}", *shape, *load)
    assert outcome.code == 0, outcome
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert first.keys() == again.keys()
    for parameter, tensor in first.items():
        assert torch.equal(tensor, again[parameter]), parameter
    found, info = fla_classes(name)[1].from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    layers = [vars(model.model.layers[2].attn) for model in (found, theirs)]
    assert all(layers[0].get(key) == layers[1].get(key) for key in ("num_heads", "value_dim"))
    if "attn" in settings:
        assert found.config.attn == theirs.config.attn
        card = (tmp_path / "out" / "README.md").read_text()
        heads = "4 heads of 12, 2 of keys and values, window of 7 tokens"
        assert f"| softmax attention | layers 1, counted from 0: {heads} |" in card
        assert "'transformers<5.24' flash-attn (" in card


def test_continuation_compares_layers_and_names_overrides(tmp_path: Path) -> None:
    fla_model("gla", {"num_heads": 4, "attn": ATTENTION}).save_pretrained(tmp_path)
    found = from_config_json(json.loads((tmp_path / "config.json").read_text()), tmp_path).model
    every = AttnConfig(every=3, offset=1, num_kv_heads=2, window=7, rope_theta=500.0)
    check_continuation(tmp_path, dataclasses.replace(found, attn=every))
    with pytest.raises(ConfigError) as caught:
        check_continuation(tmp_path, dataclasses.replace(found, attn=AttnConfig()))
    assert "it takes: model.attn.layers=[1] model.attn.num_heads=4 model.attn.num_kv_heads=2" in caught.value.line
    assert to_plain(found)["attn"]["layers"] == [1]


def test_heads_of_retnet_are_bounded_in_fla() -> None:
    """Why we do not export wider ones."""
    kind, model = fla_classes("retnet")
    wide = RetNetConfig(hidden_size=1024, num_heads=2)
    with torch.device("meta"), pytest.raises(AssertionError, match="less than or equal to 256"):
        model(kind(hidden_size=wide.hidden_size, num_heads=wide.num_heads, num_hidden_layers=1))
