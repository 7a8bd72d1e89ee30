"""Cases draw their results; rendering takes longer than measuring, so only tests of the files render."""

from __future__ import annotations

import pytest

from zeco_train.bench import figures


@pytest.fixture
def rendered() -> None:
    """For tests of pictures as files."""


@pytest.fixture(autouse=True)
def _unrendered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(figures, "save_figure", lambda figure, path: path)
