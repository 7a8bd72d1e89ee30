"""Streaming output of generated texts, and the JSON file of results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from zeco_train.generate.generator import Completion
from zeco_train.system.files import jsonable, write_result
from zeco_train.system.terminal import is_reader_gone, visible


class Printer:
    """Prints texts in order of prompt and sample; the first unfinished text is streamed.

    Args:
        total: number of texts, several with a heading each.
        samples: per prompt.
        out: output stream. On a terminal, control characters in generated text are escaped; a file or a pipe gets the
            text unchanged.
    """

    def __init__(self, total: int, samples: int, out: TextIO, stream: bool = True) -> None:
        self._total, self._samples, self._out, self._stream = total, samples, out, stream
        self._is_terminal = out.isatty()
        self._waiting: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        # The text being printed, and whether its heading has been printed.
        self._current, self._is_begun = 0, False
        self._last = "\n"
        self.is_closed = False  # the reader has closed the pipe, as after `| head`

    def emit(self, prompt: int, sample: int, piece: str, is_last: bool) -> None:
        number = prompt * self._samples + sample
        self._waiting.setdefault(number, []).append(piece)
        if is_last:
            self._ended.add(number)
        self._show()

    def finish(self, completions: Sequence[Completion]) -> None:
        """Print the remaining texts of all ranks."""
        texts = {completion.prompt * self._samples + completion.sample: completion.text for completion in completions}
        for number in range(self._current, self._total):
            if number not in self._ended:
                # Texts without a completion never began, because of a stop request.
                self._waiting[number] = [texts.get(number, "")]
                self._ended.add(number)
        self._show()

    def _show(self) -> None:
        while self._current < self._total:
            pieces, is_over = self._waiting.get(self._current), self._current in self._ended
            if pieces is None or not (is_over or self._stream):
                return
            text = "".join(pieces)
            pieces.clear()
            if not self._is_begun and self._total > 1:
                prompt, sample = divmod(self._current, self._samples)
                of = f", sample {sample + 1}" if self._samples > 1 else ""
                self._write(f"== prompt {prompt + 1}{of}\n")
            self._is_begun = True
            self._write(text)
            if not is_over:
                return
            self._write("" if self._last == "\n" and text else "\n")
            self._current, self._is_begun = self._current + 1, False

    def _write(self, text: str) -> None:
        if not text or self.is_closed:
            return
        try:
            self._out.write(visible(text) if self._is_terminal else text)
            self._out.flush()
        except OSError as error:
            # Python flushes stdout at exit, which would fail again.
            self.is_closed = is_reader_gone(error)
            if not self.is_closed:
                raise
        self._last = text[-1]


def write_json(path: Path, prompts: Sequence[str], completions: Sequence[Completion], facts: Mapping[str, Any]) -> None:
    """Write the results to a file, or raise `DataError`."""
    rows = [
        {
            "prompt": prompts[c.prompt],
            "sample": c.sample,
            "seed": facts["sampling"]["seed"] + c.sample,
            "text": c.text,
            "tokens": c.tokens,
            "ended_by": c.ended_by,
        }
        for c in completions
    ]
    text = json.dumps(jsonable({**facts, "completions": rows}), indent=1, ensure_ascii=False)
    write_result(path, text + "\n")
