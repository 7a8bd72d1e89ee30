"""Interrupted preparations of data sets, of other kinds than the gate's, with workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_hugging_face import cache, check_interruptions

# A fixture.
__all__ = ["cache"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(("kind", "streaming", "workers"), [("jsonl.gz", True, 2), ("parquet", False, 1)])
def test_workers_and_interruptions_do_not_change_the_store(
    kind: str, streaming: bool, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_interruptions(kind, streaming=streaming, workers=workers, tmp_path=tmp_path, monkeypatch=monkeypatch)
