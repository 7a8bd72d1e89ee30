"""Question: has each mixer over ranks (`sp=zeco`) the losses of one rank (`sp=dp`)?
Command: python -m lab.family --steps 20; hybrids: --mixers gla --every 0 8 4 2 -- model.num_layers=8
Date: 2026-11-23, 90bc6ad and 8ae349f, tiny models in fp64, 2 CPU ranks
Answer: yes, 20 steps differ by at most 7.0e-14, hybrids by 1.4e-12. lab/results/family_*.

Into FOLDER go the runs, MODEL-dp and MODEL-zeco, and family.png, family.md, family.csv. Started again, it skips
finished runs, and interrupted ones resume. Rounding grows with the steps; `--limit` bounds the largest relative
difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import check_split
from lab.family_report import (
    CSV_FILE,
    PICTURE_FILE,
    TABLE_FILE,
    Pair,
    Verdict,
    draw_family,
    family_csv,
    family_table,
)
from launch.sweep import check_folder
from models.mixer_registry import MIXERS
from models.spec import spec_of
from zeco_train.compare import Run
from zeco_train.config.schema import Config, load_config
from zeco_train.errors import ConfigError, DataError, system_errors
from zeco_train.system.command import Parser, docstring, errors_in_a_line, user_path
from zeco_train.system.files import METRICS_FILE, write_durably, write_result
from zeco_train.system.paths import check_outputs
from zeco_train.system.small_files import read_json
from zeco_train.system.terminal import show_any_text
from zeco_train.tracking.metrics import read_metrics
from zeco_train.training.config import Dtype

ROOT = Path(__file__).resolve().parent.parent
# In fp64 rounding stays this small for hundreds of steps. In the others it grows with each step: 50 steps gave 1.2 % in
# fp32 and 9 % in bf16 (docs/benchmarks.md), so their limits find coarse errors only.
LIMITS = {Dtype.fp64: 1e-9, Dtype.fp32: 0.05, Dtype.bf16: 0.2}
# Settings that this script controls.
_OWN_KEYS = (
    "sp",
    "sp.size",
    "model",
    "model.mixer",
    "model.attn.every",
    "train.dtype",
    "train.steps",
    "train.log_every",
    "name",
    "run_dir",
)
_RECORD_FILE = "family.json"
# For a run that is asked to end to save its checkpoint.
_SECONDS_TO_SAVE = 60.0


def keep_record(option: str, folder: Path, file: str, own: Mapping[str, Any], script: str) -> None:
    """Store the settings of a folder's runs at the first start, and check at later ones that they are these.

    Args:
        option: that names the folder.
        folder: of the runs; is made.
        file: name of the record in it.
        own: settings by option, without the dashes, or `settings`.
        script: that keeps the record.

    Raises:
        ConfigError: the folder cannot be made, or its runs have other settings.
        DataError: the record is not readable.
    """
    path = folder / file
    with system_errors(lambda reason: ConfigError(option, folder, f"cannot be made ({reason})")):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_durably(path, json.dumps(own, indent=2))
            return
    try:
        stored = dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(path, f"is not what {script} has left", f"name another {option}") from error
    if name := next((name for name in own if stored.get(name) != own[name]), None):
        allowed = f"the runs in {folder} have {stored.get(name)}; name another {option}"
        raise ConfigError(f"--{name}" if name != "settings" else name, own[name], allowed)


@dataclass(frozen=True)
class Case:
    """One run: `backend` is dp, on one rank, or zeco; softmax layers are one in `every`, none if that is 0."""

    mixer: str
    every: int
    backend: str
    ranks: int
    options: argparse.Namespace

    @property
    def model(self) -> str:
        """Mixer and pattern."""
        return f"{self.mixer}_hybrid_{self.every}" if self.every else self.mixer

    @property
    def name(self) -> str:
        """Of the run, and of its folder."""
        return f"{self.model}-{self.backend}"

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.options.folder / self.name

    @property
    def overrides(self) -> list[str]:
        """The settings of train.py."""
        options = self.options
        own = ["+experiment=quickstart", f"model={self.mixer}_{options.size}", f"train.dtype={options.dtype}"]
        own += [f"model.attn.every={self.every}"] if self.every else []
        own += ["sched=constant", f"train.steps={options.steps}", "train.log_every=1", *options.settings]
        return [*own, f"sp={self.backend}", f"name={self.name}", f"run_dir={self.run_dir}"]

    def check(self) -> Config:
        """Load and check the run's configuration.

        Raises:
            ConfigError: an error that the run would report at its start; names the run.
        """
        try:
            config = load_config(self.overrides)
            check_split(config.data, self.ranks, 1, config.train.segments)
        except ConfigError as error:
            error.args = (f"{self.name}: {error}",)
            raise
        return config

    @property
    def steps_done(self) -> int:
        """The last step in the run's metrics."""
        logged = read_metrics(self.run_dir / METRICS_FILE)
        return logged[-1]["step"] if logged else 0

    def train(self, seconds: float) -> str:
        """Run train.py for at most this time; returns what went wrong, in a line, or nothing."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with subprocess.Popen([*launcher, str(ROOT / "train.py"), *self.overrides], env=environment) as process:
            try:
                code = process.wait(max(seconds, 0.0))
            except subprocess.TimeoutExpired:
                # A run that is asked to end saves, and resumes from there.
                process.terminate()
                try:
                    process.wait(_SECONDS_TO_SAVE)
                except subprocess.TimeoutExpired:
                    process.kill()
                return f"stopped: --minutes={self.options.minutes:g} are over"
            except KeyboardInterrupt:
                # The run has received the signal, too, and saves.
                process.wait()
                raise
        if code != 0:
            return f"failed with exit code {code}"
        if (done := self.steps_done) < self.options.steps:
            return f"ended at step {done} of {self.options.steps}"
        return ""


class Family:
    """The runs of all models.

    Raises:
        ConfigError: an option, or the settings of a run, are wrong.
        DataError: the folder holds runs with other settings.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        options.folder = options.folder.resolve()
        _check(options)
        self._options, self._folder = options, options.folder
        self.limit = LIMITS[Dtype[options.dtype]] if options.limit is None else options.limit
        ranks = {"dp": 1, "zeco": options.ranks}
        models = itertools.product(options.mixers, options.every)
        pairs = [[Case(*model, sp, ranks[sp], options) for sp in ranks] for model in models]
        self.cases = {cases[0].model: cases for cases in pairs}
        configs = {model: [case.check() for case in cases] for model, cases in self.cases.items()}
        self._parameters = {model: spec_of(alone.model).num_parameters for model, (alone, _) in configs.items()}

    def run(self) -> int:
        """Train what is not finished, then compare; returns the exit code."""
        options = self._options
        own = {name: getattr(options, name) for name in ("size", "ranks", "dtype", "steps", "settings")}
        keep_record("--folder", self._folder, _RECORD_FILE, own, "lab/family.py")
        check_outputs("--folder", self._folder, (PICTURE_FILE, TABLE_FILE, CSV_FILE))
        deadline, problems = time.monotonic() + 60 * options.minutes, []
        for case in (case for cases in self.cases.values() for case in cases):
            if (done := case.steps_done) >= options.steps:
                print(f"== {case.name}: finished", flush=True)
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                problems.append(f"{case.name}: not started: --minutes={options.minutes:g} are over")
                continue
            print(f"== {case.name}: {f'from step {done}' if done else 'from the start'}", flush=True)
            if problem := case.train(left):
                problems.append(f"{case.name}: {problem}")
        failed = self._compare()
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        return 1 if problems or failed else 0

    def _compare(self) -> bool:
        """Write the results of the models whose runs are finished; returns whether one is beyond the limit."""
        pairs = []
        for model, cases in self.cases.items():
            if all(case.steps_done >= self._options.steps for case in cases):
                pairs.append(Pair(model, self._parameters[model], *(Run.read(each.run_dir, model) for each in cases)))
        if not pairs:
            return False
        verdicts = [Verdict.of(pair, self.limit) for pair in pairs]
        table = family_table(verdicts)
        write_result(self._folder / TABLE_FILE, table)
        write_result(self._folder / CSV_FILE, family_csv(verdicts))
        draw_family(pairs, self.limit, f"sp=zeco on {self._options.ranks} ranks", self._folder / PICTURE_FILE)
        print(f"{table}results are in {self._folder}", flush=True)
        return not all(verdict.same for verdict in verdicts)


