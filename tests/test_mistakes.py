"""Every mistake of a user ends with one line that names it, an exit code ≠ 0 and nothing overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.store import META_FILE, TOKENS_FILE, StoreWriter
from tests.commands import REPOSITORY, SMALL, Command, Outcome, snapshot, torchrun, train_here
from zeco_train import build, config
from zeco_train.config import load_config
from zeco_train.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    ZecoError,
)
from zeco_train.mesh import Launch

# Exit codes, by kind of mistake.
CONFIG, DATA, CHECKPOINT = ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code


def write_store(
    folder: Path, num_tokens: int = 4000, seed: int = 0, vocab_size: int = 259, kind: str = "bytes"
) -> Path:
    tokens = np.random.default_rng(seed).integers(2, vocab_size, num_tokens)
    tokens[-1] = 1
    with StoreWriter(folder, vocab_size=vocab_size, eos_id=1, tokenizer={"kind": kind}) as writer:
        writer.append(tokens, [num_tokens])
        writer.finish("sources")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run of two steps that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    outcome = train_here(*on(store), f"run_dir={folder}", "train.steps=2")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def on(store: Path) -> list[str]:
    return ["data=tokens", f"data.path={store}"]


def check_line(outcome: Outcome, code: int, *parts: str) -> None:
    """The one line is all that stderr has, and says each of `parts`."""
    assert outcome.code == code, outcome
    assert len(outcome.errors) == 1, outcome
    assert outcome.err == f"error: {outcome.errors[0]}\n"
    for part in parts:
        assert part in outcome.errors[0]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        # Unknown keys, groups and options.
        ("train.step=3", ["train.step=3: unknown key", "did you mean train.steps?"]),
        ("steps=3", ["steps=3: unknown key", "did you mean train.steps?"]),
        ("kind=wsd", ["did you mean data.kind or sched.kind or logger.kind?"]),
        ("+train.stepz=3", ["train.stepz=3: unknown key", "did you mean train.steps?"]),
        ("++train.stepz=3", ["train.stepz=3: unknown key", "did you mean train.steps?"]),
        ("train={stepz:3}", ["train.stepz=3: unknown key", "did you mean train.steps?"]),
        ("qwertz=1", ["qwertz=1: unknown key", "--help"]),
        ("hydra.run.dir=x", ["hydra.run.dir=x: ", "no hydra settings"]),
        ("sp=nonsense", ["sp=nonsense: must be one of dp, lasp1, lasp2, zeco"]),
        ("sp.backend=nonsense", ["sp.backend=nonsense: must be one of dp, lasp1, lasp2, zeco"]),
        ("sp=null", ["sp=null: must be one of dp, lasp1, lasp2, zeco"]),
        ("sp=1", ["sp=1: must be one of dp, lasp1, lasp2, zeco"]),
        ("model=[gla_tiny]", ["model=[gla_tiny]: must be one of gla_125m, gla_1b, gla_340m, gla_tiny"]),
        ("parallel=zero9", ["parallel=zero9: must be one of ddp, hsdp, zero2, zero3"]),
        ("logger=tensorboard", ["logger=tensorboard: must be one of none, wandb"]),
        ("+experiment=nope", ["experiment=nope: must be one of quickstart"]),
        ("experiment=quickstart", ["write +experiment=quickstart"]),
        ("+sp=zeco", ["write sp=zeco"]),
        ("+train.steps=4", ["+train.steps=4: the key exists; write train.steps=4"]),
        ("sp@model=dp", ["argument=sp@model=dp: ", "write sp=dp"]),
        ("train=3", ["train=3: is a section; set its keys, such as train.steps"]),
        # Form.
        ("train.steps", ["argument=train.steps: must be KEY=VALUE"]),
        ("--steps=3", ["argument=--steps=3: must be KEY=VALUE"]),
        ("", ["must be KEY=VALUE"]),
        ("train.steps=[1", ["argument=train.steps=[1: ", "needs quotes: \"train.steps='[1'\""]),
        ("name=x(1)", ["needs quotes: \"name='x(1)'\""]),
        ("~train.steps", ["argument=~train.steps: nothing can be deleted"]),
        ("train.steps=1,2", ["train.steps=1,2: takes one value"]),
        ("name=${nope}", ["name=${nope}: ", "'nope' not found"]),
        # Types.
        ("train.steps=many", ["train.steps=many: must be a whole number"]),
        ("train.steps=1.5", ["train.steps=1.5: must be a whole number"]),
        ("train.steps=null", ["train.steps=null: must be a whole number"]),
        ("train.steps=99999999999999999999", ["must fit into 64 bits"]),
        ("data.seq_len=64k", ["data.seq_len=64k: must be a whole number"]),
        ("train.dtype=fp8", ["train.dtype=fp8: must be one of bf16, fp32, fp64"]),
        ("train.device=tpu", ["train.device=tpu: must be one of auto, cpu, cuda"]),
        ("parallel.strategy=zero9", ["parallel.strategy=zero9: must be one of ddp, zero2, zero3, hsdp"]),
        ("sp.all_scan.algorithm=ring", ["sp.all_scan.algorithm=ring: must be one of chain, two_shot"]),
        ("optim.lr=fast", ["optim.lr=fast: must be a number"]),
        ("optim.lr=nan", ["optim.lr=nan: must be finite"]),
        ("optim.betas=[0.9]", ["optim.betas=[0.9]: must be a list [a number, a number]"]),
        ("optim.betas=0.9", ["optim.betas=0.9: must be a list [a number, a number]"]),
        ("logger.tags=fast", ["logger.tags=fast: must be a list [text, …]"]),
        ("data.reset_state_at_document=maybe", ["data.reset_state_at_document=maybe: must be true or false"]),
        ("checkpoint.load=[a]", ["checkpoint.load=[a]: must be text or null"]),
        # Ranges.
        ("seed=-1", ["seed=-1: must be ≥ 0"]),
        ("name=", ["name=: must not be empty"]),
        ("run_dir=", ["run_dir=: must not be empty"]),
        ("train.steps=0", ["train.steps=0: must be ≥ 1"]),
        ("train.steps=-5", ["train.steps=-5: must be ≥ 1"]),
        ("train.steps=10000000000", ["train.steps=10000000000: must be ≤ 1000000000"]),
        ("train.log_every=0", ["train.log_every=0: must be ≥ 1"]),
        ("train.eval_every=-1", ["train.eval_every=-1: must be ≥ 0"]),
        ("train.eval_sequences=-1", ["train.eval_sequences=-1: must be ≥ 0"]),
        ("checkpoint.every=-1", ["checkpoint.every=-1: must be ≥ 0"]),
        ("checkpoint.keep=-1", ["checkpoint.keep=-1: must be ≥ 0"]),
        ("sched.warmup_steps=-1", ["sched.warmup_steps=-1: must be ≥ 0"]),
        ("optim.lr=-1e-3", ["optim.lr=-0.001: must be > 0"]),
        ("optim.lr=1e31", ["optim.lr=1e+31: must be > 0 and ≤ 1e30"]),
        ("optim.weight_decay=-1", ["optim.weight_decay=-1.0: must be ≥ 0"]),
        ("optim.betas=[0.9,1]", ["optim.betas=", "must be in [0, 1)"]),
        ("parallel.timeout_seconds=0", ["parallel.timeout_seconds=0.0: must be "]),
        ("sp.size=0", ["sp.size=0: must be ≥ 1, or -1"]),
        ("sp.size=-2", ["sp.size=-2: must be ≥ 1, or -1"]),
        ("sp.all_scan.blocks=0", ["sp.all_scan.blocks=0: must be ≥ 1"]),
        ("model.num_heads=3", ["model.num_heads=3: must divide", "nearest: 2"]),
        ("model.hidden_size=-32", ["model.hidden_size=-32: must be a whole number ≥ 1"]),
        ("model.num_layers=0", ["model.num_layers=0: must be a whole number ≥ 1"]),
        ("model.num_layers=1000000000000", ["model=gla_tiny: ", "this machine has"]),
        ("data.seq_len=0", ["data.seq_len=0: must be positive", "nearest legal value: 1"]),
        ("data.seq_len=-64", ["data.seq_len=-64: must be positive"]),
        ("data.global_batch=0", ["data.global_batch=0: must be positive"]),
        ("data.global_batch=-4", ["data.global_batch=-4: must be positive"]),
        ("data.global_batch=5000000000", ["data.global_batch=5000000000: must be ≤ 1000000000"]),
        ("data.micro_batch=0", ["data.micro_batch=0: must be positive"]),
        ("data.micro_batch=3", ["data.global_batch=4: ", "1 × 3 = 3; nearest legal values: 3, 6"]),
        ("data.validation_fraction=2", ["data.validation_fraction=2.0: allowed: 0 (none) to 0.5"]),
        # What does not go together, and what a later version has.
        ("data=tokens", ["data.path=", "needs the folder of a token store"]),
        ("data.path=/tmp", ["data.path=/tmp: ", "data=embedded takes none"]),
        ("train.segments=2", ["train.segments=2: this version has 1 only"]),
        ("train.recompute=full", ["train.recompute=full: this version has none only"]),
        ("train.device=cuda", ["train.device=cuda: 1 ranks on this machine, 0 CUDA devices"]),
    ],
)
def test_configuration(override: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if override == "train.device=cuda":
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_line(train_here(f"run_dir={tmp_path / 'run'}", override), CONFIG, *parts)
    assert not any(tmp_path.iterdir())


def test_micro_batch_with_documents(tmp_path: Path) -> None:
    overrides = ["data.reset_state_at_document=true", "data.micro_batch=2"]
    check_line(train_here(f"run_dir={tmp_path / 'run'}", *overrides), CONFIG, "data.micro_batch=2: must be 1 with")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: 3\n", r"bad\.yaml.*line 2"),
        ("# @package _global_\ntrain:\n  stepz: 3\n", r"^experiment=bad: .*/bad\.yaml: train\.stepz: "),
        (
            "# @package _global_\ntrain:\n  steps: many\n",
            r"^experiment=bad: .*/bad\.yaml: train\.steps: ",
        ),
        ("train:\n  steps: 3\n", r"^experiment=bad: .*first line must be: # @package _global_$"),
        ("# @package _global_\ndefaults:\n  - override /sp: nope\n", r"Could not find 'sp/nope'"),
        ("# @package _global_\nname: ${nope}\n", r"'nope' not found"),
    ],
)
def test_mistakes_in_a_file_of_configs(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = shutil.copytree(config.CONFIG_DIR, tmp_path / "configs")
    (configs / "experiment" / "bad.yaml").write_text(text)
    monkeypatch.setattr(config, "CONFIG_DIR", configs)
    with pytest.raises(ConfigError) as caught:
        load_config(["+experiment=bad"])
    assert re.search(expected, str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "overrides", "parts"),
    [
        (4, ["sp.size=3"], ["sp.size=3: must divide the world size 4: 1, 2, 4, or -1"]),
        (4, ["sp.size=8"], ["sp.size=8: must divide the world size 4"]),
        (2, ["sp=dp", "sp.size=2"], ["sp.size=2: sp=dp ", "needs 1"]),
        (4, ["data.seq_len=63"], ["data.seq_len=63: must divide by sp.size=4; nearest legal values: 60, 64"]),
        (4, ["data.seq_len=2"], ["data.seq_len=2: ", "nearest legal values: 4"]),
        (4, ["sp=dp", "data.global_batch=6"], ["data.global_batch=6: must be a multiple of", "legal values: 4, 8"]),
        (4, ["sp.size=2", "data.global_batch=1"], ["data.global_batch=1: must be a multiple of", "legal values: 2"]),
    ],
)
def test_splits(world_size: int, overrides: list[str], parts: list[str]) -> None:
    for rank in range(world_size):
        # Found before any rank waits for another.
        with pytest.raises(ConfigError) as caught:
            build.init(load_config([*SMALL, *overrides]), Launch(rank, world_size, rank))
        for part in parts:
            assert part in str(caught.value)


def _keep(store: Path) -> None:
    pass


def _truncate(store: Path) -> None:
    os.truncate(store / TOKENS_FILE, 7999)


def _empty(store: Path) -> None:
    for path in store.iterdir():
        path.unlink()


def _foreign(store: Path) -> None:
    _empty(store)
    (store / "data-00000.arrow").write_bytes(b"ARROW1")


def _remove(store: Path) -> None:
    shutil.rmtree(store)


def _half(store: Path) -> None:
    (store / META_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "overrides", "code", "parts"),
    [
        (_remove, [], DATA, ["no such token store", "data.prepare"]),
        (_empty, [], DATA, ["an empty folder, not a token store"]),
        (_foreign, [], DATA, ["not a token store (no meta.json)"]),
        (_half, [], DATA, ["not a token store (no meta.json)"]),
        (_truncate, [], DATA, ["tokens.bin: truncated: 7999 bytes, meta.json says 8000"]),
        (_keep, ["model.vocab_size=100"], CONFIG, ["model.vocab_size=100: ", "259 or more"]),
        (_keep, ["data.seq_len=4000"], CONFIG, ["data.seq_len=4000: longer than the corpus of 4000", "value: 3999"]),
        (_keep, ["data.validation_path=/nope", "train.eval_sequences=1"], DATA, ["/nope: no such token store"]),
    ],
)
def test_token_stores(
    damage: Callable[[Path], None], overrides: list[str], code: int, parts: list[str], store: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(store, tmp_path / "store")
    damage(copy)
    before = snapshot(tmp_path)
    check_line(train_here(f"run_dir={tmp_path / 'run'}", *on(copy), *overrides), code, *parts)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed=1", "seed=1: the run in RUN has 0"),
        ("model=gla_340m", "model.name=gla_340m: the run in RUN has gla_tiny"),
        ("model.num_layers=2", "model.num_layers=2: the run in RUN has 1"),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings=True: the run in RUN has False"),
        ("data.seq_len=128", "data.seq_len=128: the run in RUN has 64"),
        ("data.global_batch=8", "data.global_batch=8: the run in RUN has 4"),
        ("data.reset_state_at_document=true", "data.reset_state_at_document=True: the run in RUN has False"),
        ("train.dtype=fp64", "train.dtype=fp64: the run in RUN has fp32"),
        ("data.path=OTHER_TOKENS", "data: these are not the tokens that the run in RUN began with"),
        ("data.path=OTHER_TOKENIZER", "data.tokenizer={'kind': 'huggingface'}: the run in RUN has {'kind': 'bytes'}"),
    ],
)
def test_a_changed_run_is_refused(override: str, part: str, run: Path, store: Path, tmp_path: Path) -> None:
    if "OTHER_TOKENS" in override:
        override = override.replace("OTHER_TOKENS", str(write_store(tmp_path / "other", seed=1)))
    elif "OTHER_TOKENIZER" in override:
        override = override.replace("OTHER_TOKENIZER", str(write_store(tmp_path / "other", kind="huggingface")))
    before = snapshot(run)
    outcome = train_here(*on(store), f"run_dir={run}", "train.steps=4", override)
    check_line(outcome, CHECKPOINT, part.replace("RUN", str(run)), f"checkpoint.load={run}")
    assert snapshot(run) == before


def test_what_a_run_may_change(run: Path, store: Path) -> None:
    changes = ["train.steps=3", "parallel.strategy=ddp", "sp=lasp2", "data.micro_batch=2", "checkpoint.every=1"]
    outcome = train_here(*on(store), f"run_dir={run}", *changes)
    assert outcome.code == 0, outcome.err
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_finished_run_says_so(run: Path, store: Path) -> None:
    again = [*on(store), f"run_dir={run}", "train.steps=2"]
    # The first start sees a folder that has moved, which is a change of run_dir in config.yaml.
    train_here(*again)
    before = snapshot(run)
    outcome = train_here(*again)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"the run in {run} has finished its 2 steps; nothing to do\n"
    after = snapshot(run)
    assert before.keys() == after.keys()
    assert [path for path in before if before[path] != after[path]] == ["logs/rank_0.log", "overrides.txt"]


def test_run_folders_that_cannot_be_used(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    cases = {
        f"{tmp_path / 'file'}": "cannot be written (File exists)",
        f"{tmp_path / 'file' / 'run'}": "cannot be written (Not a directory)",
        "/proc/run": "cannot be written (No such file or directory)",
        f"{tmp_path / ('x' * 300)}": "cannot be written (File name too long)",
        f"{tmp_path / 'folder'}": "is not empty and not a run's folder; name a new one",
    }
    before = snapshot(tmp_path)
    for folder, part in cases.items():
        check_line(train_here(*on(store), f"run_dir={folder}"), CONFIG, f"run_dir={folder}: {part}")
    assert snapshot(tmp_path) == before


def test_a_run_that_goes_on_elsewhere(run: Path, store: Path) -> None:
    before = snapshot(run)
    with (run / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = train_here(*on(store), f"run_dir={run}", "train.steps=4")
    check_line(outcome, CONFIG, f"run_dir={run}: another process is training there")
    assert snapshot(run) == before


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_damaged_identity(text: str, run: Path, store: Path) -> None:
    (run / "identity.json").write_bytes(text.encode("latin-1"))
    before = snapshot(run)
    outcome = train_here(*on(store), f"run_dir={run}")
    check_line(outcome, CHECKPOINT, f"{run / 'identity.json'}: cannot be read")
    assert snapshot(run) == before


def test_weights_to_load(run: Path, store: Path, tmp_path: Path) -> None:
    """`checkpoint.load` of nothing, of another model, and (the right way) of a run's folder."""
    (tmp_path / "empty").mkdir()
    before = snapshot(run)
    for number, path in enumerate([tmp_path / "nothing", tmp_path / "empty", run / "config.yaml"]):
        outcome = train_here(*on(store), f"run_dir={tmp_path / f'new{number}'}", f"checkpoint.load={path}")
        check_line(outcome, CONFIG, f"checkpoint.load={path}: holds no complete checkpoint")
    load = [f"checkpoint.load={run}", "train.steps=1"]
    other = train_here(*on(store), *load, f"run_dir={tmp_path / 'other'}", "model.hidden_size=64")
    check_line(other, CHECKPOINT, str(run / "checkpoints" / "step_00000002"), "loading failed")
    right = train_here(*on(store), *load, f"run_dir={tmp_path / 'right'}", "seed=5")
    assert right.code == 0, right.err
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["__0_0.distcp", "run.json", ".metadata"])
def test_a_damaged_checkpoint(name: str, run: Path, store: Path) -> None:
    path = run / "checkpoints" / "step_00000002" / name
    os.truncate(path, path.stat().st_size // 2)
    before = snapshot(run / "checkpoints")
    outcome = train_here(*on(store), f"run_dir={run}", "train.steps=4")
    check_line(outcome, CHECKPOINT, str(path.parent))
    assert snapshot(run / "checkpoints") == before


def test_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--help"], ["-h", "sp=lasp2", "data=tokens"]):
        outcome = train_here(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert "usage: torchrun" in outcome.out
        assert "sp=dp|lasp1|lasp2|zeco" in outcome.out
        assert "seq_len: 64" in outcome.out
    assert "backend: lasp2" in outcome.out
    assert not any(tmp_path.iterdir())


def test_errors_keep_their_words_between_ranks() -> None:
    errors: list[ZecoError] = [
        ConfigError("field", 1, "allowed"),
        DataError("subject", "problem", "remedy"),
        CheckpointError("checkpoint"),
        NonFiniteError("loss"),
        CommunicationError(1, "operation", "problem", peer=2),
        OutOfMemoryError(1, "step 3", "20 MiB"),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_without_torchrun(store: Path, tmp_path: Path) -> None:
    """`python train.py` is one rank, from any folder; and its mistakes end the process with their code."""
    command = [sys.executable, str(REPOSITORY / "train.py"), *SMALL, *on(store)]
    with (
        Command([*command, "train.steps=1", "name=alone"], tmp_path) as right,
        Command([*command, "train.stepz=1", "name=wrong"], tmp_path) as wrong,
    ):
        check_line(wrong.wait(60), CONFIG, "did you mean train.steps?")
        outcome = right.wait(60)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert len((tmp_path / "runs" / "alone" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "runs" / "wrong").exists()


def test_several_ranks_give_one_line(store: Path, tmp_path: Path) -> None:
    """All ranks see the mistake, alone or by agreement once they have joined; one speaks, and nobody waits.

    A minute is far below the 300 s of `parallel.timeout_seconds`, which a rank left alone would take.
    """
    with (
        torchrun(2, tmp_path, "run_dir=early", *on(store), "sp.size=3") as early,
        torchrun(4, tmp_path, "run_dir=joined", *on(tmp_path / "missing"), "sp=dp") as joined,
        torchrun(2, tmp_path, "run_dir=built", *on(store), "checkpoint.load=missing") as built,
    ):
        outcomes = {
            "sp.size=3: must divide the world size 2": early.wait(60),
            f"{tmp_path / 'missing'}: no such token store": joined.wait(60),
            "checkpoint.load=missing: holds no complete checkpoint": built.wait(60),
        }
    for part, outcome in outcomes.items():
        assert outcome.code != 0
        assert len(outcome.errors) == 1, outcome.err
        assert part in outcome.errors[0]
        # torchrun's own failure block has a traceback too, but not through our files.
        assert 'train.py", line' not in outcome.err
        assert "zeco_train/" not in outcome.err
    assert not (tmp_path / "early").exists()
    assert not (tmp_path / "joined").exists()
