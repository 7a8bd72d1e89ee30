"""Untrusted checkpoints run no code and must be consistent; a run whose own checkpoints are unreachable stops.

Checksums are recomputed after each change, as an attacker would: they do not protect against one.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tests.support.commands import Outcome, check_line, run_here, snapshot, train_here
from zeco_train import export
from zeco_train.checkpoint.files import CHECKSUMS_FILE, RECORD_FILE, complete_checkpoints
from zeco_train.checkpoint.metadata import read_metadata
from zeco_train.checkpoint.writer import CheckpointWriter
from zeco_train.errors import CheckpointError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.generate import __main__ as generate
from zeco_train.hf.trained import find_trained

CHECKPOINT = CheckpointError.exit_code
DATA = ["seed=3"]
EMBEDDING = "model.model.embeddings.weight"

Command = Callable[[Path, Path], Outcome]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    outcome = train_here(*DATA, f"run_dir={folder}", "train.steps=4", "checkpoint.every=2")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run with only its last checkpoint."""
    folder = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    return folder


def _resume(run: Path, out: Path) -> Outcome:
    return train_here(*DATA, f"run_dir={run}", "train.steps=5")


def _load(run: Path, out: Path) -> Outcome:
    return train_here(*DATA, f"run_dir={out}", f"checkpoint.load={run}", "train.steps=1")


def _evaluate(run: Path, out: Path) -> Outcome:
    return run_here(evaluate.main, str(run), "--out", str(out), "validation.sequences=1", "data.seq_len=64")


def _generate(run: Path, out: Path) -> Outcome:
    return run_here(generate.main, str(run), "--prompt", "a", "--max-tokens", "1")


def _export(run: Path, out: Path) -> Outcome:
    return run_here(export.main, str(run), str(out))


COMMANDS: list[Command] = [_resume, _load, _evaluate, _generate, _export]


class Boom:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "step_00000004"


def metadata_of(checkpoint: Path) -> Metadata:
    """Unpickled, as torch does; safe here, since the tests wrote it."""
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    return metadata


def rewrite(checkpoint: Path, metadata: Metadata | bytes | None = None) -> None:
    """Write `.metadata` if given, and new checksums of all files."""
    if metadata is not None:
        content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
        (checkpoint / ".metadata").write_bytes(content)
    path = checkpoint / CHECKSUMS_FILE
    table = {}
    for name in json.loads(path.read_text()):
        data = (checkpoint / name).read_bytes()
        table[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(table))


def _in_metadata(checkpoint: Path, trap: Path) -> None:
    metadata = metadata_of(checkpoint)
    metadata.planner_data["trap"] = Boom(trap)
    rewrite(checkpoint, metadata)


def _in_an_entry(checkpoint: Path, trap: Path, name: str = EMBEDDING) -> None:
    """Store an entry as a pickled object that is not a tensor."""
    metadata, file = metadata_of(checkpoint), checkpoint / "__0_0.distcp"
    stored = io.BytesIO()
    torch.save(Boom(trap), stored)
    start = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(stored.getvalue())
    place = _StorageInfo(file.name, start, len(stored.getvalue()))
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(name)] = place
    rewrite(checkpoint, metadata)


@pytest.mark.parametrize(("attack", "command"), [(_in_metadata, _export), (_in_an_entry, _generate)])
def test_commands_refuse_pickled_code_in_checkpoint(
    attack: Callable[[Path, Path], None], command: Command, run: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    attack(checkpoint_of(run), trap)
    (run / "checkpoints" / "lock").write_text(str(run))
    before = snapshot(run / "checkpoints")
    check_line(command(run, tmp_path / "out"), CHECKPOINT, str(checkpoint_of(run)))
    assert not trap.exists()
    assert snapshot(run / "checkpoints") == before


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_layers", 10**9, "weights are no model of model.num_layers=1000000000"),
        ("hidden_size", 1 << 62, f"is [259, 32], the run's configuration makes it [259, {1 << 62}]"),
        ("intermediate_size", 1 << 62, "the run's configuration has impossible sizes: Storage size calculation over"),
        ("intermediate_size", 1 << 40, f"the run's configuration makes it [{1 << 40}, 32]"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_a_model_is_built(
    key: str, value: int, problem: str, run: Path
) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["model"][key] = value
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        find_trained(str(run))


def test_resume_refuses_pickled_code_in_optimizer_settings(run: Path, tmp_path: Path) -> None:
    """Only a resume reads them."""
    name = next(n for n in metadata_of(checkpoint_of(run)).state_dict_metadata if n.endswith("weight.lr"))
    _in_an_entry(checkpoint_of(run), tmp_path / "trap", name)
    check_line(_resume(run, tmp_path), CHECKPOINT, f"{name} is no plain value; nothing of it was run")
    assert not (tmp_path / "trap").exists()


def _field(path: str, value: object) -> Callable[[Metadata], None]:
    """Set a field of the first tensor's metadata or storage entry."""

    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[EMBEDDING]
        place: Any = metadata.storage_data[MetadataIndex(EMBEDDING, entry.chunks[0].offsets)]
        roots = {"entry": entry, "chunk": entry.chunks[0], "place": place, "metadata": metadata}
        root, _, name = path.partition(".")
        setattr(roots[root], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_field("place.relative_path", "/dev/zero"), "lies in '/dev/zero', which is no file"),
        (_field("place.length", True), "True is no number"),
        (_field("entry.properties", None), "no dtype"),
    ],
)
def test_inconsistent_metadata_is_refused(change: Callable[[Metadata], None], problem: str, run: Path) -> None:
    metadata = metadata_of(checkpoint_of(run))
    change(metadata)
    rewrite(checkpoint_of(run), metadata)
    check_line(_export(run, run / "out"), CHECKPOINT, ".metadata" if "has" not in problem else "", problem)