def _check(options: argparse.Namespace) -> None:
    check_folder("--folder", options.folder)
    for mixer in options.mixers:
        if mixer not in MIXERS or options.mixers.count(mixer) > 1:
            raise ConfigError("--mixers", mixer, f"must be different ones of {', '.join(MIXERS)}")
    for every in options.every:
        if every < 0 or options.every.count(every) > 1:
            raise ConfigError("--every", every, "must be different numbers ≥ 0")
    for name, least in (("ranks", 2), ("steps", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name}", getattr(options, name), f"must be ≥ {least}")
    if not 0 < options.minutes <= 60 * 24 * 30:
        raise ConfigError("--minutes", options.minutes, "must be > 0 and ≤ 43200")
    if options.limit is not None and not options.limit >= 0:
        raise ConfigError("--limit", options.limit, "must be ≥ 0")
    for setting in options.settings:
        key, _, value = setting.lstrip("+").partition("=")
        if key in _OWN_KEYS:
            raise ConfigError(key, value, "is set by lab/family.py; see --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog="python -m lab.family",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mixers", nargs="+", default=[*MIXERS], metavar="MIXER", help="default: all")
    parser.add_argument("--every", nargs="+", type=int, default=[0], metavar="N", help="default 0: no softmax layers")
    parser.add_argument("--size", default="tiny", help="of the files configs/model/MIXER_SIZE.yaml; default tiny")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of sp=zeco; default 2")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument("--dtype", choices=[each.name for each in Dtype], default="fp64", help="default fp64")
    parser.add_argument("--limit", type=float, metavar="X", help=f"default: {_limits()}")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="for all runs; default 60")
    parser.add_argument("--folder", type=user_path, default=Path("runs/family"), help="default runs/family")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of train.py, for all runs; after --")
    return parser.parse_args(arguments)


def _limits() -> str:
    return ", ".join(f"{limit:g} with {dtype.name}" for dtype, limit in LIMITS.items())


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    try:
        return Family(parse(arguments)).run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
