"""Progress of a long preparation on stderr: a bar on a terminal, else a plain line every 10 s."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tqdm import tqdm

from zeco_train.system.numbers import clock, compact
from zeco_train.system.terminal import visible

_LINE_SECONDS = 10.0


def announce_hub(name: str) -> None:
    """Say so if a name will be looked up on the Hugging Face hub, whose library prints nothing for up to a minute."""
    from huggingface_hub import constants  # with `datasets` or `transformers`, which the caller has imported

    if not (constants.HF_HUB_OFFLINE or Path(name).exists()):
        wait = "up to a minute if it cannot be reached; HF_HUB_OFFLINE=1 takes only what is on this machine"
        print(f"asking the Hugging Face hub for {visible(name)} ({wait})", file=sys.stderr, flush=True)


class Display:
    """Shows progress on stderr.

    Args:
        total: total work, in units of `amount` ("bytes", "documents", "shards").
        done, tokens: work done by earlier runs.
    """

    def __init__(self, total: float, amount: str, done: float = 0.0, tokens: int = 0) -> None:
        self._total, self._done, self._unit = total, done, "B" if amount == "bytes" else f" {amount}"
        self._first_done, self._first_tokens = done, tokens
        self._start = self._last = time.monotonic()
        self._bar: tqdm[None] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit=self._unit, unit_scale=True, desc="prepare")

    def close(self) -> None:
        """Close the bar, and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: float, tokens: int) -> None:
        """Add `amount` to the work done; `tokens` is the total so far."""
        self._done += amount
        now = time.monotonic()
        rate = (tokens - self._first_tokens) / max(now - self._start, 1e-9)
        speed = f"{tokens:,} tokens, {compact(rate)} tokens/s"
        if self._bar is not None:
            # `update` draws it at tqdm's own rate; a refresh here would draw for every part.
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(amount)
        elif now - self._last >= _LINE_SECONDS:
            self._last = now
            print(f"prepare: {self._share(now - self._start)}, {speed}", file=sys.stderr, flush=True)

    def _share(self, seconds: float) -> str:
        """Progress and remaining time."""
        done, total = (compact(value) for value in (self._done, self._total))
        share = f"{done} of {total}{self._unit} ({self._done / max(self._total, 1e-9):.1%})"
        if self._done > self._first_done:
            left = (self._total - self._done) * seconds / (self._done - self._first_done)
            share += f", {clock(max(0.0, left))} left"
        return share
