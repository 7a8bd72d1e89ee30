"""Question: which mixers recall many keys of another rank by a state of 2,048 numbers a layer?
Command: python -m lab.recall_family
Date: 2026-11-24, 0a61a9c, 3 seeds, 2 CPU ranks
Answer: at 64 and 512 tokens kda 99.8 and 84.0 %, gated_deltanet 99.8 and 74.5, mamba2 44.0 and 9.4, gla 29.6 and 7.9;
    with zeros for the first rank's states all are at chance. docs/evaluation.md; lab/results/recall_family_2cpu.md.

Keys are on the first rank, questions on the second, a pair for each 8 tokens; a curriculum (`CURRICULUM`), each run
from the weights of the one before. Into FOLDER go the runs, MODEL-SEED/LENGTH, each with its recall.json, and over all
finished ones recall_family.md and recall_family.png. Started again, it keeps what is finished and runs the rest.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab import forked_ranks
from lab.family import keep_record
from lab.recall_report import PICTURE_FILE, TABLE_FILE, Model, Result, draw_recall, recall_table
from launch.sweep import check_folder
from models.spec import spec_of
from zeco_train import cli
from zeco_train.config.schema import Config, load_config
from zeco_train.errors import ConfigError
from zeco_train.evaluate import __main__ as evaluate
from zeco_train.evaluate.__main__ import RESULTS_FILE
from zeco_train.system.command import Parser, docstring, errors_in_a_line, user_path
from zeco_train.system.files import write_durably, write_result
from zeco_train.system.paths import check_outputs
from zeco_train.system.small_files import read_json
from zeco_train.system.terminal import show_any_text

_RANKS = 2
# At each length, asked for every pair.
_EXAMPLES = 200
_RECORD_FILE = "recall_family.json"
# Settings that this script controls.
_OWN_KEYS = "data.seq_len data.synthetic.facts data.synthetic.keys seed name run_dir checkpoint.load"


# Equal states: 2 heads of 32 × 32, or 4 of 16 × 32. GLA has no convolution here, but can bind a value to the key before
# it by fast decays: a trial of 200 steps with 2 pairs ended at a loss of 0.02 with a normalizer of 4, of 0.61 with 16.
MODELS = {
    "gla": ("model=gla_tiny", "model.num_heads=2", "model.expand_k=1.0", "model.gate_logit_normalizer=4"),
    "mamba2": ("model=mamba2_tiny", "model.num_heads=4", "model.head_dim=32", "model.state_size=16"),
    "gated_deltanet": ("model=gated_deltanet_tiny", "model.num_heads=2", "model.head_dim=32"),
    "kda": ("model=kda_tiny", "model.num_heads=2", "model.head_dim=32"),
    "softmax": ("model=gla_tiny", "model.num_heads=2", "model.attn.every=1"),
}
# Width, layers, data and optimizer, the same for all.
SHARED = """
    model.hidden_size=64 model.num_layers=2 model.intermediate_size=128 model.initializer_range=0.07
    data=synthetic data.synthetic.task=recall sp=zeco parallel=ddp train.device=cpu
    optim.lr=3e-3 optim.weight_decay=0 sched=wsd sched.warmup_steps=20
    train.log_every=20 train.eval_every=0 train.eval_sequences=0 checkpoint.every=0
