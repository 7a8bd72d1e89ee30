"""Streaming detokenisation: returns only text that no later token can change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.tokenizer import Tokenizer

# Replacement character for invalid or incomplete UTF-8. Up to three of a character's four bytes may be present, and a
# decoder may emit one mark for each.
_MARK = "\ufffd"
_MOST_MARKS = 3
# Preceding tokens decoded as context: enough for a tokenizer's treatment of word boundaries.
_CONTEXT = 8
_MOST_IDS = 64


class TextStream:
    """Decodes a sequence token by token.

    The pieces join to the text of context and tokens decoded at once, without as many characters as the context's text
    has; the context is the tokens before the first.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] | NDArray[np.integer] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = self._end_of(context)
        self._given = len(self._decode(self._ids))

    def add(self, token: int) -> str:
        """The text that is certain with this token; "" while later tokens may change it."""
        self._ids.append(token)
        if token in self._tokenizer.open_ids:
            return ""
        text = self._decode(self._ids)
        piece = self._give(text, _settled(text))
        if len(self._ids) > _MOST_IDS:
            # Bounds the work per token, however long the text.
            self._ids = self._end_of(self._ids)
            self._given = _settled(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """The remaining text, after the last token."""
        text = self._decode(self._ids)
        return self._give(text, len(text))

    def _give(self, text: str, stop: int) -> str:
        piece = text[self._given : stop]
        self._given = max(self._given, stop)
        return piece

    def _end_of(self, ids: Sequence[int] | NDArray[np.integer]) -> list[int]:
        # From which on the text is decoded as it is after all ids before.
        start = max(len(ids) - _CONTEXT, 0)
        # Not within ids that are decoded together, and with some text: a decoder treats the first text differently.
        while start and (int(ids[start]) in self._tokenizer.open_ids or not self._decode(ids[start:])):
            start -= 1
        return [int(token) for token in ids[start:]]

    def _decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64))


def _settled(text: str) -> int:
    # Length of the prefix that no later token can change.
    return len(text) - min(len(text) - len(text.rstrip(_MARK)), _MOST_MARKS)


class StopTexts:
    """Ends a text before the first stop string; none of them is empty."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is certainly before any stop string; sets `found` when one occurs."""
        text = self._held + piece
        places = [(place, stop) for stop in self._texts if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    # Of the longest suffix of `text` that is a proper prefix of `stop`.
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if stop.startswith(text[-size:])), 0)
