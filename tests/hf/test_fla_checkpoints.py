"""RetNet, HGRN and HGRN2 that fla's own classes have saved: import, logits, and the settings that are refused."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from models.formats.format_registry import FORMATS as ALL_FORMATS
from models.mixers.retnet import RetNetConfig
from tests.support.commands import train_here
from tests.support.fla_reference import use_decay_references, use_fp64
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.export import main
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.hf.folder import INDEX_FILE
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

HERE = Path("model")
TOKENS, VOCABULARY = 40, 61
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3}
FORMATS = {one.model_type: one for one in ALL_FORMATS if one.library == "fla"}
# What each format needs besides its type: we do not support the default feature map of fla's linear attention.
NEEDED: dict[str, dict[str, Any]] = {"linear_attn": {"feature_map": "elu"}}
UNFUSED = {"fuse_norm": False, "fuse_swiglu": False, "norm_eps": 1e-3, "intermediate_size": 40}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "retnet": ("retnet", {"num_heads": 4}),
    "retnet of other widths, unfused": (
        "retnet",
        {"num_heads": 4, "num_kv_heads": 4, "expand_k": 0.5, "expand_v": 1.5, "attn_mode": "parallel", **UNFUSED},
    ),
    "retnet, tied": ("retnet", {"num_heads": 2, "tie_word_embeddings": True, "hidden_ratio": None}),
    "hgrn": ("hgrn", {}),
    "hgrn of another width, unfused": ("hgrn", {"expand_ratio": 2, **UNFUSED}),
    "hgrn2 by width": ("hgrn2", {"expand_ratio": 12}),
    "hgrn2 by heads, unfused": (
        "hgrn2",
        {"num_heads": 4, "expand_ratio": None, "attn_mode": "fused_chunk", **UNFUSED},
    ),
    "hgrn2 by width and other heads": ("hgrn2", {"num_heads": 3, "expand_ratio": 8}),
    "hgrn2 of one layer, tied": (
        "hgrn2",
        {"expand_ratio": 24, "num_hidden_layers": 1, "tie_word_embeddings": True, "hidden_ratio": 3},
    ),
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


def their_logits(model: Any, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch, torch.no_grad():
        use_decay_references(patch)
        if dtype is Dtype.fp64:
            use_fp64(patch)
        model.to(dtype.compute)
        for module in model.modules():
            # `to` rounds the frequencies, or keeps their rounding.
            if hasattr(module, "inv_freq"):
                module.reset_parameters()
        return model(tokens(), use_cache=False).logits[0]


def our_logits(folder: Path, dtype: Dtype) -> Tensor:
    trained = find_trained(str(folder))
    mesh = join_ranks(trained.configure(["data.seq_len=64", f"train.dtype={dtype.value}"]), Launch(0, 1, 0))
    model, scan = load_trained(trained, mesh, dtype=dtype, strategy=Strategy.zero2), local_exchange()
    logits = model(tokens(), SequencePosition((0, TOKENS), exchange=scan))[0]
    scan.drain()
    dist.destroy_process_group()
    return logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_of_fla_gives_its_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = fla_model(*CHECKPOINTS[name])
    theirs.save_pretrained(tmp_path)
    for dtype, tolerance in ((Dtype.fp32, 1e-5), (Dtype.fp64, 1e-12)):
        expected = their_logits(theirs, dtype, monkeypatch)
        assert expected.dtype is dtype.compute
        assert 1 < expected.abs().max() < 100
        assert (found := error(our_logits(tmp_path, dtype), expected)) <= tolerance, (dtype, found)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("mixer", ["retnet", "hgrn2"])
def test_bf16_checkpoint_in_several_files_gives_its_logits(
    mixer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounded weights are computed with in fp64 on both sides."""
    theirs = fla_model(*CHECKPOINTS["retnet" if mixer == "retnet" else "hgrn2 by width"]).bfloat16()
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / INDEX_FILE).is_file()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    expected = their_logits(theirs, Dtype.fp64, monkeypatch)
    assert error(our_logits(tmp_path, Dtype.fp64), expected) <= 1e-12
    # Rounding of activations.
    assert error(our_logits(tmp_path, Dtype.bf16), expected) <= 4e-2


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mixer", "settings"),
    [
        ("retnet", {"num_heads": 2, "expand_v": 1.5, "num_kv_heads": 2}),
        ("hgrn2", {"expand_ratio": 16, "num_heads": 2}),
    ],
)
def test_training_from_checkpoint_of_fla_and_export_keep_its_weights(
    mixer: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A step with a learning rate too small to change fp32 weights; fla's class loads the export."""
    theirs = fla_model(mixer, {**settings, "vocab_size": 259, "intermediate_size": 32})
    theirs.save_pretrained(tmp_path / "theirs")
    shape = [f"model={mixer}_tiny", "model.hidden_size=48", "model.num_layers=3"]
    shape += ["model.expand_v=1.5"] if mixer == "retnet" else ["model.num_heads=3"]
    load = [f"checkpoint.load=hf:{tmp_path / 'theirs'}", "train.steps=1", "optim.lr=1e-20", "optim.weight_decay=0"]
    outcome = train_here(f"run_dir={tmp_path / 'run'}", *shape, *load)
    assert outcome.code == 0, outcome
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    found, info = fla_classes(mixer)[1].from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert found.model.layers[1].attn.num_heads == theirs.model.layers[1].attn.num_heads


# Keys that change neither the model's parameters nor its logits: how they are computed, the loss, and other tools'.
HARMLESS = {
    *("attn_mode", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "use_cache"),
    *("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    # Of short convolutions, which are refused.
    "conv_size",
    # Names of weights, of which both are read.
    "fuse_norm",
}
HARMLESS_IN: dict[str, set[str]] = {
    # fla's layer does not read them.
    "gla": {"use_gk", "use_gv"},
    # Its layers do not read it beside expand_ratio.
    "hgrn2": {"num_heads"},
    # Without parameters in the feature maps that are supported.
    "linear_attn": {"tie_feature_map_qk"},
}


def another(value: Any) -> Any:
    if value is None:
        return 3
    return not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value * 2


@pytest.mark.parametrize("name", FORMATS)
def test_every_key_of_fla_is_read_refused_or_known_to_change_nothing(name: str) -> None:
    kind, _ = fla_classes(name)
    declared = inspect.signature(kind.__init__).parameters.keys() - {"self", "kwargs"}
    record = {**kind(**NEEDED.get(name, {})).to_dict(), "architectures": [FORMATS[name].architecture]}
    assert declared <= record.keys()
    whole, unread = from_config_json(record, HERE), set()
    for key in sorted(declared):
        with contextlib.suppress(ConfigError):
            if from_config_json({**record, key: another(record[key])}, HERE) == whole:
                unread.add(key)
    assert unread <= HARMLESS | HARMLESS_IN.get(name, set())


REFUSED: list[tuple[str, Any, str]] = [
    ("attn", {"layers": [1], "num_heads": 4, "sinks": 1}, "not supported, only layers, num_heads"),
    ("attnres_block_size", 2, "residuals over blocks of layers: not supported, only None"),
    ("elementwise_affine", False, "norms without weights: not supported, only True"),
    ("hidden_act", "powlu", "another activation of the MLP and the output gate: not supported, only swish"),
    ("quantization_config", {"bits": 4}, "quantised weights: not supported, only None"),
    ("use_short_conv", True, "short convolutions before the operator: not supported, only False"),
    ("architectures", ["{}Model"], "can be read"),
    ("fuse_norm", "yes", "must be true or false"),
    ("tie_word_embeddings", None, "must be true or false"),
    ("norm_eps", 0, "must be finite and > 0"),
    ("norm_eps", None, "must be a number"),
    ("hidden_ratio", 2.5, "must be a whole number"),
    ("intermediate_size", 0, "must be a whole number ≥ 1"),
]
REFUSED_BY: dict[str, list[tuple[str, Any, str]]] = {
    "retnet": [
        ("feature_map", "relu", "a feature map of queries and keys: not supported, only None"),
        ("num_kv_heads", 2, "that serve several heads of queries: not supported, only None or num_heads"),
        ("use_output_gate", False, "no output gate: not supported, only True"),
        ("rope_theta", 500000.0, "another one than fla's layer has: not supported, only 10000.0"),
        ("num_heads", 7, "must divide"),
        ("expand_k", 0.3, "times it must be a multiple of num_heads"),
        ("expand_v", None, "must be a number"),
    ],
    "hgrn": [
        ("use_lower_bound", False, "no lower bounds of the forget gates: not supported, only True"),
        ("expand_ratio", 1.5, "must be a whole number"),
        ("expand_ratio", None, "must be a whole number"),
        ("expand_ratio", 0, "must be a whole number ≥ 1"),
    ],
    "hgrn2": [
        ("use_lower_bound", False, "no lower bounds of the forget gates: not supported, only True"),
        ("num_heads", 7, "must divide"),
        ("expand_ratio", 100, "must divide hidden_size, or be null beside num_heads"),
        ("expand_ratio", 12.5, "must be a whole number"),
        ("expand_ratio", 4096, "must divide hidden_size"),
    ],
}


@pytest.mark.parametrize(
    ("mixer", "key", "value", "problem"),
    [(mixer, *case) for mixer, cases in REFUSED_BY.items() for case in (*REFUSED, *cases)],
    ids=lambda value: f"{value!s:.20}",
)
def test_settings_that_we_lack_are_refused_by_name(mixer: str, key: str, value: Any, problem: str) -> None:
    record = {**fla_classes(mixer)[0]().to_dict(), "architectures": [FORMATS[mixer].architecture]}
    # Otherwise HGRN2's layers do not read num_heads.
    record |= {"expand_ratio": None} if mixer == "hgrn2" and key == "num_heads" else {}
    with pytest.raises(ConfigError) as caught:
        from_config_json({**record, key: value}, HERE)
    assert any(f"{key}{sign}" in caught.value.line for sign in "=:.")
    assert problem in caught.value.line
    assert "\n" not in caught.value.line


def test_retnet_with_wider_heads_than_fla_takes_is_not_exported() -> None:
    wide = RetNetConfig(hidden_size=1024, num_heads=2)
    with pytest.raises(ConfigError, match=r"model\.head_k_dim=512: fla's RetNet takes at most 256"):
        to_config_json(wide, SimpleNamespace(eos_id=2), None, 128, "float32")
    kind, model = fla_classes("retnet")
    with torch.device("meta"), pytest.raises(AssertionError, match="less than or equal to 256"):
        model(kind(hidden_size=1024, num_heads=2, num_hidden_layers=1))