"""


@dataclass(frozen=True)
class Stage:
    """One run of the curriculum.

    Attributes:
        length: tokens of a sequence.
        keys: that occur; None: all 64. With two of them, a model first learns to bind a value to the key before it.
    """

    length: int
    batch: int
    steps: int
    pairs: int
    keys: int | None = None


CURRICULUM = (
    Stage(16, 64, 400, 2, keys=2),
    Stage(32, 64, 400, 8),
    Stage(64, 64, 300, 8),
    Stage(128, 32, 200, 16),
    Stage(256, 16, 120, 32),
    Stage(512, 8, 80, 64),
)
LENGTHS = [stage.length for stage in CURRICULUM[2:]]


@dataclass(frozen=True)
class Case:
    """A model with a seed."""

    model: str
    seed: int
    options: argparse.Namespace

    @property
    def name(self) -> str:
        """Of the case, and of its folder."""
        return f"{self.model}-{self.seed}"

    @property
    def stages(self) -> Sequence[Stage]:
        """Up to the longest length asked for."""
        return [stage for stage in CURRICULUM if stage.length <= max(self.options.lengths)]

    @property
    def finished(self) -> bool:
        """Whether there is a result for each length."""
        return all(self.result_file(length).exists() for length in self.options.lengths)

    def run_dir(self, length: int) -> Path:
        """The folder of a stage's run."""
        return self.options.out / self.name / str(length)

    def result_file(self, length: int) -> Path:
        """Of the evaluation after a stage."""
        return self.run_dir(length) / "recall.json"

    def overrides(self, stage: Stage) -> list[str]:
        """The settings of a stage's train.py."""
        before = max((each.length for each in CURRICULUM if each.length < stage.length), default=None)
        task = [f"data.seq_len={stage.length}", f"data.synthetic.facts={stage.pairs}", f"train.steps={stage.steps}"]
        task += [f"data.global_batch={stage.batch}", f"data.micro_batch={stage.batch}"]
        task += [f"data.synthetic.keys={stage.keys}"] if stage.keys else []
        own = [f"seed={self.seed}", f"name={self.name}", f"run_dir={self.run_dir(stage.length)}"]
        own += [f"checkpoint.load={self.run_dir(before)}"] if before else []
        return [*MODELS[self.model], *SHARED.split(), *task, *self.options.settings, *own]

    def check(self) -> Config:
        """Load and check the configurations of all stages; returns the last.

        Raises:
            ConfigError: an error that a run would report at its start; names the case.
        """
        try:
            return [load_config(self.overrides(stage)) for stage in self.stages][-1]
        except ConfigError as error:
            error.args = (f"{self.name}: {error}",)
            raise

    def run(self, deadline: float) -> str:
        """Train and evaluate what is not finished; returns what went wrong, in a line, or nothing."""
        # The evaluation leaves softmax layers as they are.
        began, has_states = time.monotonic(), self.model != "softmax"
        for stage in self.stages:
            run_dir, file = self.run_dir(stage.length), self.result_file(stage.length)
            output = self.options.out / self.name / "output" / str(stage.length)
            if file.exists():
                continue
            if problem := _on_ranks(cli.main, self.overrides(stage), output, deadline):
                return f"{stage.length} tokens: {problem}"
            if stage.length not in self.options.lengths:
                continue
            # An interrupted evaluation is not resumed, and what it left is not deleted.
            out = next(path for n in itertools.count() if not (path := run_dir / "evaluation" / f"recall.{n}").exists())
            asked = ["recall.depths=0", f"recall.examples={_EXAMPLES}", "train.device=cpu"]
            asked += ["recall.zeroed=true"] if has_states else []
            arguments = [str(run_dir), "--tasks", "recall", "--out", str(out), *asked]
            if problem := _on_ranks(evaluate.main, arguments, output, deadline):
                return f"{stage.length} tokens, evaluation: {problem}"
            recall = read_json(out / RESULTS_FILE)["tasks"]["recall"]
            [[whole]] = recall["whole"]["accuracy"]
            zeroed = recall["zeroed"]["accuracy"][0][0] if has_states else None
            seconds, began = time.monotonic() - began, time.monotonic()
            accuracies = whole, zeroed, recall["chance"]
            result = Result(self.model, self.seed, stage.length, stage.pairs, *accuracies, seconds)
            write_durably(file, json.dumps(asdict(result)))
            control = "" if zeroed is None else f", zeroed {zeroed:.1%}"
            print(f"{self.name}, {stage.length} tokens: {whole:.1%}{control} ({seconds:.0f} s)", flush=True)
        return ""


