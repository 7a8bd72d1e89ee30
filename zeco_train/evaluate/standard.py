"""The tasks of lm_eval, the harness used in papers for PIQA, HellaSwag, WinoGrande, ARC, OBQA and others."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeco_train.distributed.mesh import agree
from zeco_train.errors import ConfigError
from zeco_train.evaluate.evaluation import Evaluation
from zeco_train.evaluate.task_registry import LM_EVAL, TASKS, TaskResult
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import check_path


@dataclass
class StandardTasks:
    """Settings shared by all tasks of lm_eval.

    Attributes:
        num_fewshot: examples in a prompt; null is each task's default.
        limit: maximum documents per task, for a quick test; null is all.
        include_path: a folder with your own task files (YAML).
        batch_tokens: maximum tokens per rank and forward pass; bounds memory.
        seed: of few-shot examples and sampled texts.
    """

    num_fewshot: int | None = None
    limit: int | None = None
    include_path: str | None = None
    batch_tokens: int = 16384
    seed: int = 1234

    def validate(self) -> None:
        least = {"num_fewshot": 0, "limit": 1, "batch_tokens": 1, "seed": 0}
        check_least(self, **{name: number for name, number in least.items() if getattr(self, name) is not None})
        if self.include_path is not None:
            check_path("include_path", self.include_path)
            if not Path(self.include_path).is_dir():
                raise ConfigError("include_path", self.include_path, "no such folder")

    def prepare(self, evaluation: Evaluation, name: str) -> None:
        agree(evaluation.mesh, lambda: self._check_names(evaluation) if evaluation.mesh.is_main else None)
        agree(evaluation.mesh, lambda: evaluation.trained.tokenizer)

    def run(self, evaluation: Evaluation) -> TaskResult:
        # Imported late: it pulls in transformers and the generation modules.
        from zeco_train.evaluate.service import Service

        service = Service(evaluation, self.batch_tokens)
        found = service.run(lambda: self._harness(evaluation, service))
        return TaskResult({}) if found is None else _result(found, self.limit)

    def _check_names(self, evaluation: Evaluation) -> None:
        names = evaluation.standard
        own = f"tasks of ours: {', '.join(TASKS)}"
        if importlib.util.find_spec("lm_eval") is None:
            problem = f"is one of lm_eval's, which is not installed (pip install 'zeco-train[lm-eval]'); {own}"
            raise ConfigError("--tasks", names[0], problem)
        from zeco_train.evaluate.language_model import Tasks

        # Created once: it reads the headers of thousands of files.
        self._tasks = Tasks(include_path=self.include_path)
        known = self._tasks.all_tasks
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, [*TASKS, *known], n=3)
                hint = f"did you mean {' or '.join(close)}?" if close else own
                raise ConfigError("--tasks", name, f"neither we nor lm_eval have such a task; {hint}")

    def _harness(self, evaluation: Evaluation, service: Any) -> Mapping[str, Any]:
        from lm_eval import simple_evaluate

        from zeco_train.evaluate.language_model import EvaluatedModel

        results = simple_evaluate(
            EvaluatedModel(service, evaluation.trained.tokenizer, self.seed),
            tasks=list(evaluation.standard),
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            task_manager=self._tasks,
            log_samples=False,
            random_seed=self.seed,
            numpy_random_seed=self.seed,
            torch_random_seed=self.seed,
            fewshot_random_seed=self.seed,
        )
        assert results is not None
        return results


def _result(found: Mapping[str, Any], limit: int | None) -> TaskResult:
    metrics: dict[str, float] = {}
    lines = [] if limit is None else [f"the first {limit} documents of each task only, by {LM_EVAL}.limit"]
    for task, values in found["results"].items():
        shown = []
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            is_number = isinstance(value, float | int) and not isinstance(value, bool)
            if not is_number or metric.endswith("_stderr") or not chosen:
                continue
            name = f"{task}/{metric}" if chosen == "none" else f"{task}/{metric},{chosen}"
            metrics[name] = float(value)
            error = values.get(f"{metric}_stderr,{chosen}")
            shown.append(f"{metric} {value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else ""))
        count = found["n-samples"].get(task, {}).get("effective")
        of = f" ({count} documents, {found['n-shot'].get(task, 0)}-shot)" if count else ""
        lines.append(f"  {task:<20} {', '.join(shown)}{of}")
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "configs", "lm_eval_version")
    # Make JSON-serialisable: functions in a task's configuration become their names.
    details = {name: json.loads(json.dumps(found[name], default=str)) for name in kept if name in found}
    return TaskResult(metrics, lines, details)
