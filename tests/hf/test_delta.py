"""DeltaNet, Gated DeltaNet and KDA that fla's own classes have saved: import, logits, export, refused settings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from models.formats.format_registry import FORMATS
from tests.support.commands import train_here
from tests.support.fla_reference import use_delta_references
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.export import main
from zeco_train.hf.config_json import from_config_json
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

HERE = Path("model")
TOKENS, VOCABULARY = 40, 61
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
GATED: dict[str, Any] = {"num_heads": 2, "head_dim": 8, "num_v_heads": 4, "expand_v": 1.5, "conv_size": 3}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": ("gated_deltanet", {**GATED, "fuse_norm": False, "norm_eps": 1e-3}),
    "gated_deltanet, no gate, tied": (
        "gated_deltanet",
        {**GATED, "num_v_heads": None, "use_gate": False, "allow_neg_eigval": True, "tie_word_embeddings": True},
    ),
    "delta_net": ("delta_net", {"num_heads": 4, "expand_k": 0.5, "use_gate": True}),
    "kda": ("kda", {**GATED, "allow_neg_eigval": True}),
}


def fla_model(name: str, settings: dict[str, Any]) -> Any:
    """fla's model with weights larger than initialised and none at 0 or 1, so that every path matters."""
    package = importlib.import_module("fla.models")
    (form,) = (one for one in FORMATS if one.model_type == name)
    kind = getattr(package, form.architecture.replace("ForCausalLM", "Config"))
    torch.manual_seed(0)
    model = getattr(package, form.architecture)(kind(**{**SMALL, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoint_of_fla_gives_its_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's kernels replaced by its plain references, which compute in fp32."""
    theirs = fla_model(*CHECKPOINTS[case])
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with monkeypatch.context() as patch, torch.no_grad():
        use_delta_references(patch)
        expected = theirs(ids, use_cache=False).logits[0]
    trained = find_trained(str(tmp_path))
    mesh = join_ranks(trained.configure(["data.seq_len=64", "train.dtype=fp32"]), Launch(0, 1, 0))
    model, scan = load_trained(trained, mesh, dtype=Dtype.fp32, strategy=Strategy.zero2), local_exchange()
    logits = model(ids, SequencePosition((0, TOKENS), exchange=scan))[0]
    dist.destroy_process_group()
    assert 1 < expected.abs().max() < 100
    assert (logits - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["gated_deltanet", "delta_net", "kda"])
def test_training_from_checkpoint_of_fla_and_export_keep_its_weights(case: str, tmp_path: Path) -> None:
    """A step with a learning rate too small to change fp32 weights; fla's class loads the export."""
    mixer, settings = CHECKPOINTS[case]
    theirs = fla_model(mixer, {**settings, "vocab_size": 259, "norm_eps": 1e-6})
    theirs.save_pretrained(tmp_path / "theirs")
    own = {**settings, "hidden_size": 32, "num_layers": 2, "intermediate_size": 40}
    shape = [f"model.{key}={value}" for key, value in own.items() if key not in ("fuse_norm", "norm_eps")]
    load = [f"checkpoint.load=hf:{tmp_path / 'theirs'}", "train.steps=1", "optim.lr=1e-20", "optim.weight_decay=0"]
    outcome = train_here(f"run_dir={tmp_path / 'run'}", f"model={mixer}_tiny", *shape, *load)
    assert outcome.code == 0, outcome
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    found, info = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert found.model.layers[1].attn.value_dim == theirs.model.layers[1].attn.value_dim


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("gated_deltanet", "use_short_conv", False, "layers without short convolutions: not supported, only True"),
        ("gated_deltanet", "output_gate_activation", "sigmoid", "another function of the output gate: not supported"),
        ("delta_net", "qk_norm", "sum", "keys of another norm, with which the state may grow without bound"),
        ("delta_net", "use_beta", False, "a rule that writes all of each value: not supported, only True"),
        ("delta_net", "qk_activation", "elu", "another function of queries and keys: not supported, only silu"),
        ("kda", "lower_bound", -5.0, "decays with a lower bound: not supported, only None"),
        ("kda", "safe_gate", True, "decays with a lower bound: not supported, only False"),
    ],
)
def test_settings_without_an_equal_here_are_refused(name: str, key: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_config_json({"model_type": name, "num_hidden_layers": 2, key: value}, HERE)
    assert f"{key}=" in error.value.line
    assert problem in error.value.line