def _on_ranks(main: Callable[[list[str]], int], arguments: list[str], folder: Path, deadline: float) -> str:
    """Run a command on all ranks; returns what went wrong, in a line, or nothing."""
    ranks = forked_ranks.start(_RANKS, lambda rank: main(arguments), folder)
    codes = ranks.wait(max(deadline - time.monotonic(), 0.0))
    if not any(codes):
        return "" if None not in codes else "stopped: the time of --minutes is over"
    return next((line.removeprefix("error: ") for line in ranks.errors()), f"exit codes {codes}, see {folder}")


class RecallFamily:
    """The cases of all models and seeds.

    Raises:
        ConfigError: an option, or the settings of a run, are wrong.
        DataError: the folder holds runs with other settings.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        options.out = options.out.resolve()
        _check(options)
        self._options = options
        # Seeds first: what is finished when the time is over is a smaller table of all models.
        self.cases = [Case(model, seed, options) for seed, model in itertools.product(options.seeds, options.models)]
        # The first cases are of all models; a seed needs no check of its own.
        specs = {case.model: spec_of(case.check().model) for case in self.cases[: len(options.models)]}
        self._models = [Model(name, specs[name].num_parameters, specs[name].state_shape) for name in options.models]

    def run(self) -> int:
        """Run what is not finished, then write the results; returns the exit code."""
        out, own = self._options.out, {"settings": self._options.settings}
        keep_record("--out", out, _RECORD_FILE, own, "lab/recall_family.py")
        check_outputs("--out", out, (PICTURE_FILE, TABLE_FILE))
        # Ranks share the memory of these objects; a collection in a rank would copy it.
        gc.collect()
        gc.freeze()
        deadline, problems = time.monotonic() + 60 * self._options.minutes, []
        for case in self.cases:
            if case.finished:
                print(f"{case.name}: finished", flush=True)
            elif time.monotonic() >= deadline:
                problems.append(f"{case.name}: not started: the time of --minutes is over")
            elif problem := case.run(deadline):
                problems.append(f"{case.name}: {problem}")
        self._write()
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        return 1 if problems else 0

    def _write(self) -> None:
        """The table and the picture of the finished evaluations, if any."""
        files = (case.result_file(length) for case in self.cases for length in self._options.lengths)
        results = [Result(**read_json(file)) for file in files if file.exists()]
        if not results:
            return
        table = recall_table(self._models, results)
        write_result(self._options.out / TABLE_FILE, table)
        draw_recall(self._models, results, f"{_RANKS} ranks", self._options.out / PICTURE_FILE)
        print(f"{table}results are in {self._options.out}", flush=True)


def _check(options: argparse.Namespace) -> None:
    check_folder("--out", options.out)
    for name, allowed in (("models", list(MODELS)), ("lengths", LENGTHS), ("seeds", range(1 << 31))):
        values = getattr(options, name)
        for value in values:
            if value not in allowed or values.count(value) > 1:
                names = "numbers ≥ 0" if name == "seeds" else f"ones of {', '.join(map(str, allowed))}"
                raise ConfigError(f"--{name}", value, f"must be different {names}")
    if not 0 < options.minutes <= 60 * 24 * 30:
        raise ConfigError("--minutes", options.minutes, "must be > 0 and ≤ 43200")
    for setting in options.settings:
        key, _, value = setting.lstrip("+").partition("=")
        if key in _OWN_KEYS.split():
            raise ConfigError(key, value, "is set by lab/recall_family.py; see --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="python -m lab.recall_family", description=docstring(sys.modules[__name__]), formatter_class=form
    )
    parser.add_argument("--models", nargs="+", default=[*MODELS], metavar="MODEL", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T", help="default: 64 128 256 512")
    parser.add_argument("--minutes", type=float, default=90.0, metavar="M", help="for all runs; default 90")
    parser.add_argument("--out", type=user_path, default=Path("runs/recall_family"), help="default runs/recall_family")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of train.py, for all runs; after --")
    return parser.parse_args(arguments)


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    try:
        return RecallFamily(parse(arguments)).run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
