"""Export to the Hugging Face format and back: exact weights, any split, and loading by fla."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.data.test_prepare import hugging_face
from tests.support.comparison import largest
from tests.support.distributed import run_distributed
from tests.support.fla_reference import use_references
from tests.support.model_card import snippet
from tests.support.training import full, train
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.export import ExportSettings, export
from zeco_train.hf.config_json import StoredModel, from_config_json
from zeco_train.hf.folder import INDEX_FILE, WEIGHTS_FILE
from zeco_train.hf.parity import ParitySettings, check_states_are_passed, compare, line
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.hf.weights import write_weights
from zeco_train.lifecycle.join import Launch
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

__all__ = ["hugging_face"]
# All settings that fla's configuration and ours share, except tied embeddings.
MODEL = [
    "model.num_heads=6",
    "model.num_kv_heads=2",
    "model.expand_v=2",
    "model.feature_map=relu",
    "model.clamp_min=-0.2",
    "model.norm_eps=1e-5",
]


def _train(rank: int, world_size: int, folder: str, *overrides: str) -> dict[str, Tensor]:
    steps = ["train.steps=2", "optim.lr=0.01", "sched.warmup_steps=0", "parallel.strategy=zero3", "train.device=cpu"]
    steps += ["data.seq_len=96", "data.global_batch=2"]
    return train(rank, world_size, folder, *steps, *overrides)["parameters"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run of two ranks and its weights in memory."""
    folder = tmp_path_factory.mktemp("export") / "run"
    return folder, run_distributed(_train, 2, str(folder), *MODEL)[0]


@pytest.fixture(scope="module")
def exported(run: tuple[Path, dict[str, Tensor]]) -> Path:
    out = run[0].with_name("out")
    line = export(str(run[0]), out, ExportSettings())
    assert line.startswith(f"{out}: step 2 of default, ")
    assert line.endswith("float32, 0.3 MB in 1 file")
    return out


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EBADF])
def test_file_systems_without_permissions_or_fsync_of_folders(
    number: int, run: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    def only_files(descriptor: int) -> None:
        (refuse if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync)(descriptor)

    monkeypatch.setattr(Path, "chmod", refuse)
    monkeypatch.setattr(os, "fsync", only_files)
    export(str(run[0]), tmp_path / "out", ExportSettings())
    assert (tmp_path / "out" / WEIGHTS_FILE).exists()


def test_export_writes_exact_weights_and_model_card(run: tuple[Path, dict[str, Tensor]], exported: Path) -> None:
    found, (_, expected) = load_file(exported / WEIGHTS_FILE), run
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    assert {path.name for path in exported.iterdir()} == {
        "README.md", "checksums.json", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "zeco_train.json",
    }  # fmt: skip
    card = (exported / "README.md").read_text()
    assert "| trained for | 2 steps, 384 tokens, seed 0 |" in card
    assert "| variants | 2 heads of keys and values; feature map relu; log-decays ≥ -0.2 |" in card
    assert "training loss at step 2" in card
    assert "validation loss at step 2" in card


@pytest.mark.slow
def test_fla_loads_export_and_agrees(
    run: tuple[Path, dict[str, Tensor]],
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Load with transformers' Auto classes, without code from the folder; compare logits and generated text."""
    import fla  # noqa: F401 - registers fla's models
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert type(theirs).__module__ == "fla.models.gla.modeling_gla"
    assert not any(report.values()), report
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, run[1][name]), name
    tokenizer = AutoTokenizer.from_pretrained(exported)
    trained = find_trained(str(exported))
    ids = trained.tokenizer.encode(["def naïve(x):"])[0].tolist()
    assert tokenizer("def naïve(x):")["input_ids"] == ids
    assert tokenizer.eos_token_id == trained.tokenizer.eos_id == theirs.generation_config.eos_token_id
    assert theirs.config.max_position_embeddings == 96

    use_references(monkeypatch)
    mesh = join_ranks(trained.configure([]), Launch(0, 1, 0))
    settings = ParitySettings(tokens=60, prompt_tokens=20, new_tokens=24)
    (found,) = compare(trained, mesh, settings, [Dtype.fp32])
    dist.destroy_process_group()
    assert largest([found.error, found.ours, found.theirs]) < 1e-5
    assert found.same == {"greedy": (24, 24), "drawn": (24, 24)}
    assert line(found).startswith("fp32 ")
    assert line(found).endswith("24 of 24     ok")
    # The model card's lines, but for the GPU that fla's kernels need.
    exec(snippet(exported).replace('"cuda"', '"cpu"'), {})
    assert capsys.readouterr().out.startswith("Once")


def test_transformers_that_would_generate_without_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    class Old:
        def forward(self, input_ids: Tensor, past_key_values: object = None) -> None: ...

    class New:
        def forward(self, input_ids: Tensor, cache: object = None) -> None: ...

    def asked(self: object, input_ids: Tensor, cache: object = None) -> None: ...

    check_states_are_passed(Old())
    monkeypatch.setattr(transformers.GenerationMixin, "prepare_inputs_for_generation", asked)
    check_states_are_passed(New())
    with pytest.raises(ConfigError, match=r"as `cache`, which Old does not take: install transformers<5\.24"):
        check_states_are_passed(Old())


def _load(rank: int, world_size: int, folder: str, layouts: list[tuple[Strategy, Dtype]]) -> list[dict[str, Tensor]]:
    trained = find_trained(folder)
    mesh = join_ranks(trained.configure([]), Launch(rank, world_size, rank))
    models = [load_trained(trained, mesh, dtype=dtype, strategy=strategy) for strategy, dtype in layouts]
    return [{name: full(p).clone() for name, p in model.named_parameters()} for model in models]


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_sharded_export_loads_on_any_split(
    tied: bool, run: tuple[Path, dict[str, Tensor]], exported: Path, tmp_path: Path
) -> None:
    """File sizes are bounded; a tied head is stored once."""
    source, (checkpoint_run, expected) = tmp_path / "sharded", run
    shutil.copytree(exported, source)
    for name in (WEIGHTS_FILE, "checksums.json"):
        (source / name).unlink()
    if tied:
        for name in ("config.json", "zeco_train.json"):
            text = (source / name).read_text()
            (source / name).write_text(text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
        expected = {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"}
    files, num_bytes = write_weights(
        find_trained(str(checkpoint_run)).path, find_model(source), source, torch.float32, 50_000
    )
    sizes = [(source / name).stat().st_size for name in files]
    assert len(sizes) > 4
    assert max(sizes) < 54_000
    assert json.loads((source / INDEX_FILE).read_text())["metadata"]["total_size"] == num_bytes
    layouts = [(Strategy.zero3, Dtype.fp32), (Strategy.hsdp, Dtype.bf16)]
    for found in run_distributed(_load, 3 if tied else 2, str(source), layouts):
        for parameters, (_, dtype) in zip(found, layouts, strict=True):
            assert parameters.keys() == expected.keys()
            for name, tensor in parameters.items():
                assert torch.equal(tensor, expected[name].to(dtype.compute)), name


def find_model(folder: Path) -> StoredModel:
    """The model of config.json, whether or not weights exist."""
    return from_config_json(json.loads((folder / "config.json").read_text()), folder)
