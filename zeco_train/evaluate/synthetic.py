"""The tasks `recall`, `needle`, …: recall accuracy by sequence length and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.config import DataKind, check_seq_len
from data.synthetic import SyntheticConfig, Task
from data.synthetic.tasks import Example, draws_for, make_task
from data.tokenizer import ByteTokenizer
from models.mixer_registry import check_document
from zeco_train.config.schema import to_plain
from zeco_train.errors import ConfigError
from zeco_train.evaluate.evaluation import Evaluation
from zeco_train.evaluate.scoring import Cut, Scores, score_examples
from zeco_train.evaluate.task_registry import TaskResult
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.backend import TappedScan
from zeco_train.system.figures import GREY, ORANGE, new_figure
from zeco_train.system.numbers import check_least, length_name
from zeco_train.training.forward import SequenceForward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = dict[int, Scores]


class ZeroedScan(TappedScan):
    """A scan that runs, but passes on zero states, to measure a model on its own shard alone."""

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        return torch.zeros_like(state)

    def carried(self, request: ScanRequest, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


@dataclass
class SyntheticTask:
    """Settings of a synthetic task; for the tasks see `data.synthetic.Task`.

    Attributes:
        lengths: of the sequences; empty is data.seq_len.
        depths: number of depths, evenly spaced from 0 (the beginning) to 1; 0: a random depth per example, as in
            training.
        examples: per length and depth.
        seed: of the examples, which are other ones than in training and its validation.
        tokens: maximum tokens per rank and forward pass; longer sequences are cut into segments.
        zeroed: repeat with the states that cross ranks and segments set to zero. Answers that are still right were not
            recalled through those states.
        facts: number of facts; pairs for recall, names for needle_multikey, numbers for needle_multivalue, boxes for
            variables, rings at most for counting; null: as in training, else 8, 4, 4, 4, 9.
        queries: number of queries, for recall; null: one per pair.
        alphabet: number of key symbols, and of value symbols, for recall; null: as in training, else 64.
        keys: number of keys in use, for recall; null: as in training, else all.
        digits: of the numbers of needles and variables; null: as in training, else 4.
    """

    lengths: list[int] = field(default_factory=list)
    depths: int = 5
    examples: int = 20
    seed: int = 0
    tokens: int = 16384
    zeroed: bool = False
    facts: int | None = None
    queries: int | None = None
    alphabet: int | None = None
    keys: int | None = None
    digits: int | None = None

    def validate(self) -> None:
        check_least(self, depths=0, examples=1, seed=0, tokens=1)
        if len(set(self.lengths)) < len(self.lengths):
            raise ConfigError("lengths", self.lengths, "names one twice")

    def prepare(self, evaluation: Evaluation, name: str) -> None:
        config, mesh, self.task = evaluation.config, evaluation.mesh, Task(name)
        self._asked = self._configure(evaluation)
        tokenizer = evaluation.trained.tokenizer if self.task.is_text else ByteTokenizer()
        self._maker = make_task(self._asked, tokenizer, evaluation.trained.model.vocab_size)
        self._lengths = sorted(self.lengths or [config.data.seq_len])
        for length in self._lengths:
            check_seq_len(length, mesh.sp_size, segments=config.train.segments, field=f"{self.task.value}.lengths")
            self._maker.check(length, f"{self.task.value}.lengths")
            check_document(config.model, f"{self.task.value}.lengths", length)
        cuts = [self._cut(length, evaluation) for length in self._lengths]
        if self.zeroed and mesh.sp_size == 1 and all(cut.segments == 1 for cut in cuts):
            allowed = "no state crosses ranks or segments here: use more ranks, or train.segments"
            raise ConfigError(f"{self.task.value}.zeroed", "true", allowed)

    def run(self, evaluation: Evaluation) -> TaskResult:
        tables = {"": self._table(evaluation, evaluation.forward)}
        if self.zeroed:
            zeroed = evaluation.exchange.wrapped(ZeroedScan)
            forward = SequenceForward(evaluation.forward.model, zeroed, evaluation.mesh)
            tables["zeroed"] = self._table(evaluation, forward)
        return self._result(evaluation, tables)

    def _configure(self, evaluation: Evaluation) -> SyntheticConfig:
        # As set, else as in the run's training on this task, else the defaults.
        trained, data = SyntheticConfig(task=self.task), evaluation.config.data
        if data.kind is DataKind.synthetic and data.synthetic.task is self.task:
            trained = data.synthetic
        own = {entry.name for entry in fields(self)} & {entry.name for entry in fields(SyntheticConfig)}
        # Unlike the others, `queries` is not taken from training: by default, every pair is asked for.
        values = {name: getattr(trained, name) for name in own - {"queries"}}
        values |= {name: getattr(self, name) for name in own if getattr(self, name) is not None}
        config = SyntheticConfig(task=self.task, **values)
        config.validate(self.task.value)
        return config

    def _cut(self, length: int, evaluation: Evaluation) -> Cut:
        return Cut.of(length, evaluation.mesh.sp_size, evaluation.config.train.segments, self.tokens)

    @property
    def _depths(self) -> list[float | None]:
        if self.depths == 0:
            return [None]
        return [place / max(1, self.depths - 1) for place in range(self.depths)]

    def _table(self, evaluation: Evaluation, forward: SequenceForward) -> Table:
        # The examples of a length are ordered by depth.
        table = {}
        for length in self._lengths:
            examples = [partial(self._example, length, *place) for place in product(self._depths, range(self.examples))]
            table[length] = score_examples(examples, forward, self._cut(length, evaluation), evaluation.enter)
        return table

    def _example(self, length: int, depth: float | None, index: int) -> Example:
        # The text separates these draws from the draws for training and its validation.
        draws = draws_for(self._asked, f"evaluation, length {length}, depth {depth}", self.seed, index)
        return self._maker.example(length, draws, depth)

    def _result(self, evaluation: Evaluation, tables: Mapping[str, Table]) -> TaskResult:
        metrics: dict[str, float] = {}
        lines, details, figures = [], {}, {}
        chance = self._maker.chance
        for name, table in tables.items():
            by_length = {length: scores.right.double().mean().item() for length, scores in table.items()}
            overall = sum(by_length.values()) / len(by_length)
            loss = torch.cat([scores.losses for scores in table.values()]).mean().item()
            prefix = f"{name}_" if name else ""
            metrics |= {f"{prefix}accuracy": overall, f"{prefix}loss": loss}
            if len(by_length) > 1:
                metrics |= {f"{prefix}accuracy@{length_name(length)}": right for length, right in by_length.items()}
            what = "incoming states zeroed" if name else "as it is"
            lines.append(f"  {what}: {overall:.1%} of answers right (chance {chance:.2g}), loss {loss:.4f}")
            columns = [self._by_depth(scores.right.double().mean(1)) for scores in table.values()]
            cells = [list(row) for row in zip(*columns, strict=True)]
            lines += _format_table(self._depths, list(table), cells)
            details[name or "whole"] = {
                "accuracy": cells,
                "loss": {str(length): self._by_depth(scores.losses) for length, scores in table.items()},
            }
            if evaluation.mesh.is_main:
                title = f"{evaluation.title}: {self.task.value}" + (f", {what}" if name else "")
                file = f"{self.task.value}{'_' + name if name else ''}.png"
                figures[file] = heat_map(
                    title,
                    list(table),
                    self._depths,
                    cells,
                    train_len=evaluation.train_len,
                    chance=chance,
                    caption=f"{self.examples} examples a cell",
                )
        facts = {
            "depths": self._depths,
            "lengths": self._lengths,
            "chance": chance,
            "asked": to_plain(self._asked),
            "segments": {str(length): self._cut(length, evaluation).segments for length in self._lengths},
        }
        return TaskResult(metrics, lines, {**facts, **details}, figures)

    def _by_depth(self, values: torch.Tensor) -> list[float]:
        return values.view(len(self._depths), -1).mean(1).tolist()


def _format_table(
    depths: Sequence[float | None], lengths: Sequence[int], cells: Sequence[Sequence[float]]
) -> list[str]:
    head = f"    {'depth':>8}" + "".join(f"{length_name(length):>8}" for length in lengths)
    rows = [
        f"    {'random' if depth is None else format(depth, '.0%'):>8}" + "".join(f"{cell:>8.1%}" for cell in row)
        for depth, row in zip(depths, cells, strict=True)
    ]
    return [head, *rows]


def heat_map(
    title: str,
    lengths: Sequence[int],
    depths: Sequence[float | None],
    accuracies: Sequence[Sequence[float]],
    *,
    train_len: int | None,
    chance: float,
    caption: str,
) -> Figure:
    """Draw accuracies [depths][lengths] from 0 to 1; a depth of None is a random one.

    `train_len` is marked if it is among the lengths. `chance` is the accuracy of a uniform guess.
    """
    width = max(5.5, 2.6 + 0.75 * len(lengths))
    figure = new_figure(title, (width, max(2.9, 1.9 + 0.38 * len(depths))), dpi=130, title_size=12)
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    image = axes.imshow(accuracies, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
    axes.set_yticks(range(len(depths)), ["random" if depth is None else f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("depth")
    for row, of_depth in enumerate(accuracies):
        for column, accuracy in enumerate(of_depth):
            color = "black" if accuracy > 0.6 else "white"
            axes.text(column, row, f"{100 * accuracy:.0f}", ha="center", va="center", color=color, fontsize=9)
    if train_len in lengths:
        box = Rectangle((lengths.index(train_len) - 0.5, -0.5), 1, len(depths), fill=False, clip_on=False)
        box.set(edgecolor=ORANGE, linewidth=2.5)
        axes.add_patch(box)
        caption = f"{caption}; framed: the length of the training"
    bar = figure.colorbar(image, ax=axes, label="answers right")
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 %", "25 %", "50 %", "75 %", "100 %"])
    bar.ax.axhline(chance, color=ORANGE, linewidth=2)
    figure.supxlabel(f"{caption}; orange on the scale: chance, {100 * chance:.2g} %", fontsize=8, color=GREY)
    return figure
