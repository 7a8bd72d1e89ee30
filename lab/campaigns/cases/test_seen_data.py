"""Changed validation data, the embedded corpus, and copies of several nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from data.store import shard_name
from tests.support.commands import check_line, train_here
from tests.support.distributed import run_distributed
from tests.support.training import train
from tests.training.test_seen_data import DATA, VERIFY, Run, first, flip, run, touch, write
from zeco_train.errors import ZecoError
from zeco_train.training.seen_data import RECORD_FILE

# Fixtures.
__all__ = ["first", "run"]
pytestmark = pytest.mark.campaign


def test_changed_validation_tokens_are_refused(run: Run, tmp_path: Path) -> None:
    line = f"{run.store / 'validation' / shard_name(2)}: changed since the run's last start"
    flip(run.store / "validation" / shard_name(2))
    check_line(run.start(), DATA, line)
    # Without validation the store is neither read nor dropped from the record.
    assert run.start("train.eval_sequences=0").code == 0
    check_line(run.start(), DATA, line)
    # Another validation store may be named, and is compared from then on.
    other = write(tmp_path / "other", seed=5)
    assert run.start(f"data.validation_path={other}").code == 0
    flip(other / shard_name(0))
    check_line(run.start(f"data.validation_path={other}"), DATA, f"{other / shard_name(0)}: changed since")


def test_embedded_corpus_is_read_whole(tmp_path: Path) -> None:
    cache, settings = tmp_path / "cache", [f"run_dir={tmp_path / 'run'}", "train.steps=1"]
    settings.append(f"data.cache_dir={cache}")
    assert train_here(*settings).code == 0
    (store,) = cache.glob("embedded-*")
    flip(store / shard_name(0))
    line = f"remove {store}, which the next start prepares again"
    check_line(train_here(*settings, "train.steps=2"), DATA, f"{store / shard_name(0)}: its contents differ", line)
    shutil.rmtree(store)
    assert train_here(*settings, "train.steps=2").code == 0


def _starts(rank: int, world_size: int, folder: str) -> list[str]:
    """Results of starts on four ranks, of which 2 and 3 share another copy: the errors, or ""."""
    own = Path(folder, "copy" if rank >= 2 else "store")
    settings = ["data=tokens", f"data.path={own}", "sp.size=2", "data.seq_len=64", "train.eval_sequences=0"]
    results: list[str] = []
    # Changed by one rank of each copy.
    changes: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: None, []),
        (lambda: touch(own, ahead=rank) if rank == 3 else None, []),
        (lambda: None, [VERIFY]),
        (lambda: flip(own / shard_name(1)) if rank == 3 else None, [VERIFY]),
        (lambda: None, []),
    ]
    for step, (change, more) in enumerate(changes, start=1):
        change()
        dist.barrier()
        try:
            train(rank, world_size, f"{folder}/run", *settings, *more, f"train.steps={step}")
            results.append("")
        except ZecoError as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def test_copies_of_nodes_are_compared_and_verified_each(tmp_path: Path) -> None:
    write(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    touch(tmp_path / "copy")
    for results in run_distributed(_starts, 4, str(tmp_path)):
        changed = f"DataError: {tmp_path / 'store'}: its copy on ranks 2, 3 changed since the run's last start"
        assert (results[0], results[2]) == ("", "")
        assert results[1].startswith(changed)
        assert results[3].startswith(f"DataError: {tmp_path / 'copy' / shard_name(1)}: its contents differ from")
        assert results[4].startswith(changed)


def test_each_store_of_mixture_is_checked(tmp_path: Path) -> None:
    stores = [write(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    settings = ["data=mixture", f"data.stores=[{{path: {stores[0]}}}, {{path: {stores[1]}}}]"]
    settings += [f"run_dir={tmp_path / 'run'}"]
    assert train_here(*settings, "train.steps=1").code == 0
    flip(stores[1] / shard_name(2))
    check_line(train_here(*settings, "train.steps=2"), DATA, f"{stores[1] / shard_name(2)}: changed since")


def test_synthetic_task_writes_no_record(tmp_path: Path) -> None:
    settings = ["data=synthetic", "data.synthetic.facts=2", "data.seq_len=64", f"run_dir={tmp_path / 'run'}"]
    assert train_here(*settings, "train.steps=1").code == 0
    assert not (tmp_path / "run" / RECORD_FILE).exists()
