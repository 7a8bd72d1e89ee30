"""Progress display of rank 0: a bar on a terminal, plain lines otherwise; and the summary line."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

from zeco_train.system.numbers import clock
from zeco_train.system.terminal import visible
from zeco_train.tracking.metrics import StepMetrics

logger = logging.getLogger(__name__)

# Assumed size of a terminal that reports none.
_COLUMNS, _ROWS = 100, 24


class ProgressDisplay:
    """Shows the steps of a run on stdout, whether or not it is a terminal.

    If the output breaks (closed pipe, lost terminal), a warning is logged and the display is disabled; the run goes on.
    `step`: already done, in a resumed run; `enabled`: False on ranks > 0.
    """

    def __init__(self, total_steps: int, step: int = 0, *, enabled: bool = True) -> None:
        self.total_steps = total_steps
        self._stream: TextIO | None = sys.stdout if enabled else None
        self._first: tuple[int, float] | None = None
        self._bar: tqdm | None = None
        if self._stream is not None and self._stream.isatty():
            try:  # in containers and job launchers it may be 0 × 0
                known_size = min(os.get_terminal_size(self._stream.fileno())) > 0
            except OSError:
                known_size = False
            # No tqdm rate: it would count steps, and include checkpoints and validations.
            self._bar = tqdm(
                total=total_steps,
                initial=step,
                file=self._stream,
                dynamic_ncols=known_size,
                ncols=None if known_size else _COLUMNS,
                nrows=None if known_size else _ROWS,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def advance(self, step: int) -> None:
        """Advance the bar to `step` steps done; plain lines are printed by `report` only."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, row: Mapping[str, Any], validated: str = "") -> None:
        """Show a row of metrics (`StepMetrics.as_dict()`); `validated` is what its `val_loss` is of."""
        step, parts = row["step"], dict[str, str]()
        for column in fields(StepMetrics):
            name, facts = column.name, column.metadata
            if name in row and "shown" in facts and (self._bar is None or not facts.get("in_lines_only")):
                place = facts.get("behind", name)
                parts[place] = parts.get(place, "") + facts["shown"](row[name])
                if name == "val_loss" and validated and self._bar is None:
                    parts[place] += f" ({validated})"
        text = "  ".join([*parts.values(), f"ETA {clock(self._seconds_left(row))}"])
        if self._bar is not None:
            self.advance(step)
            self._bar.set_postfix_str(text)
        else:
            width = len(str(self.total_steps))
            self._print(f"step {step:{width}d}/{self.total_steps}  {text}")

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._print(text)

    def close(self) -> None:
        """Leave the bar as it is and end its line. May be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _seconds_left(self, row: Mapping[str, Any]) -> float:
        # At the pace since the first report, which excludes start-up in the first steps.
        step, now = row["step"], time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            seconds_per_step = row["step_seconds"]
        else:
            seconds_per_step = (now - self._first[1]) / (step - self._first[0])
        return max(0.0, seconds_per_step * (self.total_steps - step))

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        text = visible(text)
        try:
            if self._bar is not None:
                tqdm.write(text, file=self._stream)
            else:
                print(text, file=self._stream)
            self._stream.flush()
        except OSError as error:
            logger.warning("no more progress is shown, the output is closed: %s", error)
            if self._stream is sys.stdout:
                # Other writes to stdout would fail too, at the latest the flush at interpreter exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stream = None


def summary_line(rows: Sequence[Mapping[str, Any]], run_dir: str | Path, rate: float, validated: str = "") -> str:
    """One-line summary of a run: steps, first → last loss, throughput, results folder.

    `rate`: tokens/s of this start, over all its time; beside it stands the median of the steps' rates. `validated`: as
    of `ProgressDisplay.report`.
    """
    where = f"results in {run_dir}"
    if not rows:
        return f"no step was logged, {where}"
    last = rows[-1]
    steps = "1 step" if last["step"] == 1 else f"{last['step']} steps"
    # None stands for NaN and infinities in rows read from metrics.jsonl.
    losses = [math.nan if row.get("loss") is None else row["loss"] for row in rows]
    loss = f"loss {losses[0]:.2f} → {losses[-1]:.2f}"
    if last.get("val_loss") is not None:
        loss += f" (validation {last['val_loss']:.2f}{f' {validated}' if validated else ''})"
    in_steps = median(row.get("tokens_per_second") or 0.0 for row in rows)
    return f"{steps}, {loss}, {rate:,.0f} tokens/s ({in_steps:,.0f} within steps), {where}"
