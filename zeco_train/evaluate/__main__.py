"""The command `python -m zeco_train.evaluate`: all cheap checks, one task after another, and their results' folder."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.evaluate.__main__")

import contextlib
import difflib
import json
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from models.spec import spec_of
from zeco_train.checkpoint.files import PROGRESS_FILE
from zeco_train.config.help import WIDTH, describe_settings
from zeco_train.config.schema import to_plain
from zeco_train.distributed.config import count_shards, resolve_sp_size
from zeco_train.distributed.mesh import Device, agree
from zeco_train.errors import ConfigError, system_errors
from zeco_train.evaluate.evaluation import Evaluation, check_read, replaced
from zeco_train.evaluate.task_registry import LM_EVAL, STANDARD, TASKS, EvaluationTask, TaskResult, build_tasks
from zeco_train.hf.trained import Trained, find_trained, join_to_use
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.system.command import Parser, user_path
from zeco_train.system.environment import environment
from zeco_train.system.figures import save_figure
from zeco_train.system.files import jsonable, write_durably, write_errors
from zeco_train.system.paths import check_output_folder
from zeco_train.system.terminal import visible

_ADVICE = Advice(
    lost_peer="the results so far stand, the tasks after them are to be run again",
    memory="more train.segments or ranks for a sequence, a smaller data.micro_batch or lm_eval.batch_tokens need less",
    timeout_key="parallel.timeout_seconds",
)


def main(arguments: list[str]) -> int:
    """Evaluate; returns the process's exit code."""
    return run_job(partial(_evaluate, arguments), _ADVICE)


def _evaluate(arguments: list[str], job: Job) -> int:
    if {"-h", "--help"} & set(arguments):
        if job.launch.rank == 0:
            print(describe())
        return 0
    request = parse(arguments)
    check_read(request.overrides)
    tasks = build_tasks(request.tasks, request.standard, request.settings)
    trained = find_trained(request.path)
    for asked in [*request.tasks, *request.standard]:
        if not trained.model.causal and asked != "validation":
            problem = "asks for next tokens, which this model (model.causal=false) reads; only validation is possible"
            raise ConfigError("--tasks", asked, problem)
    # data.global_batch, which is not read here, must be a multiple of the data.micro_batch that is asked for.
    pairs = [text.partition("=") for text in request.overrides]
    fitting = [f"data.global_batch={value}" for key, _, value in pairs if key == "data.micro_batch"]
    config = trained.configure([*request.overrides, *fitting])
    # By default all ranks share a sequence, except for lm_eval's short texts.
    size = 1 if config.sp.size == -1 and not request.tasks else config.sp.size
    sp_size = resolve_sp_size(size, job.launch.world_size, config.sp.backend.value)
    count_shards(config.parallel.strategy, config.parallel.shard_size, job.launch.world_size, sp_size)
    mesh = join_to_use(config, job, sp_size, spec_of(trained.model).calls(config.train.dtype.compute))
    device = Device(mesh.device.type)
    config = replace(config, sp=replace(config.sp, size=sp_size), train=replace(config.train, device=device))
    evaluation = Evaluation(trained, config, mesh, job.enter, request.standard)
    for name, task in tasks.items():
        job.enter(f"preparing {name}")
        task.prepare(evaluation, name)
    # Before the tasks: an unusable --out should not cost their work.
    facts = _facts(evaluation, tasks) if mesh.is_main else {}
    folder = agree(mesh, lambda: ResultsFolder(request.out, trained, facts) if mesh.is_main else None)
    evaluation.note(_banner(evaluation))
    if trained.config is not None and (line := replaced(trained.config, config, request.overrides)) is not None:
        evaluation.note(line)
    _run(evaluation, tasks, folder)
    # Raises the error of a failed scan, and waits for its sends, before the groups are destroyed.
    evaluation.exchange.drain()
    if folder is not None and folder.path is not None:
        print(visible(f"results: {folder.path / RESULTS_FILE}"), flush=True)
    return 0


def _run(evaluation: Evaluation, tasks: Mapping[str, EvaluationTask], folder: ResultsFolder | None) -> None:
    for name, task in tasks.items():
        evaluation.enter(f"task {name}")
        evaluation.note(f"\n{name}")
        started = time.monotonic()
        result = task.run(evaluation)
        for line in result.lines:
            evaluation.note(line)
        agree(evaluation.mesh, lambda: folder.add(name, result) if folder is not None else None)  # noqa: B023
        evaluation.note(f"({time.monotonic() - started:.1f} s)")


