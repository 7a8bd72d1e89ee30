"""Figures that are drawn, but not rendered, which takes longer than most tests: a conftest imports the fixtures."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from zeco_train.system import figures

# Two by two pixels.
_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAYAAABytg0kAAAACXBIWXMAAA9hAAAPYQGoP6dpAAAAFElEQVR4nGNkYGD4////fxjJ8B8ATNcI+RMd"
    "3qEAAAAASUVORK5CYII="
)


@pytest.fixture
def rendered() -> None:
    """For tests of pictures as files."""


@pytest.fixture(autouse=True)
def unrendered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(figure: object, target: Path | BinaryIO, kind: str = "png") -> None:
        if isinstance(target, Path):
            target.write_bytes(_PNG)
        else:
            target.write(_PNG)

    if "rendered" not in request.fixturenames:
        for module in (figures, sys.modules.get("zeco_train.report.panels")):
            if module is not None:
                monkeypatch.setattr(module, "render", write)
