"""Figures are drawn whatever matplotlib backend MPLBACKEND names, and whatever their texts hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeco_train.system.figures import label_axes, new_figure, plain, save_figure


def test_texts_of_figures_reach_no_terminal(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """matplotlib warns of a character without a glyph by printing it."""
    figure = new_figure("\x1b]0;title\x07", (3, 2), dpi=50, title_size=8)
    axes = figure.subplots()
    axes.plot([1, 2], [1, 2], label="\x9b2J")
    label_axes(axes, "of \udcff", "\x1b[2J", "y")
    axes.set_yticks([1, 2], [plain("\x1bc"), "two"])
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert not [str(warning.message) for warning in recwarn.list]
