"""Data sets with nulls and byte-order marks; tests/data has files with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_hugging_face import cache, prepare
from tests.data.test_prepare import write_marked
from tests.support.stores import documents

# A fixture.
__all__ = ["cache"]
pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(("kind", "streaming"), [("parquet", "--streaming"), ("jsonl.gz", "--no-streaming")])
def test_nulls_and_byte_order_marks_as_in_files(
    kind: str, streaming: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_marked(tmp_path / "corpus", kind)
    assert prepare("--dataset", folder, streaming, "--out", tmp_path / "store", "--workers", "1") == 0
    assert documents(tmp_path / "store") == ["a", "b\ufeffc"]
    assert "left out 1 documents that are null, 1 documents without text\n" in capsys.readouterr().out