@pytest.mark.few(quick=5)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "EOFError"),
        (b"\x80\x04]\x94.", "the file: is no Metadata"),
        (b"cos\nsystem\n(S'true'\ntR.", "names os.system, which no checkpoint has; nothing of it was run"),
        (b"cbuiltins\neval\n.", "names builtins.eval"),
        (b"ctorch\nload\n.", "names torch.load"),
        (b"ctorch\nSize\n(I1\nI2\ntR.", "TypeError"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00.", ""),
        (b"P1\n.", "refers to something outside"),
        (b"(" * 100_000 + b".", ""),
    ],
)
def test_malformed_metadata_file_is_refused(content: bytes, problem: str, run: Path) -> None:
    rewrite(checkpoint_of(run), content)
    check_line(_export(run, run / "out"), CHECKPOINT, ".metadata", problem)


def test_read_metadata_equals_unpickled_metadata(finished: Path) -> None:
    ours, theirs = read_metadata(checkpoint_of(finished)), metadata_of(checkpoint_of(finished))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.version == theirs.version
    assert any(isinstance(entry, BytesStorageMetadata) for entry in ours.state_dict_metadata.values())


def _edit(file: str, **values: object) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        record = json.loads((checkpoint / file).read_text()) | values
        (checkpoint / file).write_text(json.dumps({k: v for k, v in record.items() if v != "REMOVED"}))
        if file != CHECKSUMS_FILE:
            rewrite(checkpoint)

    return edit


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_edit(CHECKSUMS_FILE, **{".metadata": "REMOVED"}), "checksums.json has no entry for .metadata"),
        (_edit(CHECKSUMS_FILE, x={"bytes": 1e3, "sha256": "0" * 64}), "no size and SHA-256 of x"),
        (_edit("run.json", tokens=-5), "tokens=-5 is no whole number"),
    ],
)
def test_inconsistent_checkpoint_files_are_refused(change: Callable[[Path], None], problem: str, run: Path) -> None:
    change(checkpoint_of(run))
    check_line(_resume(run, run), CHECKPOINT, str(checkpoint_of(run)), problem)


@pytest.mark.slow
def test_new_checkpoint_is_kept_beside_a_higher_step(run: Path) -> None:
    """A checkpoint with a higher step appears during the run."""
    drop = CheckpointWriter._drop_old

    def appear(writer: CheckpointWriter) -> None:
        shutil.copytree(
            run / "checkpoints" / "step_00000004", run / "checkpoints" / "step_00000500", dirs_exist_ok=True
        )
        drop(writer)

    with mock.patch.object(CheckpointWriter, "_drop_old", appear):
        outcome = train_here(*DATA, f"run_dir={run}", "train.steps=5", "checkpoint.keep=1")
    assert outcome.code == 0, outcome.err
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000005", "step_00000500"]


@pytest.mark.slow
def test_checkpoints_link_to_unmounted_disk_is_reported(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert _resume(run, tmp_path).code == 0
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    rows = (run / "metrics.jsonl").read_text()
    for command in COMMANDS:
        check_line(command(run, tmp_path / "out"), CHECKPOINT, "checkpoints: is a link to", "which is not there")
    assert (run / "metrics.jsonl").read_text() == rows


def test_newest_checkpoint_linked_to_unmounted_disk_is_reported(finished: Path, tmp_path: Path) -> None:
    """Resume does not fall back to the older checkpoint."""
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    shutil.rmtree(checkpoint_of(run))
    checkpoint_of(run).symlink_to(tmp_path / "disk")
    check_line(_resume(run, tmp_path), CHECKPOINT, f"{checkpoint_of(run)}: is a link to {tmp_path / 'disk'}")


def test_unlistable_checkpoints_folder_is_reported(run: Path) -> None:
    real, before, number = os.scandir, snapshot(run / "checkpoints"), errno.ESTALE

    def refuse(path: Any = ".") -> Any:
        if Path(os.fsdecode(path)).name == "checkpoints":
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    with mock.patch("os.scandir", refuse):
        outcome = _resume(run, run)
    check_line(outcome, CHECKPOINT, f"checkpoints: cannot be listed: {os.strerror(number)}")
    assert snapshot(run / "checkpoints") == before


@pytest.mark.slow
def test_metrics_without_checkpoint_need_start_anew(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    rows = (run / "metrics.jsonl").read_text()
    check_line(
        _resume(run, tmp_path), CHECKPOINT, "holds no checkpoint, but that of step 4 was saved", "checkpoint.missing="
    )
    # Runs of earlier versions have no record file.
    (run / RECORD_FILE).unlink()
    check_line(_resume(run, tmp_path), CHECKPOINT, "metrics.jsonl has rows of earlier steps")
    assert (run / "metrics.jsonl").read_text() == rows
    outcome = train_here(*DATA, f"run_dir={run}", "train.steps=1", "checkpoint.missing=start_anew")
    assert outcome.code == 0, outcome.err
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000001"]
    assert (run / "metrics.jsonl").read_text().startswith(rows)


@pytest.mark.slow
def test_resume_warns_about_deleted_newer_checkpoint(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    shutil.rmtree(checkpoint_of(run))
    outcome = _resume(run, tmp_path)
    assert outcome.code == 0, outcome.err
    assert "step_00000004 is not there any more; the run goes on from step_00000002" in outcome.err


@pytest.mark.slow
def test_all_commands_accept_intact_checkpoint(run: Path, tmp_path: Path) -> None:
    """Control: otherwise the refusals above could have any cause."""
    for command in COMMANDS:
        outcome = command(run, tmp_path / command.__name__)
        assert outcome.code == 0, (command, outcome.err)