def _facts(evaluation: Evaluation, tasks: Mapping[str, EvaluationTask]) -> dict[str, Any]:
    trained = evaluation.trained
    return {
        "model": str(trained.path.resolve()),
        "step": trained.step,
        "ranks": evaluation.mesh.world_size,
        "environment": environment(evaluation.mesh.device),
        "settings": {name: to_plain(task) for name, task in tasks.items()},
        "config": to_plain(evaluation.config),
    }


def _banner(evaluation: Evaluation) -> str:
    mesh, config = evaluation.mesh, evaluation.config
    return (
        f"{evaluation.title} ({evaluation.trained.path}): {config.model.name}, {config.train.dtype.value}, "
        f"sp={config.sp.backend.value}, {mesh.dp_size} × {mesh.sp_size} ranks (dp × sp) on {mesh.device.type}"
    )


@dataclass(frozen=True)
class EvaluationRequest:
    """Parsed command line."""

    path: str  # of the trained model
    tasks: list[str]  # built-in ones
    standard: list[str]  # lm_eval's
    settings: list[str]  # TASK.KEY=VALUE
    overrides: list[str]  # KEY=VALUE, of the run's configuration
    out: Path | None  # None: a folder beside the model


def parse(arguments: Sequence[str]) -> EvaluationRequest:
    """Read a command line. Raises ConfigError if it is malformed, or names a task twice or none."""
    parser = Parser(prog="python -m zeco_train.evaluate", add_help=False)
    parser.add_argument("path", metavar="RUN")
    parser.add_argument("--tasks", default="validation")
    parser.add_argument("--out", type=user_path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    # `parse_args` would refuse KEY=VALUE behind an option.
    parsed = parser.parse_intermixed_args(list(arguments))
    names = [name.strip() for name in parsed.tasks.split(",")]
    for name in names:
        if not re.fullmatch(r"[\w.:+/-]+", name):
            allowed = "must be names with commas between them, as in validation,piqa"
            raise ConfigError("--tasks", ",".join(names), allowed)
        if names.count(name) > 1:
            raise ConfigError("--tasks", ",".join(names), f"names {name} twice")
    own = [name for name in names if name in TASKS]
    standard = [name for name in names if name not in TASKS]
    used = own + ([LM_EVAL] if standard else [])
    settings = [text for text in parsed.settings if _section(text) in (*TASKS, LM_EVAL)]
    for text in settings:
        if _section(text) not in used:
            key, _, value = text.partition("=")
            needed = f"one of lm_eval's tasks in --tasks, as --tasks={','.join([*own, 'piqa'])}"
            needed = needed if _section(text) == LM_EVAL else f"--tasks={','.join([*own, _section(text)])}"
            raise ConfigError(key, value, f"would be ignored; it needs {needed}")
    overrides = [text for text in parsed.settings if text not in settings]
    for text in overrides:
        _check_override(text)
    return EvaluationRequest(parsed.path, own, standard, settings, overrides, parsed.out)


def _section(text: str) -> str:
    return text.partition("=")[0].partition(".")[0]


def _check_override(text: str) -> None:
    # One without "=" is probably the path of a second model.
    if "=" not in text:
        raise ConfigError("argument", text, "is neither KEY=VALUE nor an option; one model at a time is evaluated")
    key, _, value = text.partition("=")
    close = difflib.get_close_matches(key.partition(".")[0], [*TASKS, LM_EVAL], n=1, cutoff=0.8)
    if "." in key and close:
        raise ConfigError(key, value, f"unknown key; did you mean {close[0]}.{key.partition('.')[2]}?")


def describe() -> str:
    """The text of `--help`."""
    tasks = "\n".join(f"  {name:<17} {kind.summary}" for name, kind in TASKS.items())
    kinds = {**TASKS, LM_EVAL: STANDARD}
    alike: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        alike.setdefault(describe_settings(kind.load()), []).append(f"{name}.KEY=VALUE")
    settings = [f"{textwrap.fill(', '.join(names) + ':', WIDTH)}\n{text}" for text, names in alike.items()]
    return (
        "usage: [torchrun --nproc-per-node N -m | python -m] zeco_train.evaluate RUN [--tasks NAME,…] [--out FOLDER]\n"
        "           [KEY=VALUE …]\n\n"
        "RUN is a run's folder, one of its checkpoints (step_…), or an export. Without --tasks: validation.\n"
        "--out is a new folder for results.json and the pictures; without, one beside the model.\n\n"
        f"Tasks; other names are lm_eval's (piqa, hellaswag, winogrande, arc_easy, openbookqa, …):\n{tasks}\n\n"
        "KEY=VALUE is as for train.py, on top of the run's own configuration: data, sp, parallel, data.seq_len,\n"
        "train.segments, train.dtype, train.device, train.kernels (data=… sets all of data but its seq_len);\n"
        "or a task's own:\n\n" + "\n\n".join(settings)
    )


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
