"""Results folder of an evaluation: results.json and the tasks' plots."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

from zeco_train.checkpoint.files import PROGRESS_FILE
from zeco_train.errors import ConfigError, system_errors
from zeco_train.evaluate.task_registry import TaskResult
from zeco_train.hf.trained import Trained
from zeco_train.system.figures import save_figure
from zeco_train.system.files import jsonable, write_durably, write_errors
from zeco_train.system.paths import check_output_folder

# The number changes with the meaning or the place of a value.
RESULTS_FILE, RESULTS_FORMAT = "results.json", 1


class ResultsFolder:
    """A new folder, created with the first results; earlier evaluations are never overwritten.

    Args:
        out: None for `evaluation/step_…` beside the model (or `….1`, `….2`, … if that exists).
        facts: of the evaluation as a whole, for results.json.

    Attributes:
        path: None before the first results.

    Raises:
        ConfigError: it cannot be created, exists and is not empty, or lies beside the model behind a link.
    """

    def __init__(self, out: Path | None, trained: Trained, facts: Mapping[str, Any]) -> None:
        self._wanted, self._is_named = (out, True) if out is not None else (_beside(trained), False)
        self._results: dict[str, Any] = {"format": RESULTS_FORMAT, **facts, "tasks": {}}
        self.path: Path | None = None
        with self._refused():
            check_output_folder("--out", self._wanted, "name a folder with --out")
            if self._is_named and self._wanted.exists():
                _check_empty(self._wanted)
            if not self._is_named and (beside := self._wanted.parent).is_symlink():
                # Who made the folder of the model would choose where the results go.
                raise ConfigError("RUN", trained.path, f"{beside} is a link; remove it, or name a folder with --out")

    def add(self, name: str, result: TaskResult) -> None:
        """Add a task's results to results.json, and write its plots.

        Raises ConfigError if the folder cannot be created, DataError if a file cannot be written.
        """
        if self.path is None:
            with self._refused():
                self.path = self._make()
        self._results["tasks"][name] = {"metrics": dict(result.metrics), **result.details}
        for file, figure in result.figures.items():
            save_figure(figure, self.path / file)
        path = self.path / RESULTS_FILE
        with write_errors(path):
            write_durably(path, json.dumps(jsonable(self._results), indent=1, allow_nan=False) + "\n")

    def _make(self) -> Path:
        if self._is_named:
            self._wanted.mkdir(parents=True, exist_ok=True)
            _check_empty(self._wanted)
            return self._wanted
        for number in count():
            # Not `exists` first: two evaluations may start at once.
            folder = self._wanted.with_name(f"{self._wanted.name}.{number}") if number else self._wanted
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
        raise AssertionError

    def _refused(self) -> AbstractContextManager[None]:
        way = "name a folder with --out"
        return system_errors(lambda reason: ConfigError("--out", self._wanted, f"cannot be written ({reason}); {way}"))


def _beside(trained: Trained) -> Path:
    is_checkpoint = (trained.path / PROGRESS_FILE).is_file()
    beside = trained.path.parent.parent if is_checkpoint else trained.path
    return beside / "evaluation" / (trained.path.name if is_checkpoint else "results")


def _check_empty(out: Path) -> None:
    if any(out.iterdir()):
        raise ConfigError("--out", out, "is not empty; name a new folder")
