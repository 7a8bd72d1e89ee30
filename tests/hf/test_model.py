"""`zeco_train.load`: one object for runs, checkpoints and exports, equal to what the commands compute."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeco_train
from data.tokenizer import ByteTokenizer
from tests.checkpoint.test_earlier_versions import FIXTURE
from tests.support.commands import run_here, train_here
from tests.support.distributed import run_distributed
from tests.support.training import train
from zeco_train import export
from zeco_train.generate import __main__ as generate_command
from zeco_train.model import Model

pytestmark = pytest.mark.numeric

TEXT = "def main(argument):\n    return argument + 1\n"


@pytest.fixture(scope="module")
def loaded(run: Path) -> Model:
    return zeco_train.load(run, dtype="fp64")


def test_run_checkpoint_and_export_are_one_model(loaded: Model, run: Path, export_of_run: Path) -> None:
    ids = loaded.encode(TEXT)
    logits = loaded.logits(ids)
    assert logits.shape == (1, len(ids), loaded.vocab_size)
    assert (logits.dtype, loaded.dtype, loaded.device, loaded.step) == (
        torch.float64,
        torch.float64,
        torch.device("cpu"),
        2,
    )
    for path in (run / "checkpoints" / "step_00000002", export_of_run, str(run)):
        other = zeco_train.load(path, device="cpu", dtype=torch.float64)
        assert torch.equal(other.logits(ids.tolist()), logits)
        assert other.step == 2
    first = zeco_train.load(run / "checkpoints" / "step_00000001", dtype="fp64")
    assert first.step == 1
    assert not torch.equal(first.logits(ids), logits)
    assert not dist.is_initialized()
    # Without a wish in the dtype of the training.
    assert zeco_train.load(run).logits([[3, 4], [5, 6]]).dtype == torch.float32
    bf16 = zeco_train.load(run, dtype=torch.bfloat16).logits(ids)
    assert bf16.dtype == torch.bfloat16
    # A few roundings of 2^-8 each, of logits near 1.
    assert (bf16 - logits).abs().max() < 0.1


def test_loss_is_that_of_the_logits(loaded: Model) -> None:
    ids = loaded.encode(TEXT)
    rows = torch.stack([ids, ids.flip(0)])
    of_text = torch.cat([torch.tensor([ByteTokenizer.eos_id]), ids])[None]
    for given, inputs in ((rows, rows), (TEXT, of_text)):
        losses = -loaded.logits(inputs)[:, :-1].log_softmax(-1).gather(2, inputs[:, 1:, None])
        assert loaded.loss(given) == pytest.approx(losses.mean().item(), rel=1e-12)


def test_nothing_is_read_across_documents(loaded: Model) -> None:
    ids = loaded.encode(TEXT)
    whole = loaded.logits(torch.stack([ids, ids]), documents=[[0, 7, len(ids)], [0, len(ids)]])
    parts = torch.cat([loaded.logits(ids[:7]), loaded.logits(ids[7:])], 1)
    torch.testing.assert_close(whole[:1], parts, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole[1:], loaded.logits(ids), rtol=1e-10, atol=1e-12)
    losses = -parts[:, :-1].log_softmax(-1).gather(2, ids[None, 1:, None])
    assert loaded.loss(ids, documents=[[0, 7, len(ids)]]) == pytest.approx(losses.mean().item(), rel=1e-12)


def test_texts_are_those_of_the_command(loaded: Model, run: Path, tmp_path: Path) -> None:
    prompts = ["def main(", ""]
    options = {"max_tokens": 12, "samples": 2, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}
    texts = loaded.generate(prompts, **options)  # type: ignore[arg-type]
    assert texts == loaded.generate(prompts, **options)  # type: ignore[arg-type]
    assert [(text.prompt, text.sample) for text in texts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert texts[0].text == loaded.decode([token for token in texts[0].tokens if token < 259])
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    done = run_here(
        generate_command.main, str(run), *given, *named, "--json", str(tmp_path / "a.json"), "train.dtype=fp64"
    )
    assert done.code == 0, done
    record = json.loads((tmp_path / "a.json").read_text())
    assert [text.tokens for text in texts] == [row["tokens"] for row in record["completions"]]
    assert loaded.generate("a", max_tokens=3, temperature=0, stop="zz")[0].ended_by == "length"


WRONG: list[tuple[Callable[[Model], Any], str]] = [
    (lambda model: zeco_train.load("none"), "path=none: no such folder; name a run's folder"),
    (lambda model: zeco_train.load(""), "path=: is empty"),
    (lambda model: zeco_train.load(Path("/")), "path=/: holds no model; name a run's folder"),
    (lambda model: zeco_train.load(model.path, device="cuda:99"), "device=cuda:99: must be auto, cpu"),
    (lambda model: zeco_train.load(model.path, device="gpu"), "device=gpu: must be auto, cpu"),
    (lambda model: zeco_train.load(model.path, dtype="fp16"), "dtype=fp16: must be bf16, fp32, fp64"),
    (lambda model: model.logits([3, 259]), "ids=259: must be from 0 to 258, the model's vocabulary"),
    (lambda model: model.logits([-1]), "ids=-1: must be from 0 to 258"),
    (lambda model: model.logits([]), "ids=a tensor of shape [0]: needs at least 1 tokens"),
    (lambda model: model.logits([0.5]), "ids=[1] torch.float32: must be integers [T] or [B, T]"),
    (lambda model: model.logits("abc"), "ids='abc': must be integers [T] or [B, T]"),  # type: ignore[arg-type]
    (lambda model: model.loss([3]), "ids=a tensor of shape [1]: needs at least 2 tokens of each sequence"),
    (lambda model: model.loss(""), "text=: is empty"),
    (lambda model: model.loss([3, 4, 5], documents=[[0, 2]]), "documents=[[0, 2]]: must have for each of 1 sequences"),
    (
        lambda model: model.logits([3, 4], documents=[[0, 2], [0, 2]]),
        "documents=[[0, 2], [0, 2]]: must have for each of 1",
    ),
    (lambda model: model.loss("ab", documents=[[0, 2]]), "documents=[[0, 2]]: a text is one document; give ids"),
    (
        lambda model: model.generate(torch.zeros(2, 2)),  # type: ignore[arg-type]
        "prompts=tensor([[0., 0.], [0., 0.]]): must be a text, or several",
    ),
    (lambda model: model.generate("a", max_tokens=2.5), "max_tokens=2.5: must be an integer"),  # type: ignore[arg-type]
    (lambda model: zeco_train.load(None), "path=None: must be a folder's path"),  # type: ignore[arg-type]
    (lambda model: model.generate("a", at_eos="no"), "at_eos='no': must be True or False"),  # type: ignore[arg-type]
    (lambda model: model.logits([3, 4], documents=[0, 2]), "documents=[0, 2]: must have"),  # type: ignore[list-item]
    (lambda model: model.encode(3), "text=int: must be a str"),  # type: ignore[arg-type]
    (lambda model: model.generate([]), "prompts=[]: must be a text, or several"),
    (lambda model: model.generate(3), "prompts=3: must be a text, or several"),  # type: ignore[arg-type]
    (lambda model: model.generate("a", max_tokens=0), "max_tokens=0: must be ≥ 1"),
    (lambda model: model.generate("a", samples=0), "samples=0: must be ≥ 1"),
    (lambda model: model.generate("a", temperature=-1), "temperature=-1: must be finite"),
]


@pytest.mark.parametrize(("act", "line"), WRONG, ids=[line.partition(":")[0] for _, line in WRONG])
def test_mistakes_are_one_line(act: Callable[[Model], Any], line: str, loaded: Model) -> None:
    with pytest.raises(zeco_train.ZecoError) as raised:
        act(loaded)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_run_of_version_0_2_is_refused_and_its_store_is_opened(tmp_path: Path) -> None:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    with pytest.raises(zeco_train.ZecoError, match=r"^[^\n]*version [^\n]*$"):
        zeco_train.load(tmp_path / "run")
    store = zeco_train.open_store(tmp_path / "store")
    assert len(store.read(0, 5)) == 5
    assert store.doc_offsets[-1] == store.num_tokens


# Softmax layers, segments and a matmul of the training alone, of which inference knows nothing.
OTHERS = ["model.attn.layers=[1]", "model.num_layers=2"], ["train.segments=2", "train.matmul=fp8", "train.dtype=bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS, ids=["hybrid", "segments and fp8"])
def test_other_runs_and_their_exports(settings: list[str], tmp_path: Path) -> None:
    assert train_here(f"run_dir={tmp_path / 'run'}", "train.steps=1", *settings).code == 0
    assert run_here(export.main, str(tmp_path / "run"), str(tmp_path / "out")).code == 0
    models = [zeco_train.load(tmp_path / name, dtype="fp64") for name in ("run", "out")]
    assert models[0].loss(TEXT) == models[1].loss(TEXT)
    assert models[0].generate(TEXT, max_tokens=5) == models[1].generate(TEXT, max_tokens=5)
    assert models[0].loss(TEXT) == pytest.approx(5.5, abs=0.5)
    assert zeco_train.load(tmp_path / "run").loss(TEXT) == pytest.approx(models[0].loss(TEXT), abs=0.05)


def of_two_ranks(rank: int, world_size: int, folder: str) -> float | None:
    train(rank, world_size, folder, "parallel.strategy=zero3", "train.dtype=fp64", "train.steps=1", "sp=zeco")
    if rank == 0:
        return None
    # Rank 0 takes no part, though there is a process group.
    model = zeco_train.load(folder)
    assert model.generate("a", max_tokens=3)[0].tokens
    return model.loss(TEXT)


@pytest.mark.slow
def test_one_rank_loads_what_several_have_trained(tmp_path: Path) -> None:
    _, loss = run_distributed(of_two_ranks, 2, str(tmp_path / "run"))
    assert loss == zeco_train.load(tmp_path / "run").loss(TEXT)
