"""Where an evaluation's results go: a new folder with results.json and the tasks' pictures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from zeco_train.checkpoint_files import PROGRESS_FILE, write_durably
from zeco_train.errors import ConfigError, DataError
from zeco_train.evaluate.registry import TaskResult
from zeco_train.jsonable import jsonable
from zeco_train.plot import save_figure
from zeco_train.trained import Trained

RESULTS_FILE = "results.json"


class ResultsFolder:
    """A new folder; what an earlier evaluation has left is never touched.

    Args:
        out: the folder; None for `evaluation/step_…` beside the model (or `….1`, `….2`, … where that exists).
        trained: the model.
        facts: of the evaluation as a whole, for results.json.

    Attributes:
        path: the folder.

    Raises:
        ConfigError: it cannot be made, or exists and is not empty.
    """

    def __init__(self, out: Path | None, trained: Trained, facts: Mapping[str, Any]) -> None:
        self._results: dict[str, Any] = {**facts, "tasks": {}}
        try:
            self.path = _make(out) if out is not None else _make_beside(trained)
        except OSError as error:
            path = out if out is not None else trained.path
            remedy = f"cannot be written ({error.strerror or error}); name a folder with --out"
            raise ConfigError("--out", path, remedy) from error

    def add(self, name: str, result: TaskResult) -> None:
        """Write a task's results, beside those of the tasks before it.

        Raises:
            DataError: they cannot be written.
        """
        self._results["tasks"][name] = {"metrics": dict(result.metrics), **result.details}
        for file, figure in result.figures.items():
            save_figure(figure, self.path / file)
        path = self.path / RESULTS_FILE
        try:
            write_durably(path, json.dumps(jsonable(self._results), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise DataError(path, f"cannot be written ({error.strerror})") from error

    def close(self) -> None:
        """Leave no empty folder behind."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def _make(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ConfigError("--out", out, "is not empty; name a new folder")
    return out


def _make_beside(trained: Trained) -> Path:
    is_checkpoint = (trained.path / PROGRESS_FILE).is_file()
    beside = trained.path.parent.parent if is_checkpoint else trained.path
    name = trained.path.name if is_checkpoint else "results"
    for number in count():
        folder = beside / "evaluation" / (f"{name}.{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError
