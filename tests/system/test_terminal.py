"""Output encodings that cannot represent everything that commands print."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tests.support.commands import REPOSITORY
from zeco_train.plan.config import describe
from zeco_train.system.signals import run_command


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_limited_encodings_do_not_end_command(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", stdout := io.TextIOWrapper(shown, encoding))
    monkeypatch.setattr(sys, "argv", ["plan", "--help"])
    with pytest.raises(SystemExit) as end:
        run_command("zeco_train.plan.__main__")
    stdout.flush()
    assert not end.value.code
    assert shown.getvalue() == f"{describe()}\n".encode(encoding, "replace")


def test_every_command_enables_encoding_fallback() -> None:
    """All commands that README and docs/ name, except on upgrading.md, which lists commands that are gone."""
    pages = [REPOSITORY / "README.md", *set((REPOSITORY / "docs").glob("*.md")) - {REPOSITORY / "docs/upgrading.md"}]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    paths = {REPOSITORY / name for name in re.findall(r"(?:python|torchrun)[^|\n]* ((?:launch/)?\w+\.py)\b", text)}
    for name in re.findall(r" -m ((?:zeco_train|data)\.[\w.]+\w)", text):
        path = REPOSITORY / name.replace(".", "/")
        paths.add(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))
    assert len(paths) > 10
    for path in paths:
        source = path.read_text(encoding="utf-8")
        assert re.search(r"^ *(show_any_text\(\)|run_command\()", source, re.M), path
