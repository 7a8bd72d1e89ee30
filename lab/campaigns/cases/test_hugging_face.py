"""Interrupted preparations of data sets; tests/data/test_resume.py has those of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data import preparation
from data.prepare import prepare_store
from tests.data.test_hugging_face import TEXTS, cache, write_dataset
from tests.data.test_resume import options, prepare_with_stops
from tests.support.commands import snapshot
from tests.support.stores import documents

# A fixture.
__all__ = ["cache"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("kind", "streaming", "workers"), [("parquet", True, 1), ("jsonl.gz", True, 2), ("parquet", False, 1)]
)
def test_workers_and_interruptions_do_not_change_the_store(
    kind: str, streaming: bool, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation that is stopped every few parts, and goes on, against one that is not."""
    folder = write_dataset(tmp_path / "corpus", kind)
    spec = preparation.DatasetSpec(str(folder), streaming=streaming)
    changes = {"sources": (), "dataset": spec, "min_tokens": 20, "shard_tokens": 2000, "part_characters": 2500}
    some = replace(options(folder, tmp_path / "unbroken"), unit_bytes=4000, **changes)
    prepare_store(some)
    again = replace(some, out=tmp_path / "store", workers=workers)
    assert prepare_with_stops(again, monkeypatch, 2) > 2
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "unbroken")
    kept = documents(tmp_path / "store") + documents(tmp_path / "store" / "validation")
    assert kept == [text for text in TEXTS if len(text.encode()) >= 20]
