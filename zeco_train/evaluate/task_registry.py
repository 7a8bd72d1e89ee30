"""Registry of the built-in tasks of `zeco_train.evaluate`; any other name is a task of lm_eval.

A task is a dataclass of its settings with a `run` method: `--tasks validation validation.lengths=[4096]` creates
`HeldOut(lengths=[4096])`. Its module is imported only when the task is requested.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from zeco_train.config.overrides import load_settings
from zeco_train.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zeco_train.evaluate.evaluation import Evaluation


@dataclass(frozen=True)
class TaskResult:
    """Result of a task. Only rank 0's is used."""

    metrics: Mapping[str, float]
    lines: Sequence[str] = ()  # to print under the task's name
    details: Mapping[str, Any] = field(default_factory=dict)  # further results for results.json
    figures: Mapping[str, Figure] = field(default_factory=dict)  # by file name (`needle.png`)


class EvaluationTask(Protocol):
    """A dataclass of settings; its docstring has `Attributes:`, which `--help` shows. One of them is a whole number."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range, the field named without the task's name."""

    def prepare(self, evaluation: Evaluation, name: str) -> None:
        """Run the checks that need the model and the ranks, for all tasks before the first one runs. Collective.

        `name` is the task's, since several may have one class.

        Raises ConfigError or DataError on all ranks.
        """

    def run(self, evaluation: Evaluation) -> TaskResult:
        """Evaluate the model. Collective."""


@dataclass(frozen=True)
class TaskKind:
    """A task in the registry, imported when it is requested."""

    summary: str  # a line for `--help`
    where: str  # MODULE:CLASS

    def load(self) -> type[EvaluationTask]:
        module, _, name = self.where.partition(":")
        return cast("type[EvaluationTask]", getattr(importlib.import_module(module), name))


TASKS: dict[str, TaskKind] = {
    "validation": TaskKind(
        "held-out loss and perplexity, and the loss by position (PNG)", "zeco_train.evaluate.held_out:HeldOut"
    ),
    **{
        name: TaskKind(f"{summary}, by depth and length (PNG)", "zeco_train.evaluate.synthetic:SyntheticTask")
        for name, summary in (
            ("recall", "values by their keys"),
            ("needle", "a number by its name, in text"),
            ("needle_multikey", "one of several numbers by its name"),
            ("needle_multivalue", "all numbers of a name"),
            ("variables", "all boxes that hold the same number"),
            ("counting", "how often something was told"),
        )
    },
}
# Prefix of the settings shared by all lm_eval tasks.
LM_EVAL = "lm_eval"
STANDARD = TaskKind("lm_eval's tasks", "zeco_train.evaluate.standard:StandardTasks")


def build_tasks(names: Sequence[str], standard: Sequence[str], settings: Sequence[str]) -> dict[str, EvaluationTask]:
    """Create the tasks `names`, and one for all of lm_eval's tasks `standard`, with TASK.KEY=VALUE settings, by name.

    Raises ConfigError for an unknown key, or a value of the wrong type or out of range.
    """
    kinds = {name: TASKS[name] for name in names} | ({LM_EVAL: STANDARD} if standard else {})
    tasks = {}
    for name, kind in kinds.items():
        own = [text.removeprefix(f"{name}.") for text in settings if text.startswith(f"{name}.")]
        try:
            tasks[name] = load_settings(kind.load(), own)
        except ConfigError as error:
            raise error if error.field == "argument" else error.within(name) from error
    return tasks
